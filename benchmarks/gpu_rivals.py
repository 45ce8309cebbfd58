"""Stages of `benchmarks.gpu` that compare with what users tune by today: `triton.autotune` and
Helion, each in a process of its own."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_tuning import Run
from benchmarks.harness import Outcome
from tuna.configs import Config

ROOT = Path(__file__).resolve().parents[1]
#: Wall time at most, as a share of the rival's for the same tiles or the same product.
EXHAUSTIVE_SHARE, SEARCH_SHARE, HELION_SHARE = 0.12, 0.04, 0.25
#: Times of our winner at most, as a share of the rival's.
WINNER_SHARE = 1.02
#: Seconds of a stage that are kept for its start, and for its winners in turn.
_START_S, _VERSUS_S = 15.0, 40.0


@dataclass
class Rivalry:
    """What came of a stage."""

    outcome: Outcome
    #: Comparisons that were not made, and why.
    left_out: list[str] = field(default_factory=list)
    #: Trials of the rival, as lines for a file of trials.
    trials: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def lines_of(module: str, words: Sequence[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Run a module that prints lines of JSON, for so many seconds at most; a last line has `failed`
    where it did not end well."""
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(paths)}
        out, errors = Path(cache, "out"), Path(cache, "errors")
        with out.open("wb") as one, errors.open("wb") as other:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words], env=env, stdout=one, stderr=other
            )
            try:
                code: int | None = process.wait(max(seconds, 1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
        yield from (json.loads(one) for one in out.read_text().splitlines() if one[:1] == "{")
        if code is None:
            yield {"failed": f"{module} was ended after {seconds:.0f} s"}
        elif code:
            yield {"failed": f"{module}: code {code}: {errors.read_text(errors='replace')[-600:]}"}


def autotuned(layer: Config, runs: Mapping[str, Run], seconds: float, most: int = 0) -> Rivalry:
    """`triton.autotune` on the tiles of a layer, and its winner beside that of the first of `runs`,
    `exhaustive` and `search`, that has one; `most`: so many tiles, 0: all."""
    started = time.monotonic()
    done = {name: run for name, run in runs.items() if run.is_done}
    winners = {name: run.winners().get(layer.json_text()) for name, run in done.items()}
    ours = next((one for one in winners.values() if one is not None), None)
    solver = ours.solver if ours else "TritonMoe"
    limit_s = max(seconds - _START_S - _VERSUS_S, 5)
    words = [layer.json_text(), solver, f"{limit_s:.0f}", str(most)]
    rivalry = Rivalry(Outcome("gpu", {}))
    end: dict[str, Any] = {}
    for line in lines_of("benchmarks.gpu_autotune", words, limit_s + _START_S):
        if "params" in line:
            rivalry.trials.append(
                {"config": layer.to_json(), "solver": f"{solver} {_RIVAL}", **line}
            )
        else:
            end |= line
    figures, limits = rivalry.outcome.figures, rivalry.outcome.limits
    figures["tried"] = float(len(rivalry.trials))
    figures["failed"] = float("failed" in end)
    limits["failed"] = 0.0
    rivalry.more["rival"] = end
    if not end.get("tried"):
        rivalry.left_out.append(f"{_RIVAL}: {end.get('failed', 'no tile was tried')}")
        return rivalry
    share = end["tried"] / end["tiles"]
    figures |= {"seconds": end["seconds"], "tiles": float(end["tiles"]), "share": share}
    figures["whole_s"] = end["seconds"] / share  # told by the tiles that were tried
    figures["by_torch"] = float(end["torch"] is not None)
    if not end["torch"]:
        rivalry.left_out.append(f"{_RIVAL} by triton.testing.do_bench: torch cannot be imported")
    if end["tried"] < end["tiles"]:
        missing = end["tiles"] - end["tried"]
        rivalry.left_out.append(f"{_RIVAL} of {missing} of {end['tiles']} tiles")
    for name, share_at_most in (("exhaustive", EXHAUSTIVE_SHARE), ("search", SEARCH_SHARE)):
        if name in done and "cut_off" not in done[name].earlier():
            figures[f"{name}_share"] = done[name].earlier()["wall_s"] / figures["whole_s"]
            limits[f"{name}_share"] = share_at_most
        else:
            rivalry.left_out.append(f"{name} beside {_RIVAL}: it did not end")
    if ours is None or not end["best"]:
        rivalry.left_out.append("winner against winner: one has none")
        return rivalry
    pair = {"config": layer.to_json(), "solver": solver, "default": end["best"]}
    left_s = seconds - (time.monotonic() - started)
    _add_winners(rivalry, _in_turn({**pair, "tuned": ours.params}, left_s))
    return rivalry


_RIVAL = "triton.autotune"


def _in_turn(pair: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The times of two tiles in turn, of `gpu_versus`."""
    if pair["default"] == pair["tuned"]:
        return {"ratio": 1.0, "low": 1.0, "high": 1.0, "same": True}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pairs.json")
        path.write_text(json.dumps([pair]))
        words = [str(path), f"{max(seconds - _START_S, 5):.0f}"]
        (*_, answer) = lines_of("benchmarks.gpu_versus", words, max(seconds, 10))
    return answer


def _add_winners(found: Rivalry, answer: Mapping[str, Any]) -> None:
    """Add the times of both winners: `winner_share` is ours as a share of theirs."""
    found.more["winners"] = dict(answer)
    if "ratio" not in answer:
        found.left_out.append(f"winner against winner: {answer.get('failed', 'no answer')}")
        return
    found.outcome.figures["winner_share"] = 1 / answer["ratio"]
    found.outcome.limits["winner_share"] = WINNER_SHARE


def helion(product: Config, run: Run, seconds: float, folder: Path) -> Rivalry:
    """Helion's full effort on a product that `run` has tuned."""
    ours = run.winners().get(product.json_text()) if run.is_done else None
    limit_s = max(seconds - _START_S - _VERSUS_S, 5)
    words = [product.json_text(), ours.params if ours else "", f"{limit_s:.0f}", str(folder)]
    end: dict[str, Any] = {}
    for line in lines_of("benchmarks.gpu_helion", words, seconds - 2):
        end |= line
    rivalry = Rivalry(Outcome("gpu", {}), more={"rival": end})
    rivalry.trials = [
        {"config": product.to_json(), "solver": "Helion", **line}
        for line in _of_helion(folder / "helion.csv")
    ]
    figures, limits = rivalry.outcome.figures, rivalry.outcome.limits
    figures["tried"] = float(len(rivalry.trials))
    if "left_out" in end:
        rivalry.left_out.append(end["left_out"])
        return rivalry
    figures["failed"] = float("failed" in end)
    limits["failed"] = 0.0
    if "seconds" not in end:
        rivalry.left_out.append(f"Helion: {end.get('failed', 'no answer')}")
        return rivalry
    figures |= {"seconds": end["seconds"], "whole": float(end["whole"])}
    if not end["whole"]:
        rivalry.left_out.append(
            f"Helion's full effort beyond {limit_s:.0f} s: it takes longer than `seconds`"
        )
    if run.is_done and "cut_off" not in run.earlier():
        figures["tuna_share"] = run.earlier()["wall_s"] / end["seconds"]
        limits["tuna_share"] = HELION_SHARE
    if ours is None:
        rivalry.left_out.append("winner against winner: there is none of Tuna's")
    else:
        _add_winners(rivalry, end)
    return rivalry


def _of_helion(path: Path) -> Iterator[dict[str, Any]]:
    """Helion's log of its candidates as trials."""
    if not path.exists():
        return
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["status"] == "started":
                continue
            ok, time_ms = row["status"] == "ok", row["perf_ms"]
            yield {
                **{"params": row["config"], "low_ms": None, "high_ms": None},
                "time_ms": float(time_ms) if ok and time_ms else None,
                "cause": None if ok else row["status"],
            }
