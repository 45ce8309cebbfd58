"""Simulations of sessions under a policy, over given or recorded durations."""

from __future__ import annotations

from collections.abc import Sequence

from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna.messages import choices
from tuna.policies import POLICIES
from tuna.simulation.engine import simulate as run
from tuna.simulation.recorded import recorded
from tuna.simulation.scenario import Scenario, Simulated


def recorded_scenario(
    session_ids: Sequence[int], *, workers: int | None = None, devices: int | None = None
) -> Scenario:
    """A scenario of sessions as they were recorded; see `tuna.simulation.recorded`. Raises
    NotFound, BadInput."""
    with reading(open_database()) as connection:
        return recorded(connection, session_ids, workers=workers, devices=devices)


def simulate(scenario: Scenario, policy: str = "fair", seed: int = 0) -> Simulated:
    """Simulate a scenario under the policy of this name; equal arguments give equal outcomes.
    Raises BadInput."""
    if policy not in POLICIES:
        raise BadInput(
            f"There is no policy {policy!r}.", hint=choices(policy, POLICIES, "policies")
        )
    return run(scenario, POLICIES[policy], seed)
