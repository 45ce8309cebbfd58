"""Layers of a kind that somebody brings, as a user meets them on the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import softmax_kind
from command_lines import Ended

from tuna.configs import from_json_text
from tuna.libraries.items import WorkItem
from tuna.libraries.registry import get_library
from tuna.libraries.steps import command_line
from tuna.testing.kind_contract import registered

Type = Callable[..., Ended]
LINES = (
    '{"kind": "softmax", "rows": 128, "cols": 1000}',
    "MIOpenDriver gemm -m 2 -n 3 -k 4",
    '{"kind": "relu"}',
)


@pytest.fixture()
def softmax(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(get_library("noop"), "kinds", ("gemm", "softmax"), raising=False)
    with registered(softmax_kind.KIND):
        yield


@pytest.mark.usefixtures("softmax")
def test_a_kind_without_a_driver_grammar_is_imported_listed_loaded_and_repeated(
    type_in: Type, tmp_path: Path
) -> None:
    layers = tmp_path / "layers.txt"
    layers.write_text("\n".join(LINES) + "\n")
    ended = type_in("tuna", "import", layers, "-t", "mine")
    assert "2 layers: 2 added" in ended.out
    assert "unknown kind of config 'relu'" in ended.err
    listed = type_in("tuna", "configs", "-t", "mine", "--json").out.splitlines()
    assert json.loads(listed[0]) == {
        "kind": "softmax",
        "rows": 128,
        "cols": 1000,
        "data_type": "FP32",
    }
    type_in("tuna", "init-session", "noop", "-l", "x")
    type_in("tuna", "update-solvers", "noop")
    assert (
        "2 layers: 20 combinations of layer and solver"
        in type_in("tuna", "applicability", "--session-id", 1).out
    )
    assert (
        type_in("tuna", "load-jobs", "--session-id", 1, "-t", "mine", "-l", "x").out
        == "New jobs added: 20\n"
    )
    item = WorkItem(
        job_id=1, attempt=1, session_id=1, library="noop", step="measure", solver="Noop1",
        config=json.loads(listed[0]),
        options={"trials": 1},
    )  # fmt: skip
    words = shlex.split(command_line(get_library("noop"), item))
    assert from_json_text(words[-1]) == softmax_kind.Softmax(128, 1000)
    again = type_in(*words)
    assert (again.code, "softmax 128x1000 fp32" in again.out) == (0, True)


def test_a_layer_whose_kind_is_no_longer_installed_is_one_sentence(
    type_in: Type, tmp_path: Path
) -> None:
    layers = tmp_path / "layers.txt"
    layers.write_text(LINES[0] + "\n")
    with registered(softmax_kind.KIND):
        assert type_in("tuna", "import", layers, "-t", "mine").code == 0
    ended = type_in("tuna", "configs", "-t", "mine")
    assert (ended.code, "Traceback" in ended.err) == (3, False)
    assert "unknown kind of config 'softmax'" in ended.err
