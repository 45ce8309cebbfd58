"""The cores that measure are kept apart from those that compile."""

from __future__ import annotations

import pytest

from tuna.errors import BadInput
from tuna.sandbox import cores
from tuna.settings import Settings


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cpus", lambda: (0, 1, 4, 5))


@pytest.mark.parametrize(
    ("chosen", "measuring", "compiling"),
    [
        ("", (5,), (0, 1, 4)),
        ("0", (0,), (1, 4, 5)),
        ("4-5,1", (1, 4, 5), (0,)),
        ("0,1,4,5", (0, 1, 4, 5), (0, 1, 4, 5)),
    ],
)
def test_what_does_not_measure_compiles(
    four: None, chosen: str, measuring: tuple[int, ...], compiling: tuple[int, ...]
) -> None:
    settings = Settings(eval_cpus=chosen)
    assert cores.eval_cpus(settings) == measuring
    assert cores.compile_cpus(settings) == compiling


def test_one_core_does_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "available_cpus", lambda: (3,))
    assert cores.eval_cpus(Settings(eval_cpus="")) == cores.compile_cpus(Settings(eval_cpus="")) == (3,)


def test_a_core_that_is_not_there_is_named_with_those_that_are(four: None) -> None:
    with pytest.raises(BadInput, match="core 2") as error:
        cores.eval_cpus(Settings(eval_cpus="2"))
    assert error.value.hint == "Choose from 0, 1, 4, 5."
