"""Policies say what to publish next: pure functions from a snapshot of the open work to shares of
the queues.

The pipeline uses the first four, by the setting `policy`; `tuna simulate` compares all
(docs/scheduling.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tuna.policies.by_priority import deadline, fair, gradient, shortest
from tuna.policies.comparison import bundled, fifo, greedy, sequential, synchronous, unsynchronised
from tuna.policies.snapshot import (
    PER_PROCESS,
    Need,
    OpenStep,
    Policy,
    Prediction,
    SearchProgress,
    Share,
    Snapshot,
    StageKind,
    StageTimes,
)

#: By name: those to tune with, then those of the thesis that docs/scheduling.md compares with.
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            fair,
            gradient,
            shortest,
            deadline,
            fifo,
            sequential,
            greedy,
            synchronous,
            unsynchronised,
            bundled,
        )
    }
)

__all__ = [
    "PER_PROCESS",
    "POLICIES",
    "Need",
    "OpenStep",
    "Policy",
    "Prediction",
    "SearchProgress",
    "Share",
    "Snapshot",
    "StageKind",
    "StageTimes",
    "bundled",
    "deadline",
    "fair",
    "fifo",
    "gradient",
    "greedy",
    "sequential",
    "shortest",
    "synchronous",
    "unsynchronised",
]
