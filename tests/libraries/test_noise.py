"""What builds do to measurements: what is measured, kept and concluded."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from test_candidates import ToyLibrary

from tuna.errors import TunaError
from tuna.libraries import noise_records
from tuna.libraries.noise_records import NoiseRecord, quiet_needed
from tuna.sandbox import core_lending
from tuna.settings import Settings
from tuna_noise import noise
from tuna_noise.noise import TurnPair

CPUS = sorted(os.sched_getaffinity(0))


def _settings(home: Path, quiet: str = "auto") -> Settings:
    return Settings(home=home, quiet=quiet, eval_cpus=",".join(map(str, CPUS[1:])))


def _found(settings: Settings, change: float) -> NoiseRecord:
    found = {"compute": {"cpu": 0.001, "wall": -0.02}, "memory": {"cpu": change}}
    return NoiseRecord(
        "2026-11-22T10:00:00+00:00", noise_records.machine_identity(settings), "tvm", 1, 15, found
    )


@pytest.mark.parametrize(("change", "noisy"), [(0.031, True), (0.029, False), (-0.2, False)])
def test_builds_disturb_above_three_percent(tmp_path: Path, change: float, noisy: bool) -> None:
    settings = _settings(tmp_path)
    noise_records.store(_found(settings, change), settings)
    assert noise_records.last(settings) == _found(settings, change)
    assert quiet_needed(settings).needed is noisy
    assert f"changed times by {max(change, 0.001):.1%}" in quiet_needed(settings).reason


def test_the_last_finding_counts(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    for change in (0.5, 0.0):
        noise_records.store(_found(settings, change), settings)
    assert not quiet_needed(settings).needed
    assert len(list(tmp_path.glob("noise/*"))) == 1


def test_a_setting_stands_above_what_was_found(tmp_path: Path) -> None:
    for quiet, change in (("yes", 0.0), ("no", 0.5)):
        settings = _settings(tmp_path, quiet)
        noise_records.store(_found(settings, change), settings)
        assert quiet_needed(settings) == quiet_needed(settings, cores_only=False)
        assert (quiet_needed(settings).needed, quiet_needed(settings).reason) == (
            quiet == "yes",
            f"TUNA_QUIET={quiet}",
        )


def test_what_was_found_on_cores_says_nothing_of_other_devices(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    noise_records.store(_found(settings, 0.5), settings)
    assert quiet_needed(settings).needed
    assert not quiet_needed(settings, cores_only=False).needed


@pytest.mark.parametrize("other", ["host", "cpu", "cores", "measuring", "machine_id"])
def test_a_finding_of_another_machine_in_the_same_home_does_not_count(
    tmp_path: Path, other: str
) -> None:
    settings = _settings(tmp_path)
    found = _found(settings, 0.5)
    noise_records.store(dataclasses.replace(found, machine={**found.machine, other: "x"}), settings)
    assert noise_records.last(settings) is None
    assert "was not run on this machine" in quiet_needed(settings).reason


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"noisy": true}', '{"noisy": 1, "differences": {"a": {"b": "c"}}}']
)
def test_a_damaged_finding_is_none(tmp_path: Path, text: str) -> None:
    settings = _settings(tmp_path)
    noise_records.store(_found(settings, 0.5), settings)
    (path,) = tmp_path.glob("noise/*")
    path.write_text(text)
    assert not quiet_needed(settings).needed


def test_the_difference_is_the_median_over_pairs_by_kernel_and_clock() -> None:
    beside = [{"k": {"cpu": 2.0, "wall": 9.0}}, {"k": {"cpu": 1.1}}, {"k": {"cpu": 1.0}}]
    alone = [
        {"k": {"cpu": 1.0, "wall": 3.0}},
        {"k": {"cpu": 1.0}},
        {"k": {"cpu": 1.0, "wall": 1.0}},
    ]
    pairs = [TurnPair(one, other, 1.0, 0.0) for one, other in zip(beside, alone, strict=True)]
    assert noise.differences(pairs) == {"k": {"cpu": pytest.approx(0.1)}}, (
        "of three pairs only one knows the wall time"
    )
    assert noise.differences(pairs[:1]) == {"k": {"cpu": 1.0, "wall": 2.0}}


@pytest.fixture
def toy_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(noise, "_TURN_S", 0.02)
    monkeypatch.setattr(noise, "names", lambda: ["toy"])
    monkeypatch.setattr(noise, "find_library", lambda _: ToyLibrary())


@pytest.mark.service
@pytest.mark.skipif(len(CPUS) < 2, reason="builds would run on the core that is measured")
def test_kernels_are_timed_beside_builds_and_without_them(tmp_path: Path, toy_builds: None) -> None:
    settings = _settings(tmp_path)
    pairs = list(noise.pairs(settings, 2))
    for pair in pairs:
        assert {"cache", "memory"} <= pair.beside.keys() == pair.alone.keys()
        assert pair.beside["cache"]["cpu"] > 0
        assert pair.busy_alone < 0.2
    assert core_lending.builds() == 0
    found = noise.record(settings, pairs)
    assert (found.library, found.builds, found.pairs) == ("toy", 1, 2)


def test_noise_says_where_nothing_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "names", lambda: [])
    with pytest.raises(TunaError, match="No library on this machine builds anything"):
        list(noise.pairs(_settings(tmp_path), 1))


def test_builds_that_fail_are_no_load(
    tmp_path: Path, toy_builds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyLibrary, "builder", "toy_kernel:NoSuchBuilder")
    with pytest.raises(TunaError, match=r"The builds of toy failed: .*NoSuchBuilder"):
        list(noise.pairs(_settings(tmp_path), 1))
