"""What the benchmark for machines with a GPU compares with: `triton.autotune` and Helion, beside
doubles of the driver, of torch and of Helion."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cuda_double import stand_in

from benchmarks import gpu_rivals
from benchmarks.gpu_rivals import autotuned, helion
from benchmarks.gpu_tuning import Result, Run
from benchmarks.triton_builds import layer
from tuna.configs import DataType, GemmConfig
from tuna_triton.tiles import AXES, tile_text

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = GemmConfig(96, 80, 64, data_type=DataType.BF16)
EXPERTS = dataclasses.replace(layer(4), experts=8, topk=2, hidden=256)
TILE = tile_text(dict(zip(AXES, (32, 64, 32, 1, 4, 2), strict=True)))


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of the driver, which both rivals find with a torch."""
    pytest.importorskip("triton", reason="needs the extra `triton`")
    variables = stand_in.variables(stand_in.install(tmp_path / "driver"))
    rivals = str(Path(stand_in.__file__).with_name("rivals"))
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], rivals])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


class Tuned(Run):
    """A run that has ended with this winner."""

    def __init__(self, name: str, winner: str, config: str, **figures: float) -> None:
        super().__init__(name, Path("unused"))
        self._winner, self._config, self._figures = winner, config, figures

    @property
    def is_done(self) -> bool:
        return True

    def earlier(self) -> dict[str, float]:
        return self._figures

    def winners(self) -> dict[str, Result]:
        solver = "TritonGemm" if self.name == "product" else "TritonMoe"
        return {self._config: Result(self._winner, 0.5, solver)}


def answering(*lines: Mapping[str, Any]) -> Any:
    """A rival's process that prints these lines."""
    return lambda *_: iter(lines)


@pytest.mark.service
def test_helions_winner_is_timed_in_turn_with_ours(device: None, tmp_path: Path) -> None:
    run = Tuned("product", TILE, PRODUCT.json_text(), wall_s=0.5)
    found = helion(PRODUCT, run, 200, tmp_path)
    assert found.left_out == []
    figures = found.outcome.figures
    assert figures["failed"] == 0
    assert figures["whole"] == 1
    assert figures["winner_share"] > 0
    assert [(one["cause"], one["time_ms"]) for one in found.trials] == [
        ("error", None),
        (None, 0.25),
    ]


@pytest.mark.service
def test_tritons_autotuner_tries_the_tiles_by_its_own_clock(device: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_autotune", EXPERTS.json_text(), "TritonMoe"]
    done = subprocess.run(
        [*command, "100", "2"],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *trials, end = map(json.loads, done.stdout.splitlines())
    assert [one["cause"] for one in trials] == [None, None]
    assert min(trials, key=lambda one: one["time_ms"])["params"] == end["best"]
    assert (end["tiles"], end["tried"], end["torch"]) == (2, 2, "0.double")


def test_helion_that_cannot_be_imported_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named filecheck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = helion(PRODUCT, Run("product", tmp_path / "none"), 60, tmp_path)
    assert found.left_out == ["Helion: ImportError: No module named filecheck"]
    assert found.outcome.missed == set()


def test_a_share_of_the_tiles_tells_what_all_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = {"params": TILE, "time_ms": 1.0, "low_ms": 1.0, "high_ms": 1.0, "cause": None}
    end = {"seconds": 50.0, "tiles": 640, "tried": 160, "best": TILE, "torch": "2.11"}
    monkeypatch.setattr(gpu_rivals, "lines_of", answering(trial, end))
    config = EXPERTS.json_text()
    runs: dict[str, Run] = {"exhaustive": Tuned("exhaustive", TILE, config, wall_s=20.0)}
    runs["search"] = Tuned("search", TILE, config, wall_s=20.0)
    found = autotuned(EXPERTS, runs, 200)
    figures = found.outcome.figures
    assert figures["whole_s"] == 200
    assert figures["exhaustive_share"] == figures["search_share"] == 0.1
    assert found.outcome.missed == {"search_share"}  # 0.04 at most, of all tiles 0.12
    assert figures["winner_share"] == 1  # the same tile
    assert found.left_out == ["triton.autotune of 480 of 640 tiles"]


def test_a_tuning_that_was_cut_off_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    end = {"seconds": 50.0, "tiles": 2, "tried": 2, "best": None, "torch": "2.11"}
    monkeypatch.setattr(gpu_rivals, "lines_of", answering(end))
    run = Tuned("exhaustive", TILE, EXPERTS.json_text(), wall_s=1.0, cut_off=1.0)
    found = autotuned(EXPERTS, {"exhaustive": run}, 200)
    assert "exhaustive_share" not in found.outcome.figures
    assert found.left_out == [
        "exhaustive beside triton.autotune: it did not end",
        "search beside triton.autotune: it did not end",
        "winner against winner: one has none",
    ]
