"""Candidates on an NVIDIA device, whose driver is a stand-in: each fault is named, the next
candidate is fine, and what was measured is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cuda_double
import pytest
from cuda_double.stand_in import install
from one_solver import OneSolverLibrary
from pydantic import Field

from tuna.configs import Config, DataType, GemmConfig
from tuna.libraries.base import FINALS, Environment
from tuna.libraries.candidates import CandidateOptions
from tuna.libraries.context import DeviceHandle
from tuna.libraries.items import Rival, StepResult, WorkItem
from tuna.libraries.measuring_processes import StartedProcesses
from tuna.libraries.steps import find_step
from tuna.testing.rehearsal import follow, run_context
from tuna.vocabulary import Cause
from tuna_triton.library import TritonLibrary

pytestmark = pytest.mark.service

CONFIG = GemmConfig(48, 40, 32, data_type=DataType.FP16)


class CudaToyOptions(CandidateOptions):
    """With what the toys are told to do."""

    params: str = Field("", description="how its candidates behave, separated by |")


class CudaToyLibrary(OneSolverLibrary):
    """Measures as the Triton library does."""

    name = "cuda_toy"
    options = CudaToyOptions
    builder = "cuda_double.toys:CudaToyBuilder"
    loader = TritonLibrary.loader
    measuring = TritonLibrary.measuring
    suffix = TritonLibrary.suffix
    budgets = TritonLibrary.budgets
    device_code_only = TritonLibrary.device_code_only
    conditions = ()
    variables: Mapping[str, str] = {}

    def child_variables(self, threads: int) -> Mapping[str, str]:
        return {**super().child_variables(threads), **self.variables}

    def environment(self) -> Environment:
        return Environment(self.name, "1", "sm_90", 132, "toy-1", device="a toy")


class CudaToys:
    """A library and what a worker lends it."""

    def __init__(self, folder: Path) -> None:
        self.library, context = CudaToyLibrary(), run_context(folder)
        uuid = cuda_double.UUID
        self.device = DeviceHandle(uuid, uuid, {"CUDA_VISIBLE_DEVICES": uuid}, context.cpus)
        self.context = dataclasses.replace(context, device=self.device)

    def built(self, *params: str, config: Config = CONFIG, **options: Any) -> WorkItem:
        """An item with these candidates, ready to be measured."""
        asked = {"params": "|".join(params), "candidates": len(params), "measure_timeout_s": 4}
        facts = {"job_id": 1, "attempt": 1, "session_id": 1, "library": "cuda_toy"}
        item = WorkItem(
            step="compile",
            solver="Toy",
            config=config.to_json(),
            options={**asked, **options},
            **facts,
        )
        (built,) = self.library.run(find_step(self.library, "compile"), [item], self.context)
        assert built.ok, built.output_tail
        return follow(item, built, "eval")

    def measured(self, *items: WorkItem) -> list[StepResult]:
        return list(self.library.run(find_step(self.library, "eval"), items, self.context))

    @property
    def starts(self) -> int:
        """Number of processes that measured one after the other."""
        assert isinstance(self.library.processes, StartedProcesses)
        assert self.library.processes.kept is not None
        return self.library.processes.kept.starts


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in."""
    made = install(tmp_path / "driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(made))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return made


@pytest.fixture
def toys(tmp_path: Path, fake: Path) -> Iterator[CudaToys]:
    made = CudaToys(tmp_path / "work")
    yield made
    made.library.close()


def test_each_fault_is_named_and_the_next_candidate_is_fine(toys: CudaToys) -> None:
    faults = {
        "error=700": (Cause.RUN_ERROR, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        "outside=1": (Cause.RUN_ERROR, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        "error=719 at=40": (Cause.RUN_ERROR, "CUDA_ERROR_LAUNCH_FAILED"),
        "launch=701": (Cause.RUN_ERROR, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        "hang=1": (Cause.RUN_TIMEOUT, "no answer within 4 s"),
        "static_shared=200000": (Cause.RUN_ERROR, "CUDA_ERROR_INVALID_VALUE"),
        "name=other": (Cause.RUN_ERROR, "CUDA_ERROR_NOT_FOUND"),
        "wrong_after=0": (Cause.WRONG_RESULT, "the largest error is"),
        "wrong_after=3": (Cause.WRONG_RESULT, "the largest error is"),
        "part=1": (Cause.WRONG_RESULT, "not all of the output was written"),
    }
    ways = [way for number, fault in enumerate(faults) for way in (fault, f"time_us={20 + number}")]
    (result,) = toys.measured(toys.built("time_us=20.5", *ways))
    first, *others = result.trials
    assert (first.cause, first.time_ms) == (None, pytest.approx(0.0205, rel=1e-3))
    for trial, (cause, words) in zip(others[::2], faults.values(), strict=True):
        assert (trial.cause, words in trial.output_tail) == (cause, True), trial.output_tail
    for number, trial in enumerate(others[1::2]):
        assert trial.cause is None, trial.output_tail
        assert trial.time_ms == pytest.approx((20 + number) / 1e3, rel=1e-3)
    assert result.ok
    # one process, and another one after each fault that a process cannot survive
    assert toys.starts == 1 + len(["error=700", "outside=1", "error=719 at=40", "hang=1"])


def test_a_lost_device_is_no_candidates_fault(toys: CudaToys, fake: Path) -> None:
    good, lost = toys.built("time_us=20"), toys.built("time_us=21", "error=214")
    before, failed, after = toys.measured(good, lost, good)
    assert (before.ok, after.ok) == (True, True)
    assert (failed.ok, failed.cause, failed.trials) == (False, Cause.DEVICE_LOST, ())
    assert "CUDA_ERROR_ECC_UNCORRECTABLE" in failed.output_tail
    assert toys.library.device.probe(toys.device) == ""
    (fake / "lost").touch()
    (failed,) = toys.measured(good)
    assert failed.cause is Cause.DEVICE_LOST
    assert "no CUDA-capable device is detected" in toys.library.device.probe(toys.device)
    (fake / "lost").unlink()
    assert toys.library.device.probe(toys.device) == ""
    assert toys.measured(good)[0].ok


def test_a_machine_without_the_driver_says_so(toys: CudaToys, fake: Path) -> None:
    (fake / "libcuda.so.1").write_bytes(b"")
    assert "libcuda.so.1" in toys.library.device.probe(toys.device)


def test_inputs_that_do_not_fit_are_named_and_others_are_measured(toys: CudaToys) -> None:
    toys.library.variables = {"FAKE_CUDA_MEMORY": str((128 << 20) + (256 << 10))}
    large = GemmConfig(4096, 16, 16384, data_type=DataType.FP16)
    too_large, fits = toys.measured(toys.built("time_us=20", config=large), toys.built("time_us=9"))
    assert (too_large.cause, fits.ok) == (Cause.RUN_ERROR, True)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in too_large.output_tail


def test_of_a_large_answer_rows_all_over_it_are_read(toys: CudaToys) -> None:
    large = GemmConfig(1500, 1000, 4)
    (result,) = toys.measured(toys.built("time_us=20", "part=1", "wrong_after=0", config=large))
    assert [trial.cause for trial in result.trials] == [None, *2 * [Cause.WRONG_RESULT]]
    assert (result.trials[0].max_error or 1) < 1e-6


def test_equal_code_is_measured_once(toys: CudaToys) -> None:
    (result,) = toys.measured(
        toys.built("time_us=20 spread=0.1", "time_us=21", *2 * ["time_us=20 spread=0.1"])
    )
    first, other, *same = result.trials
    assert [trial.index for trial in result.trials] == [0, 1, 2, 3]
    assert {trial.times_ms for trial in same} == {first.times_ms} != {other.times_ms}


def test_the_best_are_measured_again_in_a_fresh_process_and_in_finals(toys: CudaToys) -> None:
    item = toys.built("time_us=20", "time_us=21", "time_us=90")
    (result,) = toys.measured(item)
    close, slow = result.trials[:2], result.trials[2]
    assert slow.ended_early
    assert all(len(trial.times_ms) >= 2 * 3 for trial in close)
    assert {trial.clock for trial in result.trials} == {"own"}
    rivals = tuple(
        Rival(
            index=70 + one.index,
            number=one.index,
            params="",
            artifact=one.artifact,
            solver="Toy",
            seed=0,
            options=item.options,
            time_ms=1.0,
        )
        for one in item.candidates[:2]
    )
    (finals,) = toys.library.run(
        find_step(toys.library, FINALS),
        [item.model_copy(update={"step": FINALS, "rivals": rivals})],
        toys.context,
    )
    assert [round(trial.time_ms or 0, 4) for trial in finals.trials] == [0.02, 0.021]


def test_a_throttled_device_makes_results_noisy(toys: CudaToys, fake: Path) -> None:
    item = toys.built("time_us=20", "time_us=21")
    (quiet,) = toys.measured(item)
    (fake / "reasons").write_text(str(0x04))  # the power cap
    (capped,) = toys.measured(item)
    (fake / "reasons").write_text(str(0x20))  # heat
    (hot,) = toys.measured(item)
    (fake / "reasons").unlink()
    (fake / "mhz").write_text("1200")
    (slow,) = toys.measured(item)
    assert [one.noisy for one in (quiet, capped, hot, slow)] == [False, False, True, True]
    assert quiet.drift == 0.0
    assert quiet.device is not None
    assert quiet.device.peak_gflops == pytest.approx(2 * 132 * 128 * 1.98)
    assert quiet.device.peak_source == "device"


def test_a_device_that_became_slower_shows_as_drift(toys: CudaToys) -> None:
    """By the first candidate, which is measured again after the last one."""
    (result,) = toys.measured(toys.built("time_us=20 slower_us=2", "time_us=30", "time_us=31"))
    assert result.noisy
    assert 0.05 < (result.drift or 0) < 0.11
