"""Clocks, intervals, peaks and probes: what a measurement says is true, or marked."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared_data import needed_program

from tuna.configs import GemmConfig
from tuna.libraries import fma_loop, measuring, probe, repeats
from tuna.libraries.fma_loop import CHAINS, FmaLoop
from tuna.libraries.kernels import KernelJob
from tuna.libraries.repeats import Repeat, Sampler, half_width, median_interval


@pytest.mark.parametrize(("bits", "register"), [(256, "ymm"), (512, "zmm")])
def test_the_loop_is_nothing_but_multiply_adds(tmp_path: Path, bits: int, register: str) -> None:
    loop, file = FmaLoop(bits), tmp_path / "loop"
    file.write_bytes(loop.code())
    command = [
        needed_program("objdump"),
        "-D",
        "-b",
        "binary",
        "-m",
        "i386:x86-64",
        "--no-show-raw-insn",
        str(file),
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = dict(re.findall(r"^ +([0-9a-f]+):\s+(.*?)\s*$", text, re.MULTILINE))
    words = list(lines.values())
    jump = next(place for place, word in enumerate(words) if word.startswith("jne"))
    body = words[list(lines).index(words[jump].split("0x")[1]) : jump]
    sums = [
        re.fullmatch(rf"vfmadd213ps %{register}15,%{register}14,%{register}(\d+)", word)
        for word in body[:-1]
    ]
    assert [match and int(match[1]) for match in sums] == list(range(CHAINS))
    assert body[-1] == "dec    %rdi"
    assert words[jump + 1 :] == ["vzeroupper", "ret"]
    assert loop.step_flops == CHAINS * bits // 32 * 2
    assert all(
        word.startswith(f"vbroadcastss 0x{'4' if '15' in word else '0'}(%rsi)")
        for word in words[: jump - len(body)]
    )


def test_the_peak_is_above_what_numpy_reaches_and_adds_up() -> None:
    try:
        one = fma_loop.peak_gflops((min(os.sched_getaffinity(0)),))
    except fma_loop.NoFmaLoop:
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
def test_the_widths_are_those_of_the_cpu(
    tmp_path: Path, machine: str, flags: str, widths: list[int]
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: x\nflags\t\t: fpu {flags}\n")
    if widths:
        assert [loop.bits for loop in fma_loop.loops(tmp_path, machine)] == widths
    else:
        with pytest.raises(fma_loop.NoFmaLoop):
            fma_loop.loops(tmp_path, machine)


def test_without_a_loop_the_yardstick_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(cpus: tuple[int, ...]) -> float:
        raise fma_loop.NoFmaLoop

    monkeypatch.setattr(fma_loop, "peak_gflops", none)
    found = probe.probe()
    assert (found.source, found.gflops > 0, found.copy_s > 0) == ("gemm", True, True)
    assert (probe.probe(12.5).gflops, probe.probe(12.5).source) == (12.5, "own")


def test_the_interval_of_the_median_holds_it_in_95_of_100_samples() -> None:
    generator = np.random.default_rng(1)
    for count in (6, 9, 20, 71):
        ends = [
            median_interval(sample) for sample in generator.exponential(size=(2000, count)).tolist()
        ]
        held = np.mean([low <= np.log(2) <= high for low, high in ends])
        assert 0.94 <= held <= 0.99, count


def test_known_intervals() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval(range(1, 7)) == (1, 6)
    # the tables of nonparametric statistics have 2 and 9 for n = 10
    assert median_interval(range(1, 11)) == (2, 9)
    assert median_interval(range(1, 26)) == (8, 18)  # and 8 and 18 for n = 25
    assert half_width([9.0, 10.0, 12.0], 10.0) == pytest.approx(0.2)


def spin(seconds: float) -> None:
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass


def test_a_repeat_by_both_clocks_and_without_the_overhead() -> None:
    # NumPy's threads spin for a while after a matrix product of another test, and count as work of
    # other threads.
    tries = (repeats.repeat(lambda: spin(0.004), 2, overhead_s=0.001) for _ in range(250))
    about = pytest.approx(1.0, rel=0.2)
    assert any(one.cpu_ms == about and (one.preempted or one.wall_ms == about) for one in tries)


def test_a_kernel_that_waits_is_not_preempted_and_its_cpu_time_says_nothing() -> None:
    assert repeats.repeat(lambda: time.sleep(0.005), 1).cpu_ms is None
    assert any(not repeats.repeat(lambda: time.sleep(0.005), 1).preempted for _ in range(20))


def test_beside_other_work_on_the_core_repeats_are_preempted() -> None:
    """With two processes on one core every slice ends by preemption, and the CPU time stays what it
    was."""
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [core])
    program = "print(flush=True)\nwhile True: pass"  # it inherits the core
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert other.stdout
        other.stdout.readline()
        # A thread that another test has left may wake up meanwhile: such a repeat has no CPU time.
        tries = (repeats.repeat(lambda: spin(0.02), 1) for _ in range(200))
        found = list(itertools.islice((one for one in tries if one.cpu_ms), 5))
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, before)
    assert any(one.preempted for one in found)
    # A host that takes the virtual core away counts it as the thread's time: no repeat is shorter.
    assert min(one.cpu_ms or 0 for one in found) == pytest.approx(20, rel=0.1)
    assert len(found) == 5
    sampled = Sampler(iter([one._replace(preempted=True) for one in found]).__next__, budget_s=0)
    for _ in found:
        sampled.add()
    timing = sampled.timing()
    assert (timing.clock, timing.noisy) == ("cpu", True)
    assert timing.time_ms >= 18


def script(*found: Repeat) -> Iterator[Repeat]:
    yield from found
    while True:
        yield found[-1]


def sampled(*found: Repeat, budget_s: float = 1.0, **options: Any) -> tuple[repeats.Timing, int]:
    """What a sampler makes of these repeats (the last one goes on for ever), and how many it
    took."""
    taken = 0
    source = script(*found)

    def once() -> Repeat:
        nonlocal taken
        taken += 1
        return next(source)

    sampler = Sampler(once, budget_s, **options)
    repeats.sample_until_done([sampler])
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


def test_what_is_certainly_slower_by_cpu_time_needs_no_quiet_core() -> None:
    timing, taken = sampled(PREEMPTED, beyond_ms=10.0)
    assert (timing.clock, timing.time_ms, timing.noisy, taken) == ("cpu", 10.1, True, 6)
    assert sampled(PREEMPTED._replace(cpu_ms=9.9), budget_s=0.001, beyond_ms=10.0)[0].time_ms == 9.9
    assert sampled(*[PREEMPTED._replace(cpu_ms=9.9)] * 6, QUIET, beyond_ms=10.0)[1] > 6


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
    found = measuring.measure("test_true_times:OneWrong", job, str(tmp_path / "kernel"), 0.1)
    assert (found["timing"] is not None) == (way == "right")
    cold = measuring.measure(
        "test_true_times:OneWrong",
        job | {"conditions": {"caches": "cold"}},
        str(tmp_path / "kernel"),
        0.1,
    )
    assert (cold["timing"] is not None) == (way == "right")
    measuring._reference.cache_clear()


class Waiting(measuring.Kernel):
    """Its threads wait for each other, 1 ms in each of the first `slow_runs` runs, while others use
    their cores."""

    def __init__(self, slow_runs: int) -> None:
        super().__init__(lambda: None, [])
        self.slow_runs, self.loops = slow_runs, list[int]()

    def loop(self, number: int) -> None:
        self.loops.append(number)
        slow, self.slow_runs = min(number, self.slow_runs), max(0, self.slow_runs - number)
        time.sleep(0.001 * slow)


def repeat_often(kernel: measuring.Kernel) -> None:
    """As if a single run had found a quiet moment and taken 1 µs, so that 5,000 of them make a
    repeat."""
    job = KernelJob.from_json({"config": GemmConfig(3, 4, 5).to_json(), "solver": "S"})
    contestant = measuring._Contestant(kernel, job, 0.001)
    for _ in range(10):
        contestant.once()


def test_repeats_are_short_while_runs_take_a_thousand_times_longer() -> None:
    kernel = Waiting(10**9)
    repeat_often(kernel)
    assert max(kernel.loops) < 500


def test_repeats_are_as_long_as_planned_once_runs_are_fast_again() -> None:
    kernel = Waiting(300)
    repeat_often(kernel)
    assert kernel.loops[0] < 300
    assert 5000 in kernel.loops


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
        measuring.flush_caches()
        return read_s()

    data.sum()
    warm = min(read_s() for _ in range(20))
    assert min(cold_s() for _ in range(5)) > 1.2 * warm
