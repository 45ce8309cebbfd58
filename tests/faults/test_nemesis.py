"""The fault plan is a deterministic function of its seed."""

from __future__ import annotations

import pytest
from nemesis import Kind, plan


def test_a_seed_gives_the_same_faults_again() -> None:
    assert plan(7, 2.0) == plan(7, 2.0)
    assert plan(7, 2.0) != plan(8, 2.0)


@pytest.mark.parametrize("seed", range(50))
def test_every_seed_has_every_kind_of_fault(seed: int) -> None:
    faults = plan(seed, 2.0, ["eval"])
    assert {fault.kind for fault in faults} == set(Kind) - {Kind.DEVICE_FAILS}
    assert {fault.target for fault in faults if fault.kind is Kind.KILL} == {
        "compile",
        "eval",
        "coordinator",
        "gateway",
    }
    assert [fault.target for fault in faults if fault.kind is Kind.REVOKE] == ["eval"] * 2
    assert not any(fault.kind is Kind.REVOKE for fault in plan(seed, 2.0)), (
        "own workers are not revoked"
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_pause_is_longer_than_the_lease(seed: int) -> None:
    assert all(fault.lasts_s > 2.0 for fault in plan(seed, 2.0) if fault.kind is Kind.PAUSE)
