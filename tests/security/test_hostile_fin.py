"""Validation of fin's answers: an invalid one fails only its own job, with a cause and bounded
memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuna.artifacts.store import Artifacts
from tuna.libraries.miopen import fin, fin_protocol, kernel_objects
from tuna.libraries.miopen.fin import FinCall, FinFailed
from tuna.vocabulary import Cause

pytestmark = pytest.mark.service

DEEP = 100_000
STEP, COMPILE = "miopen_find_eval", "miopen_find_compile"


def _entry(**facts: Any) -> dict[str, Any]:
    good = {
        "solver_name": "S",
        "evaluated": True,
        "reason": "Success",
        "time": 1.5,
        "algorithm": "a",
        "params": "",
    }
    return {"miopen_find_eval_result": [good | facts]}


@pytest.fixture()
def answering(
    tmp_path: Path, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    """`answering("...")`: the result of calling a fake fin that writes this text as its answer."""

    def call(text: str, jobs: int = 1) -> Any:
        (tmp_path / "answer").write_bytes(text.encode("utf-8", "surrogatepass"))
        program = tmp_path / "fin"
        program.write_text(f'#!/bin/sh\ncp {tmp_path}/answer "$4"\n')
        program.chmod(0o755)
        monkeypatch.setattr(fin, "program", lambda: program)
        return fin.call([{}] * jobs, FinCall(tmp_path))

    return call


@pytest.mark.parametrize(
    "text",
    ["[" * DEEP, '[{"a":' * DEEP, "null", "5", "[5]", "[[]]", "[{}, {}]", '["\\ud800"]', "\ud800",
     "[{" + '"a":1,' * 9,
     "[" + "9" * 5000 + "]", "\x80\x04N.", "[{}]\x00", '{"process_env": {}}'],
    ids=range(14),
)  # fmt: skip
def test_an_answer_that_is_none_is_a_torn_one(answering: Callable[[str], Any], text: str) -> None:
    with pytest.raises(FinFailed) as caught:
        answering(text)
    assert caught.value.garbled
    assert fin_protocol.cause_of(caught.value, STEP) is Cause.INFRA
    assert len(str(caught.value)) < 500


def test_an_answer_of_a_gigabyte_is_not_read(
    tmp_path: Path, in_little_memory: Callable[..., str]
) -> None:
    with open(tmp_path / "output.json", "wb") as stream:
        stream.truncate(1 << 30)
    code = """
from tuna.libraries.miopen.fin import FinFailed, _read
try:
    _read(Path("output.json"), 1, "")
except FinFailed as error:
    print(error)
"""
    assert "longer than" in in_little_memory(code)


def test_a_link_to_an_endless_file_is_no_answer(
    tmp_path: Path, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "fin"
    program.write_text('#!/bin/sh\nln -sf /dev/zero "$4"\n')
    program.chmod(0o755)
    monkeypatch.setattr(fin, "program", lambda: program)
    with pytest.raises(FinFailed, match="no answer"):
        fin.call([{}], FinCall(tmp_path))


def test_of_a_key_that_stands_twice_the_last_counts(answering: Callable[[str], Any]) -> None:
    assert answering('[{"a": 1, "a": 2}]') == [{"a": 2}]


TIMES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "-1",
    "0",
    "1e400",
    "1" + "0" * 400,
    "true",
    "null",
    '"1.5"',
    "[1]",
    "{}",
]


@pytest.mark.parametrize("time", TIMES, ids=lambda time: time[:12])
def test_a_time_that_cannot_be_is_no_measurement(
    answering: Callable[[str], Any], time: str
) -> None:
    (answer,) = answering(json.dumps([_entry(time="TIME")]).replace('"TIME"', time))
    with pytest.raises(fin_protocol.BadAnswer, match="impossible time") as caught:
        fin_protocol.measured(answer, STEP, "S")
    assert caught.value.cause is Cause.RUN_ERROR


@pytest.mark.parametrize(
    "workspace", [10**400, -1, 1.5, float("nan"), "8", None, True, [8]], ids=range(8)
)
def test_a_workspace_that_cannot_be_is_none(workspace: Any) -> None:
    assert fin_protocol.measured(_entry(workspace=workspace), STEP, "S").workspace == 0


@pytest.mark.parametrize(
    "facts",
    [
        {"algorithm": "a" * 65},
        {"params": "p" * (2 << 20)},
        {"params": 5},
        {"reason": 5},
        {"evaluated": 1},
    ],
)
def test_an_entry_that_does_not_fit_is_a_failure(facts: dict[str, Any]) -> None:
    with pytest.raises(fin_protocol.BadAnswer) as caught:
        fin_protocol.measured(_entry(**facts), STEP, "S")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("number", ["1e400", "9" * 5000, str(10**30), "-1", "", "x", None, [1]])
def test_a_solver_with_an_impossible_id_is_refused(number: Any) -> None:
    row = {"name": "S", "type": "convolution", "tunable": "1", "dynamic": "1", "id": number}
    with pytest.raises(FinFailed):
        fin_protocol.solvers({"all_solvers": [row]})


def test_a_kernel_with_a_hostile_form_is_a_build_error(tmp_path: Path) -> None:
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c")
    good = kernel_objects.encode("k.cpp", "-O3", b"code" * 100)
    hostile = [
        {"uncompressed_size": 10**400}, {"uncompressed_size": -1}, {"uncompressed_size": True},
        {"uncompressed_size": 7},
        {"uncompressed_size": float("nan")}, {"md5_sum": "0" * 32}, {"md5_sum": None},
        {"blob": "===="}, {"blob": "é"},
        {"blob": None}, {"kernel_file": ""}, {"kernel_file": "k" * 1025}, {"comp_options": 5},
        {"comp_options": "-O" * (1 << 20)}, {"blob": "QlpoOTFB"},
        {"md5_sum": "Failed to compress kernel", "uncompressed_size": 0, "blob": ""},
    ]  # fmt: skip
    for facts in hostile:
        answer = {f"{COMPILE}_result": [{"solver_name": "S", "find_compiled": True,
         "reason": "Success",
                                          "kernel_objects": [good | facts]}]}  # fmt: skip
        with pytest.raises(fin_protocol.BadAnswer) as caught:
            fin_protocol.compiled(answer, COMPILE, "S", None, store)
        assert caught.value.cause is Cause.BUILD_ERROR
    assert kernel_objects.decode(good) == b"code" * 100


def test_a_kernel_whose_name_is_a_path_stays_a_name(tmp_path: Path) -> None:
    store = Artifacts((tmp_path / "a").as_uri(), tmp_path / "c")
    (code,) = kernel_objects.store([kernel_objects.encode("../../../evil", "", b"code")], store)
    assert code.name == "../../../evil"
    assert [path.parts[-3:] for path in tmp_path.rglob("*") if path.is_file()] == [
        ("a", code.artifact[:2], code.artifact)
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"[" * DEEP,
        b"null",
        b"{}",
        b"5",
        b"\xff",
        b'{"kernels": 5}',
        b'{"kernels": [[1]]}',
        b'{"kernels": [], "x": 1}',
    ],
)
def test_a_manifest_that_is_none_counts_as_lost(data: bytes) -> None:
    with pytest.raises(KeyError):
        kernel_objects.Compiled.load(data)


def test_the_environment_that_fin_reports_is_kept_nowhere(answering: Callable[[str], Any]) -> None:
    found = answering(
        json.dumps(
            [
                {"process_env": {"TUNA_DB_URL": "hunter2"}},
                {"process_env": dict(os.environ)},
                _entry(),
            ]
        )
    )
    assert found == [_entry()]
