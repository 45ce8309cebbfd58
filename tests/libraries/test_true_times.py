"""Clocks, intervals, peaks and probes: what a measurement says is true, or marked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuna.configs import GemmConfig
from tuna.libraries import cold_caches, fma_loop, measuring, probe, repeats
from tuna.libraries.fma_loop import CHAINS, FmaLoop
from tuna.libraries.intervals import half_width, median_interval
from tuna.libraries.items import Trial
from tuna.libraries.measurement import FINALISTS, RIVAL_PROCESSES, Contest, Limits, Measurement
from tuna.libraries.repeats import Repeat, Sampler
from tuna.sandbox.processes import ChildCrashed

# -- peak -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize(("bits", "register"), [(256, "ymm"), (512, "zmm")])
def test_the_loop_is_nothing_but_multiply_adds(tmp_path: Path, bits: int, register: str) -> None:
    loop, file = FmaLoop(bits), tmp_path / "loop"
    file.write_bytes(loop.code())
    command = [str(shutil.which("objdump")), "-D", "-b", "binary", "-m", "i386:x86-64", "--no-show-raw-insn", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = dict(re.findall(r"^ +([0-9a-f]+):\s+(.*?)\s*$", text, re.MULTILINE))
    words = list(lines.values())
    jump = next(place for place, word in enumerate(words) if word.startswith("jne"))
    body = words[list(lines).index(words[jump].split("0x")[1]) : jump]
    sums = [re.fullmatch(rf"vfmadd213ps %{register}15,%{register}14,%{register}(\d+)", word) for word in body[:-1]]
    assert [match and int(match[1]) for match in sums] == list(range(CHAINS))
    assert body[-1] == "dec    %rdi"
    assert words[jump + 1 :] == ["vzeroupper", "ret"]
    assert loop.step_flops == CHAINS * bits // 32 * 2
    assert all(
        word.startswith(f"vbroadcastss 0x{'4' if '15' in word else '0'}(%rsi)") for word in words[: jump - len(body)]
    )


def test_the_peak_is_above_what_numpy_reaches_and_adds_up() -> None:
    try:
        one = fma_loop.peak_gflops((min(os.sched_getaffinity(0)),))
    except fma_loop.Unavailable:
        pytest.skip("no loop for this CPU")
    a = np.ones((256, 256), dtype=np.float32)
    a @ a
    started = time.thread_time()
    for _ in range(20):
        a @ a
    product = 20 * 2 * 256**3 / max(time.thread_time() - started, 1e-9) / 1e9
    assert one > 0.9 * product / max(len(os.sched_getaffinity(0)), 1)
    both = fma_loop.peak_gflops(tuple(sorted(os.sched_getaffinity(0)))[:2])
    assert both > 0.7 * one * min(2, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("machine", "flags", "widths"),
    [
        ("x86_64", "fma avx2 avx512f", [512, 256]),
        ("x86_64", "fma avx2", [256]),
        ("x86_64", "avx", []),
        ("arm", "fma avx2", []),
    ],
)
def test_the_widths_are_those_of_the_cpu(tmp_path: Path, machine: str, flags: str, widths: list[int]) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: x\nflags\t\t: fpu {flags}\n")
    if widths:
        assert [loop.bits for loop in fma_loop.loops(tmp_path, machine)] == widths
    else:
        with pytest.raises(fma_loop.Unavailable):
            fma_loop.loops(tmp_path, machine)


def test_without_a_loop_the_yardstick_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(cpus: tuple[int, ...]) -> float:
        raise fma_loop.Unavailable

    monkeypatch.setattr(fma_loop, "peak_gflops", none)
    found = probe.probe()
    assert (found.source, found.gflops > 0, found.copy_s > 0) == ("gemm", True, True)
    assert (probe.probe(12.5).gflops, probe.probe(12.5).source) == (12.5, "own")


# -- intervals --------------------------------------------------------------------------------------------------------


def test_the_interval_of_the_median_holds_it_in_95_of_100_samples() -> None:
    generator = np.random.default_rng(1)
    for count in (6, 9, 20, 71):
        ends = [median_interval(sample) for sample in generator.exponential(size=(2000, count)).tolist()]
        held = np.mean([low <= np.log(2) <= high for low, high in ends])
        assert 0.94 <= held <= 0.99, count


def test_known_intervals() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval(range(1, 7)) == (1, 6)
    assert median_interval(range(1, 11)) == (2, 9)  # the tables of nonparametric statistics have 2 and 9 for n = 10
    assert median_interval(range(1, 26)) == (8, 18)  # and 8 and 18 for n = 25
    assert half_width([9.0, 10.0, 12.0], 10.0) == pytest.approx(0.2)


# -- repeats ----------------------------------------------------------------------------------------------------------


def spin(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def test_a_repeat_by_both_clocks_and_without_the_overhead() -> None:
    # NumPy's threads spin for a while after a matrix product of another test, and count as work of other threads.
    tries = (repeats.repeat(lambda: spin(0.004), 2, overhead_s=0.001) for _ in range(250))
    found = next(one for one in tries if one.cpu_ms is not None)
    assert found.cpu_ms == pytest.approx(1.0, rel=0.2)
    assert found.preempted or found.wall_ms == pytest.approx(1.0, rel=0.2)


def test_a_kernel_that_waits_is_not_preempted_and_its_cpu_time_says_nothing() -> None:
    assert repeats.repeat(lambda: time.sleep(0.005), 1).cpu_ms is None
    assert any(not repeats.repeat(lambda: time.sleep(0.005), 1).preempted for _ in range(20))


def test_beside_other_work_on_the_core_repeats_are_preempted() -> None:
    """With two processes on one core every slice ends by preemption, and the CPU time stays what it was."""
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [core])
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # it inherits the core
    try:
        time.sleep(0.1)
        found = [repeats.repeat(lambda: spin(0.02), 1) for _ in range(5)]
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, before)
    assert any(one.preempted for one in found)
    assert all(one.cpu_ms == pytest.approx(20, rel=0.1) for one in found)
    sampled = Sampler(iter([one._replace(preempted=True) for one in found]).__next__, budget_s=0)
    for _ in found:
        sampled.add()
    timing = sampled.timing()
    assert (timing.clock, timing.noisy) == ("cpu", True)
    assert timing.time_ms == pytest.approx(20, rel=0.1)


def script(*found: Repeat) -> Iterator[Repeat]:
    yield from found
    while True:
        yield found[-1]


def sampled(*found: Repeat, budget_s: float = 1.0, **options: Any) -> tuple[repeats.Timing, int]:
    """What a sampler makes of these repeats (the last one goes on for ever), and how many it took."""
    taken = 0
    source = script(*found)

    def once() -> Repeat:
        nonlocal taken
        taken += 1
        return next(source)

    sampler = Sampler(once, budget_s, **options)
    repeats.settle([sampler])
    return sampler.timing(), taken


QUIET, PREEMPTED = Repeat(10.0, 10.0, False), Repeat(25.0, 10.1, True)


def test_preempted_repeats_are_repeated_and_not_kept() -> None:
    timing, taken = sampled(PREEMPTED, QUIET, PREEMPTED, PREEMPTED, QUIET)
    assert timing.times_ms == (10.0,) * 6
    assert (timing.clock, timing.noisy, taken) == ("wall", False, 9)


def test_a_core_that_is_never_quiet_is_timed_by_cpu_time_and_marked() -> None:
    timing, _ = sampled(PREEMPTED, budget_s=0.001)
    assert (timing.clock, timing.time_ms, timing.noisy) == ("cpu", 10.1, True)


def test_cpu_time_never_decides_for_a_kernel_of_several_threads() -> None:
    timing, _ = sampled(PREEMPTED._replace(cpu_ms=None), budget_s=0.001)
    assert (timing.clock, timing.time_ms, timing.noisy) == ("wall", 25.0, True)


def test_repeats_go_on_until_the_interval_is_narrow_but_not_for_hopeless_ones() -> None:
    uneven = [QUIET._replace(wall_ms=value) for value in (10, 14, 10, 13, 10, 12)]
    timing, taken = sampled(*uneven, QUIET)
    assert taken > 6
    assert timing.time_ms == pytest.approx(10.0)
    assert sampled(*uneven, QUIET, beyond_ms=9.0)[1] == 6
    wide, _ = sampled(*uneven, budget_s=0.0)
    assert wide.noisy


# -- measuring --------------------------------------------------------------------------------------------------------


class OneWrong(measuring.Loader):
    """A product of NumPy with one element of a million wrong, unless the file says `right`."""

    def load(self, job: Any, path: Path, arrays: Sequence[np.ndarray]) -> measuring.Kernel:
        a, b, c = arrays

        def run() -> None:
            np.matmul(a, b, out=c)
            if path.read_text() != "right":
                c[617, 203] *= 1.01

        return measuring.Kernel(run, arrays)


@pytest.mark.parametrize("way", ["right", "one wrong"])
def test_one_wrong_element_of_a_million_is_found(tmp_path: Path, way: str) -> None:
    (tmp_path / "kernel").write_text(way)
    job = {"config": GemmConfig(1000, 1000, 8).to_json(), "solver": "S"}
    found = measuring.measure("test_true_times:OneWrong", job, str(tmp_path / "kernel"))
    assert (found["timing"] is not None) == (way == "right")
    cold = measuring.measure(
        "test_true_times:OneWrong", job | {"conditions": {"caches": "cold"}}, str(tmp_path / "kernel")
    )
    assert (cold["timing"] is not None) == (way == "right")
    measuring._reference.cache_clear()


def test_inputs_come_back_from_their_file_as_they_were(tmp_path: Path) -> None:
    job, file = {"config": GemmConfig(3, 4, 5).to_json()}, str(tmp_path / "inputs")
    arrays = measuring.save_inputs("test_true_times:OneWrong", job, file)["arrays"]
    *inputs, blank = measuring._read(file, arrays)
    expected = measuring._problem("test_true_times:OneWrong", job)
    for found, original in zip(inputs, expected.inputs, strict=True):
        np.testing.assert_array_equal(found, original)
    assert (blank.shape, blank.dtype) == (expected.blank().shape, expected.blank().dtype)
    measuring._reference.cache_clear()


def test_emptying_the_caches_makes_the_next_read_slower() -> None:
    data = np.ones(32 << 10, dtype=np.float32)

    def read_s() -> float:
        started = time.thread_time()
        data.sum()
        return time.thread_time() - started

    def cold_s() -> float:
        cold_caches.flush()
        return read_s()

    data.sum()
    warm = min(read_s() for _ in range(20))
    assert min(cold_s() for _ in range(5)) > 1.2 * warm


# -- one item ---------------------------------------------------------------------------------------------------------


class Machine:
    """Answers as the eval child does: each candidate has a time, and each process its own factor."""

    def __init__(self, times_ms: Sequence[float], probes: Sequence[float] = (), **ways: Any) -> None:
        self.times_ms, self.ways = times_ms, ways
        self._probes = script(*(probes or (100.0,)))  # type: ignore[type-var]
        self.calls: list[str] = []
        self.bests: list[float | None] = []
        self.measured_paths: list[int] = []
        self.processes = 0

    def timing(self, time_ms: float, clock: str = "wall") -> dict[str, Any]:
        facts = {"times_ms": [time_ms] * 3, "time_ms": time_ms, "low_ms": time_ms * 0.99, "high_ms": time_ms * 1.01}
        return {**facts, "clock": clock, "noisy": clock == "cpu"}

    def time_ms(self, index: int) -> float:
        """The second time that it is measured, another one where that was given."""
        later_ms = self.ways.get("later_ms")
        return float((later_ms if later_ms and self.measured_paths.count(index) > 1 else self.times_ms)[index])

    def here(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.calls.append(op)
        if op == "probe":
            return {"gflops": next(self._probes), "source": "fma", "copy_s": 1e-5}
        if op == "measure":
            self.bests.append(arguments["best_ms"])
            index = int(Path(arguments["path"]).name)
            self.measured_paths.append(index)
            time_ms = self.time_ms(index)
            timing = self.timing(time_ms, self.ways.get("clock", "wall"))
            best_ms = arguments["best_ms"]
            return {"error": 0.0, "timing": timing, "ended_early": best_ms is not None and time_ms > 3 * best_ms}
        return {"arrays": []}

    def fresh(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.processes += 1
        indices = [int(Path(path).name) for path in arguments["paths"]]
        if self.ways.get("dies") in indices:
            raise ChildCrashed("the child ended with SIGSEGV", returncode=-11, tail="")
        factor = self.ways.get("placement", {})
        times_ms = [self.time_ms(index) * factor.get(index, 1.0) for index in indices]
        clock = "cpu" if self.processes in self.ways.get("disturbed", ()) else self.ways.get("clock", "wall")
        return {"timings": [self.timing(time_ms, clock) for time_ms in times_ms]}

    def measured(self, highest: float = 0.0) -> Any:
        paths = {index: Path(f"/{index}") for index in range(len(self.times_ms))}
        known_ms = dict(enumerate(self.times_ms)) if self.ways.get("rivals") else None
        finalists = self.ways.get("finalists", FINALISTS)
        jobs = {index: {"config": {}} for index in paths}
        contest = Contest(jobs, Limits(1, 1), known_ms, finalists, self.ways.get("best_ms"))
        return Measurement(self.here, self.fresh, contest, paths, Path("/inputs")).run(highest)


def best(trials: Sequence[Trial]) -> int:
    return min((trial for trial in trials if trial.time_ms), key=lambda trial: trial.time_ms or 0).index


def test_the_pick_is_by_the_median_over_processes() -> None:
    """Candidate 0 was lucky in the first process alone."""
    machine = Machine([10.0, 10.5, 20.0], placement={0: 1.3})
    found = machine.measured()
    assert best(found.trials) == 1
    assert [round(trial.time_ms, 1) for trial in found.trials] == [13.0, 10.5, 20.0]
    assert (round(found.trials[0].low_ms, 1), round(found.trials[0].high_ms, 1)) == (9.9, 13.1)
    assert [len(trial.times_ms) for trial in found.trials] == [9, 9, 3]
    assert machine.processes == 2
    assert machine.bests == [None, 10.0, 10.0]
    assert not found.noisy


def test_what_is_far_slower_than_the_best_of_earlier_rounds_is_marked_and_no_finalist() -> None:
    machine = Machine([10.0, 31.0, 9.0, 29.0], best_ms=3.2)
    found = machine.measured()
    assert [trial.ended_early for trial in found.trials] == [True, True, False, True]
    assert machine.processes == 0


def test_a_quick_look_measures_nothing_again() -> None:
    machine = Machine([10.0, 10.5], probes=(100.0, 50.0), finalists=0)
    found = machine.measured()
    assert [trial.time_ms for trial in found.trials] == [10.0, 10.5]
    assert (machine.processes, machine.calls.count("measure"), found.noisy) == (0, 2, True)


def test_a_finalist_that_crashes_in_a_fresh_process_fails_alone() -> None:
    machine = Machine([10.0, 10.5, 10.4], dies=0)
    found = machine.measured()
    assert [trial.cause and trial.cause.value for trial in found.trials] == ["run_error", None, None]
    assert best(found.trials) == 2


@pytest.mark.parametrize(
    ("probes", "highest", "rounds", "noisy"),
    [
        ((100.0, 99.0), 0.0, 1, False),
        ((100.0, 90.0, 99.0, 99.0), 0.0, 2, False),  # the second round was quiet
        ((100.0, 90.0, 80.0, 70.0), 0.0, 2, True),
        ((80.0,), 100.0, 1, True),  # throttled all the time
    ],
)
def test_what_drifts_is_measured_again_once_and_marked_if_that_does_not_help(
    probes: tuple[float, ...], highest: float, rounds: int, noisy: bool
) -> None:
    machine = Machine([10.0, 11.0], probes)
    found = machine.measured(highest)
    assert machine.calls.count("measure") == 2 * rounds
    assert found.noisy is noisy
    assert found.drift is not None
    assert (found.drift > 0.05) == (noisy and rounds == 2)


def test_what_cannot_be_the_best_keeps_its_time_after_drift() -> None:
    machine = Machine([10.0, 11.9, 12.1, 29.0], probes=(100.0, 92.0, 100.0, 100.0))
    found = machine.measured()
    assert machine.measured_paths == [0, 1, 2, 3, 0, 1]
    assert [trial.time_ms for trial in found.trials] == [10.0, 11.9, 12.1, 29.0]
    assert (found.noisy, found.drift) == (False, 0.0)


@pytest.mark.parametrize(("best_ms", "again"), [(8.0, []), (8.4, [0])])
def test_after_drift_nothing_is_measured_again_that_an_earlier_round_beats(best_ms: float, again: list[int]) -> None:
    machine = Machine([10.0, 11.9], probes=(100.0, 92.0, 100.0, 100.0), best_ms=best_ms)
    found = machine.measured()
    assert machine.measured_paths == [0, 1, *again]
    assert found.noisy is not bool(again)


def test_the_more_a_device_drifts_the_more_is_measured_again() -> None:
    machine = Machine([10.0, 20.0, 40.0, 22.0], probes=(100.0, 66.0, 100.0, 100.0))
    machine.measured()
    assert machine.measured_paths == [0, 1, 2, 3, 0, 1, 3]


def test_a_candidate_that_was_not_measured_again_does_not_win_for_that() -> None:
    """The device became slower, steadily: what was close takes longer than what was not measured again."""
    machine = Machine([10.0, 12.5], probes=(100.0, 92.0, 100.0, 100.0), later_ms=[13.0, 16.0])
    found = machine.measured()
    assert machine.measured_paths == [0, 1, 0]
    assert [trial.time_ms for trial in found.trials] == [10.0, 12.5]
    assert found.noisy


def test_a_winner_by_cpu_time_is_noisy_and_says_so() -> None:
    found = Machine([10.0], clock="cpu").measured()
    assert (found.noisy, found.trials[0].clock) == (True, "cpu")


@pytest.mark.parametrize(("disturbed", "noisy"), [((1,), False), ((1, 2), True)])
def test_a_result_is_noisy_when_half_of_its_processes_were(disturbed: tuple[int, ...], noisy: bool) -> None:
    """The median of three lies between two times of quiet processes."""
    found = Machine([10.0, 10.5], disturbed=disturbed).measured()
    assert found.noisy is noisy


def test_rivals_are_measured_in_fresh_processes_alone() -> None:
    machine = Machine([10.0, 10.5, 40.0], rivals=True, placement={0: 1.3})
    found = machine.measured()
    assert (machine.processes, machine.calls.count("measure")) == (RIVAL_PROCESSES, 0)
    assert [round(trial.time_ms, 1) for trial in found.trials] == [13.0, 10.5, 40.0]
    assert [len(trial.times_ms) for trial in found.trials] == [3 * RIVAL_PROCESSES] * 3
    assert not found.noisy
    crashed = Machine([10.0, 10.5], rivals=True, dies=1).measured()
    assert [trial.cause and trial.cause.value for trial in crashed.trials] == [None, "run_error"]


def test_probes_say_nothing_of_a_device_with_a_clock_of_its_own() -> None:
    machine = Machine([10.0], (100.0, 50.0), clock="own")
    found = machine.measured()
    assert (found.noisy, found.drift, found.trials[0].clock) == (False, None, "own")
    assert machine.calls.count("measure") == 1
