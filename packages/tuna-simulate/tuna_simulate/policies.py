"""All policies that can be simulated: those of coordinators, and those to compare them with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tuna.coordinator.policies import POLICIES as PUBLISHING
from tuna.coordinator.policies import Policy
from tuna_simulate.comparison import (
    bundled,
    fifo,
    greedy,
    sequential,
    synchronous,
    unsynchronised,
)

#: Policies of the thesis that docs/scheduling.md compares with.
COMPARED = (fifo, sequential, greedy, synchronous, unsynchronised, bundled)
#: By name: those to tune with, then those that are compared.
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {**PUBLISHING, **{policy.name: policy for policy in COMPARED}}
)
