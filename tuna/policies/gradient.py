"""The next round goes where it is expected to gain most for the whole model in a second of work."""

from __future__ import annotations

import math

from tuna.policies.snapshot import Need, OpenStep, SearchProgress, Share, Snapshot, in_order, policy

#: Share of the recent slope in the expected gain, and rounds that it is taken over: as in TVM
#: MetaSchedule's `GradientBased` task scheduler, which has them from Ansor (OSDI 2020, section 6).
_SLOPE_SHARE, _WINDOW = 0.2, 3


@policy(Need.PROGRESS | Need.ROUNDS)
def gradient(snapshot: Snapshot) -> list[Share]:
    """A session's priority first, then what goes on in its queue, then searches without any result,
    then by expected gain.

    The gain is that of a second of work, by the predicted duration of the step.
    """

    def rank(step: OpenStep) -> tuple[float, ...]:
        seconds = snapshot.predicted_s.get(step.kind, 1.0)
        gain = expected_gain_ms(step.progress) / max(seconds, 1e-9)
        return -step.priority, not step.continues, -gain, step.remaining, step.since_s

    return in_order(snapshot, rank)


def expected_gain_ms(progress: SearchProgress | None) -> float:
    """Milliseconds of a run of the model that the next round is expected to gain; infinite while
    there is no result."""
    if progress is None or not progress.rounds or not progress.best_ms:
        return math.inf
    times = progress.best_ms[-1 - _WINDOW :]
    optimistic = times[-1] / progress.rounds
    slope = (times[0] - times[-1]) / (len(times) - 1) if len(times) > 1 else optimistic
    return progress.weight * (_SLOPE_SHARE * slope + (1 - _SLOPE_SHARE) * optimistic)
