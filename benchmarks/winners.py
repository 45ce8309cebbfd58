"""Winners of jobs on a simulated device, where a candidate's time differs by 4 % (standard
deviation) from process to process and hardly at all within one.

What measures, chooses and stores is the worker's and the drain's own code; only the processes that
measure are simulated. A job has 64 candidates, a small one 8; a search has 64 in four rounds, whose
winner is measured once more in finals. Figures, where all candidates are equally fast: the share of
winners that were measured in the process that selects finalists alone, the bias of the winner's
time against its true one, and the seconds of measuring, by what calls of the TVM library take on
one core of an AMD EPYC. Where candidates differ by 5 %: how much slower the winner is than the
best. The baseline is the rule of commit 95db4754, on the same machine and with the same seed: four
finalists are measured in three processes, the selecting one among them, and the fastest of all
trials wins. It takes some ten seconds, on a busy machine too.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome, command_line
from tuna.coordinator.find_db_writer import MeasuredResult, best
from tuna.libraries.contest import Contest
from tuna.libraries.items import StepResult
from tuna.libraries.measurement import Measurement
from tuna.libraries.results import is_close

#: Standard deviation of a candidate's time over processes, and half of the range within one.
_SPREAD, _WITHIN = 0.04, 0.002
#: Standard deviation of the candidates' true times, where they differ.
_DIFFERENCE = 0.05
#: Candidates and rounds.
_CASES = {"job": (64, 1), "small job": (8, 1), "search": (64, 4)}
#: Seconds that calls take: `again` for each candidate, in a process that takes `start`.
_SECONDS = {"probe": 0.285, "measure": 0.042, "again": 0.056, "start": 0.01}
_SHARE, _BIAS, _TIME = 0.01, 0.015, 1.1


class SimulatedDevice:
    """Answers as the children that measure do."""

    def __init__(self, chance: random.Random, true_ms: Sequence[float]) -> None:
        self._chance, self.true_ms = chance, true_ms
        self.seconds = 0.0
        self.fresh_of: Counter[int] = Counter()  #: fresh processes by candidate

    def clean(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Answer as the process that runs no candidate."""
        return self.shared(op, timeout_s, **arguments)

    def shared(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Answer as the process that selects."""
        self.seconds += _SECONDS.get(op, 0.0)
        if op == "probe":
            return {"gflops": 100.0, "source": "fma", "copy_s": 1e-5}
        if op == "measure":
            timing = self._timing(int(arguments["path"]))
            return {"error": 0.0, "timing": timing, "ended_early": False, "parts": {}}
        return {"arrays": []}

    def fresh(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Answer as a process in which nothing was measured before."""
        indices = [int(path) for path in arguments["paths"]]
        self.seconds += _SECONDS["start"] + len(indices) * _SECONDS[op]
        self.fresh_of.update(indices)
        return {"timings": [self._timing(index) for index in indices]}

    def _timing(self, index: int) -> dict[str, Any]:
        time_ms = self.true_ms[index] * max(0.5, self._chance.gauss(1.0, _SPREAD))
        low_ms, high_ms = time_ms * (1 - _WITHIN), time_ms * (1 + _WITHIN)
        facts = {"low_ms": low_ms, "high_ms": high_ms, "clock": "wall", "noisy": False}
        return {"times_ms": [low_ms, time_ms, high_ms], "time_ms": time_ms, **facts}


#: Measures candidates in one job or round, and makes what is known by then the best of both.
Rule = Callable[[SimulatedDevice, Sequence[int], MeasuredResult | None], MeasuredResult | None]


def rule(
    device: SimulatedDevice, indices: Sequence[int], known: MeasuredResult | None
) -> MeasuredResult | None:
    """Tuna's own rule."""
    facts = {} if known is None else {"best_ms": known.time_ms, "best_noisy": known.noisy}
    result = _measured(device, indices, **facts)
    trial = best(result)
    if trial is None:
        return known
    step = (known.job_id or 0) + 1 if known else 1, 1, trial.index, "eval"
    found = MeasuredResult(*step, str(trial.index), trial.time_ms, result.noisy)
    return found if known is None or found.replaces(known) else known


def former_rule(
    device: SimulatedDevice, indices: Sequence[int], known: MeasuredResult | None
) -> MeasuredResult | None:
    """The baseline."""

    def fresh(finalists: Sequence[int]) -> list[float]:
        answer = device.fresh("again", 1.0, paths=[str(index) for index in finalists])
        return [timing["time_ms"] for timing in answer["timings"]]

    for _ in range(2):
        device.shared("probe", 1.0)
    first = [device.shared("measure", 1.0, path=str(index)) for index in indices]
    times_ms = {
        index: answer["timing"]["time_ms"] for index, answer in zip(indices, first, strict=True)
    }
    fastest = sorted(indices, key=lambda index: times_ms[index])
    best_ms = min(times_ms[fastest[0]], known.time_ms or 0.0 if known else times_ms[fastest[0]])
    finalists = [index for index in fastest if is_close(times_ms[index], best_ms)][:4]
    more = zip(finalists, fresh(finalists), fresh(finalists), strict=True)
    times_ms |= {index: statistics.median((times_ms[index], *two)) for index, *two in more}
    index = min(indices, key=lambda index: times_ms[index])
    result = MeasuredResult(1, 1, index, "eval", str(index), times_ms[index], noisy=False)
    return result if known is None or (known.time_ms or 0.0) > times_ms[index] else known


def _measured(device: SimulatedDevice, indices: Sequence[int], **facts: Any) -> StepResult:
    contest = Contest({index: {} for index in indices}, 1.0, 1.0, **facts)
    paths = {index: Path(str(index)) for index in indices}
    found = Measurement(device, contest, paths, Path("inputs")).run()
    attempt = {"job_id": 1, "attempt": 1, "step": "eval", "ok": True}
    return StepResult(**attempt, trials=found.trials, noisy=found.noisy)


@dataclass(frozen=True)
class Winner:
    """The result of one job or search."""

    bias: float  #: of its time, as a part of the true one
    slower: float  #: its true time is by so much longer than that of the best candidate
    measured_once: bool
    seconds: float


def winner(
    chance: random.Random, candidates: int, rounds: int, by: Rule = rule, difference: float = 0.0
) -> Winner:
    """The winner of so many candidates in so many rounds, on a new device."""
    true_ms = [max(0.5, chance.gauss(1.0, difference)) for _ in range(candidates)]
    device = SimulatedDevice(chance, true_ms)
    known: MeasuredResult | None = None
    batch = candidates // rounds
    for start in range(0, candidates, batch):
        known = by(device, range(start, start + batch), known)
    assert known is not None
    index, time_ms = known.trial_number or 0, known.time_ms or 0.0
    measured_once = not device.fresh_of[index]
    if rounds > 1 and by is rule:  # finals
        (trial,) = _measured(device, [index], known_ms={index: time_ms}).trials
        time_ms = trial.time_ms or 0.0
    bias, slower = time_ms / true_ms[index] - 1, true_ms[index] / min(true_ms) - 1
    return Winner(bias, slower, measured_once, device.seconds)


def figures(jobs: int, by: Rule, seed: int = 7) -> dict[str, float]:
    """The figures of so many jobs of each case."""
    found: dict[str, float] = {}
    for name, (candidates, rounds) in _CASES.items():
        chance = random.Random(seed)  # noqa: S311
        equal = [winner(chance, candidates, rounds, by) for _ in range(jobs)]
        others = [winner(chance, candidates, rounds, by, _DIFFERENCE) for _ in range(jobs)]
        found |= {
            f"{name}: measured once": statistics.fmean(one.measured_once for one in equal),
            f"{name}: bias": abs(statistics.fmean(one.bias for one in equal)),
            f"{name}: slower than the best": statistics.fmean(one.slower for one in others),
            f"{name}: seconds": statistics.fmean(one.seconds for one in equal),
        }
    return found


def main() -> int:
    """Command line; `--jobs`: how many of each case."""
    options = command_line(__doc__, jobs=1000).parse_args()
    outcome = Outcome("winners", figures(options.jobs, rule), figures(options.jobs, former_rule))
    for name in _CASES:
        time = f"{name}: seconds"
        outcome.ratios[f"{name}: time"] = outcome.figures[time] / outcome.baseline[time]
        outcome.limits |= {
            f"{name}: measured once": _SHARE,
            f"{name}: bias": _BIAS,
            f"{name}: time": _TIME,
        }
    return outcome.print()


if __name__ == "__main__":
    raise SystemExit(main())
