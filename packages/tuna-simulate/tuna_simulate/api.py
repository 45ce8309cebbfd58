"""Simulations of policies, for the command and for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from tuna.api.rows import open_database, reading
from tuna.common.messages import choices
from tuna.errors import BadInput
from tuna_simulate.engine import simulate as run
from tuna_simulate.policies import POLICIES
from tuna_simulate.recorded import recorded
from tuna_simulate.scenario import Scenario, Simulated


def recorded_scenario(
    session_ids: Sequence[int], *, workers: int | None = None, devices: int | None = None
) -> Scenario:
    """A scenario of sessions as they were recorded; see `recorded`. Raises
    NotFound, BadInput."""
    with reading(open_database()) as connection:
        return recorded(connection, session_ids, workers=workers, devices=devices)


def simulate(scenario: Scenario, policy: str = "fair", seed: int = 0) -> Simulated:
    """Simulate a scenario under the policy of this name; equal arguments give equal outcomes.
    Raises BadInput."""
    if policy not in POLICIES:
        raise BadInput(f"Unknown policy {policy!r}.", hint=choices(policy, POLICIES, "policies"))
    return run(scenario, POLICIES[policy], seed)
