"""Job options as a person meets them: `load-jobs --option`, `solvers --options`, `reproduce
--option`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended

from tuna.errors import BadInput


@pytest.fixture()
def session(type_in: Callable[..., Ended], tmp_path: Path) -> Callable[..., Ended]:
    """A session of the library that does nothing, with a layer; what is called loads its jobs."""
    driver = tmp_path / "layers.txt"
    driver.write_text("./bin/MIOpenDriver gemm --a_h 1 --a_w 8 --b_w 8\n")
    for words in (["init-session", "noop", "-l", "x"], ["import", str(driver), "-t", "t"]):
        assert type_in("tuna", *words).code == 0
    assert type_in("tuna", "update-solvers", "noop").code == 0
    assert type_in("tuna", "applicability", "--session-id", 1).code == 0
    return lambda *words: type_in("tuna", "load-jobs", "--session-id", 1, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--option", "sleep_s=2h"], "sleep_s cannot be so"),
        (["--option", "nosuch=1"], "nosuch is not known"),
        (["--candidates", "999999999"], "candidates is not known"),
    ],
)
def test_bad_options_load_nothing(
    session: Callable[..., Ended], type_in: Callable[..., Ended], words: list[str], said: str
) -> None:
    refused = session(*words)
    assert refused.code == BadInput.exit_code
    assert said in refused.err
    assert "options of noop: fail, kill, sleep_s, stores, trials" in refused.err
    good = session("--option", "sleep_s=0.5")
    assert "New jobs added: 10" in good.out, "nothing was written before"


def test_the_options_are_listed(type_in: Callable[..., Ended]) -> None:
    table = type_in("tuna", "solvers", "tvm", "--options")
    assert table.code == 0
    assert "candidates" in table.out
    document = json.loads(type_in("tuna", "solvers", "tvm", "--options", "--json").out)
    assert document[0] == {
        "option": "candidates",
        "type": "integer 1..10000",
        "default": "8",
        "meaning": "points of the solver's space to try",
    }


def test_reproduce_refuses_unknown_options_too(type_in: Callable[..., Ended]) -> None:
    words = ["--library", "noop", "--solver", "Noop1", "--step", "build", "--option", "nosuch=1"]
    refused = type_in(
        "tuna", "reproduce", "./bin/MIOpenDriver gemm --a_h 1 --a_w 8 --b_w 8", *words
    )
    assert refused.code == BadInput.exit_code
    assert "nosuch is not known" in refused.err
