"""Policies say what to publish next: pure functions from a snapshot of the open work to shares of
the queues (docs/scheduling.md).

The setting `policy` names one; the package tuna-simulate compares them with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tuna.coordinator.policies.by_priority import deadline as deadline
from tuna.coordinator.policies.by_priority import fair as fair
from tuna.coordinator.policies.by_priority import gradient as gradient
from tuna.coordinator.policies.by_priority import shortest as shortest
from tuna.coordinator.policies.snapshot import PER_PROCESS as PER_PROCESS
from tuna.coordinator.policies.snapshot import Need as Need
from tuna.coordinator.policies.snapshot import Policy as Policy
from tuna.coordinator.policies.snapshot import Prediction as Prediction
from tuna.coordinator.policies.snapshot import Share as Share
from tuna.coordinator.policies.snapshot import Snapshot as Snapshot
from tuna.coordinator.policies.snapshot import StageTimes as StageTimes
from tuna.coordinator.policies.snapshot import in_order as in_order
from tuna.coordinator.policies.snapshot import in_turn as in_turn
from tuna.coordinator.policies.snapshot import policy as policy
from tuna.jobs.open_steps import OpenStep as OpenStep
from tuna.jobs.open_steps import SearchProgress as SearchProgress
from tuna.jobs.open_steps import StageKind as StageKind

#: Policies by name
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {each.name: each for each in (fair, gradient, shortest, deadline)}
)
