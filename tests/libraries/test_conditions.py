"""Conditions of measurement: what a session chooses, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.libraries.options import Condition, chosen, complete

OFFERED = (
    Condition("caches", ("warm", "cold"), "whether ..."),
    Condition("layouts", ("layer", "native"), "how ..."),
)
MACHINE = Environment("toy", "1", "any", 1, "toy-1", flags={"a": "b"})


def test_a_default_is_not_kept_and_others_are() -> None:
    assert chosen(OFFERED, {"layouts": "native", "caches": "warm"}, "toy") == {"layouts": "native"}
    assert complete(OFFERED, {"layouts": "native"}) == {"caches": "warm", "layouts": "native"}


@pytest.mark.parametrize("given", [{"cache": "cold"}, {"caches": "hot"}])
def test_what_is_not_offered_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(BadInput) as caught:
        chosen(OFFERED, given, "toy")
    assert "caches" in str(caught.value.hint) or "cold" in str(caught.value.hint)


def test_conditions_change_the_key_but_not_who_may_measure() -> None:
    cold = replace(MACHINE, conditions={"caches": "cold"})
    assert cold.key != MACHINE.key == MACHINE.machine_key == cold.machine_key
    assert str(cold) == f"{MACHINE}, caches cold"
