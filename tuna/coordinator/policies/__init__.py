"""Policies say what to publish next: pure functions from a snapshot of the open work to shares of
the queues (docs/scheduling.md).

The setting `policy` names one; the package tuna-simulate compares them with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tuna.coordinator.policies.by_priority import deadline, fair, gradient, shortest
from tuna.coordinator.policies.snapshot import (
    PER_PROCESS,
    Need,
    Policy,
    Prediction,
    Share,
    Snapshot,
    StageTimes,
    in_order,
    in_turn,
    policy,
)
from tuna.jobs.open_steps import OpenStep, SearchProgress, StageKind

#: Policies by name
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {each.name: each for each in (fair, gradient, shortest, deadline)}
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
    "deadline",
    "fair",
    "gradient",
    "in_order",
    "in_turn",
    "policy",
    "shortest",
]
