"""Repeats of a measurement on this machine's cores, by wall time and CPU time, and when there are
enough of them.

Wall time is what a user of the kernel waits for, but it includes what other processes do on the
core. So the CPU time is read beside it, and a repeat during which the process was preempted is
repeated. Where the core never gets quiet, the CPU time decides for a kernel that computes in the
calling thread alone.
"""

from __future__ import annotations

import functools
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

#: Minimum of values for an interval of 95 %; fewer have their whole range instead
MIN_RUNS = 6

#: Seconds that one repeat lasts, about: short beside a scheduler's time slices, so that some fit
#: between two preemptions
REPEAT_S = 0.005
#: Half width of the median's 95 % interval, as a part of the median, at which repeats end, unless
#: their budget is spent before
NARROW = 0.02
#: Half width above which the measurement is marked as noisy
WIDE = 0.05
#: Factor over the best above which a candidate is measured once
HOPELESS = 3.0
#: Share of CPU time in a repeat's wall time below which the repeat was preempted
_BUSY = 0.97
#: Number of undisturbed repeats that is enough when the time is spent
_ENOUGH = 3


class Repeat(NamedTuple):
    """One repeat: milliseconds for one run."""

    wall_ms: float
    #: milliseconds of CPU time of the calling thread; None where other threads worked too, or it
    #: waited
    cpu_ms: float | None
    preempted: bool


@dataclass(frozen=True)
class Timing:
    """Summary of a candidate's repeats in one process."""

    times_ms: tuple[float, ...]
    time_ms: float  #: median of the repeats
    low_ms: float  #: lower end of the median's 95 % interval
    high_ms: float
    clock: str  #: clock: `wall`, `cpu` (the core was never quiet), or `own` (the library's)
    noisy: bool  #: true if the core was never quiet, or the interval is wide

    def as_json(self) -> dict[str, Any]:
        """The answer of a child process."""
        return asdict(self)


def timing(times_ms: Sequence[float], clock: str, *, quiet: bool = True) -> Timing:
    """The summary of these times."""
    # The clocks do not resolve more digits, and the text form is stored.
    rounded = tuple(float(f"{time_ms:.6g}") for time_ms in times_ms)
    middle = statistics.median(rounded)
    low, high = median_interval(rounded)
    wide = len(rounded) >= _ENOUGH and half_width(rounded, middle) > WIDE
    return Timing(rounded, middle, low, high, clock, noisy=wide or not quiet)


def repeat(loop: Callable[[], object], number: int, overhead_s: float = 0.0) -> Repeat:
    """Time `loop`, which runs the kernel `number` times; `overhead_s` is what each run takes beyond
    the kernel."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    process_s, thread_s, wall_s = time.process_time(), time.thread_time(), time.perf_counter()
    loop()
    wall_s, thread_s = time.perf_counter() - wall_s, time.thread_time() - thread_s
    process_s = time.process_time() - process_s
    after = resource.getrusage(resource.RUSAGE_SELF)  # of all threads; an idle one switches never
    idle = process_s < _BUSY * wall_s
    waits = idle and after.ru_nvcsw > before.ru_nvcsw  # voluntarily, such as for a device
    alone = process_s - thread_s <= (1 - _BUSY) * wall_s and not waits
    preempted = after.ru_nivcsw > before.ru_nivcsw or (idle and not waits)

    def each_ms(seconds: float) -> float:
        return max(seconds / number - overhead_s, 1e-9) * 1e3

    return Repeat(each_ms(wall_s), each_ms(thread_s) if alone else None, preempted)


class Sampler:
    """Collects repeats of one candidate until they are enough."""

    def __init__(
        self,
        once: Callable[[], Repeat],
        budget_s: float,
        beyond_ms: float | None = None,
        clock: str = "wall",
    ) -> None:
        """`beyond_ms`: a candidate that is certainly slower than this need not be known more
        exactly; `clock`: what undisturbed repeats are timed by, as `Timing` has it."""
        self._once, self._budget_s, self._beyond_ms = once, budget_s, beyond_ms
        self._clock = clock
        self._all: list[Repeat] = []
        self._spent_s = 0.0

    def add(self) -> None:
        """Measure one more repeat."""
        started = time.perf_counter()
        self._all.append(self._once())
        self._spent_s += time.perf_counter() - started

    @property
    def done(self) -> bool:
        """Whether the interval is narrow, or the time is spent."""
        quiet, cpu = self._quiet, self._cpu
        if self._is_enough(quiet) or self._is_beyond(cpu):
            return True
        # A core that was not quiet for a third of the time will hardly become so.
        if self._spent_s >= self._budget_s / 3 and len(quiet) < MIN_RUNS and self._is_enough(cpu):
            return True
        return self._spent_s >= self._budget_s and len(self._all) >= _ENOUGH

    def timing(self) -> Timing:
        """Return the summary so far, of undisturbed repeats; of a core that was never quiet, by CPU
        time."""
        quiet, cpu = self._quiet, self._cpu
        if len(quiet) >= min(_ENOUGH, len(self._all)):
            return timing(quiet, self._clock)
        if cpu:
            return timing(cpu, "cpu", quiet=False)
        return timing([found.wall_ms for found in self._all], "wall", quiet=False)

    @property
    def _quiet(self) -> list[float]:
        return [found.wall_ms for found in self._all if not found.preempted]

    @property
    def _cpu(self) -> list[float]:
        """CPU times of all repeats; empty if in one of them other threads worked too."""
        found = [found.cpu_ms for found in self._all if found.cpu_ms is not None]
        return found if len(found) == len(self._all) else []

    def _is_enough(self, times_ms: Sequence[float]) -> bool:
        return self._is_beyond(times_ms) or is_narrow(times_ms)

    def _is_beyond(self, times_ms: Sequence[float]) -> bool:
        if self._beyond_ms is None or len(times_ms) < MIN_RUNS:
            return False
        return median_interval(times_ms)[0] > self._beyond_ms


def sample_until_done(samplers: Sequence[Sampler]) -> None:
    """Let the samplers take turns until each is done."""
    while waiting := [sampler for sampler in samplers if not sampler.done]:
        for sampler in waiting:
            sampler.add()


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of independent `values`, at least one.

    Between two order statistics: the median lies outside of [x(j), x(n+1-j)] with probability 2 P(B
    < j), where B is binomial with n and 1/2 (H. A. David and H. N. Nagaraja, Order Statistics, 3rd
    edition, 2003, section 7.1). Fewer than MIN_RUNS values cannot reach 95 %: their range is the
    answer then.
    """
    ordered = sorted(values)
    below = _outside(len(ordered))
    return ordered[below], ordered[-1 - below]


def is_narrow(times_ms: Sequence[float]) -> bool:
    """Whether these are enough to know their median."""
    return len(times_ms) >= MIN_RUNS and half_width(times_ms, statistics.median(times_ms)) <= NARROW


def half_width(values: Sequence[float], median: float) -> float:
    """The larger distance of the median from an end of its interval, as a part of the median."""
    low, high = median_interval(values)
    return max(high - median, median - low) / median


@functools.lru_cache(maxsize=4096)
def _outside(count: int) -> int:
    """Return the number of values that may lie below the interval, and above it: the largest j with
    2 P(B < j) <= 5 %, less one."""
    j, probability = 0, 0.0
    while j < count:
        probability += math.comb(count, j) / 2**count
        if 2 * probability > 0.05:
            break
        j += 1
    return max(j - 1, 0)
