"""Requests for models: what an import finds wrong ends them with a sentence, and nothing of their
files is left."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nets
import onnx
import pytest
import sqlalchemy as sa
from nets import Net

from tuna import api
from tuna.db import access_tokens
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.models import RequestRow
from tuna.errors import BadInput
from tuna.settings import get_settings
from tuna.vocabulary import RequestState
from tuna_models import api as models_api
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import answers, process, uploads
from tuna_serve.requests.asked import Asked
from tuna_serve.requests.submission import Submission, submit
from tuna_serve.requests.uploads import Upload
from tuna_serve.requests.watch import current


@pytest.fixture
def token(home: Path) -> Iterator[str]:
    with writing(open_database()) as connection:
        access_tokens.add(connection, "a" * 12, "secret", "submit", 600)
    return "a" * 12


def submitted(token: str, name: str, content: bytes, **asked: Any) -> TuningRequest:
    upload = Upload()
    try:
        upload.write(content)
        wanted = Asked(name="net", **asked)
        found, _ = submit(Submission(wanted, "model", upload, name, token))
    finally:
        upload.close()
    return found


def worked_on(request: TuningRequest) -> TuningRequest:
    process.work_on(request.id)
    with reading(open_database()) as connection:
        return requests.get(connection, request.id)


def unknown(name: str) -> bytes:
    """A model whose operators have this name, and a number where it ends in {}."""
    net = Net((1, 8, 6, 6))
    x = net.relu(net.conv("x", 8, 8, 1))
    model = net.model(x)
    for number, node in enumerate(model.graph.node):
        node.op_type = name.format(number)
    return model.SerializeToString()


def bomb() -> bytes:
    """A model with a constant range of 10^12 elements."""
    net = Net((1,))
    numbers = net.add("Range", *(net.whole(number) for number in (0, 10**12, 1)))
    net.nodes[-1].name = "numbers"
    y = net.add("Add", "x", net.add("Cast", numbers, to=onnx.TensorProto.FLOAT))
    model: onnx.ModelProto = net.model(y, check=False)
    return model.SerializeToString()


def files() -> list[Path]:
    """What is stored or received."""
    home = get_settings().home
    stored = [one for one in (home / "artifacts").rglob("*") if len(one.name) == 64]
    return [*stored, *(home / "uploads").iterdir()]


def exported(path: Path) -> bytes:
    """A .pt2 archive that holds no program."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/archive_format", "pt2")
    return path.read_bytes()


def test_what_an_import_finds_wrong_ends_a_request_and_leaves_nothing(
    token: str, tmp_path: Path
) -> None:
    for name, content, words in (
        ("net.onnx", unknown("Bernoulli"), ["Bernoulli"]),
        ("net.pt2", exported(tmp_path / "x"), ["torch"]),
        (
            *("net.onnx", bomb()),
            ["the operator Range (numbers) makes a tensor of 7.3 TiB", "TUNA_REQUEST_MEMORY_MIB"],
        ),
    ):
        ended = worked_on(submitted(token, name, content))
        assert (ended.state, ended.files) == (RequestState.FAILED, ()), ended.message
        for word in words:
            assert word in ended.message
        assert (ended.upload_bytes, ended.ended_at is not None) == (0, True)
        assert not files()


def test_what_a_killed_process_left_is_removed_and_nothing_that_is_in_use(home: Path) -> None:
    upload, left = Upload(), uploads.folder() / "tmpleft"
    with uploads.working_folder() as used:
        for path in (used, left):
            (path / "model").mkdir(parents=True)
            (path / "model" / "weights").write_bytes(b"x")
        (left.parent / "left.part").write_bytes(b"x")
        for path in left.parent.iterdir():
            os.utime(path, (0, 0))
        uploads.sweep()
        assert {*left.parent.iterdir()} == {used, upload._path}
    upload.close()
    assert not files()


def test_a_request_that_is_canceled_meanwhile_takes_no_further_step(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = submitted(token, "net.onnx", nets.dense().SerializeToString())
    imported = models_api.import_model

    def canceled(*args: Any, **options: Any) -> Any:
        known = imported(*args, **options)
        with writing(open_database()) as connection:
            requests.move(connection, request.id, RequestState.CANCELED, message="canceled")
        return known

    monkeypatch.setattr(models_api, "import_model", canceled)
    process.clear_up(worked_on(request))
    ended = current(request.id)
    assert (ended.state, ended.message) == (RequestState.CANCELED, "canceled")
    assert ended.ended_at is not None
    assert sum(api.status(ended.session_id)[0].jobs.values()) == 0
    model = models_api.list_models()[0]
    with reading(open_database()) as connection:
        assert requests.files(connection) == set()
    path = get_settings().home / "artifacts" / model.manifest.file[:2] / model.manifest.file
    assert path.exists(), "the model has it"


def test_a_model_that_cannot_be_built_is_refused_before_a_job_is_loaded(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise BadInput("net is larger than a library can be.")

    monkeypatch.setattr(models_api, "check_model", refused)
    request = submitted(token, "net.onnx", nets.dense().SerializeToString())
    ended = worked_on(request)
    assert (ended.state, ended.message) == ("failed", "net is larger than a library can be.")
    assert sum(api.status(ended.session_id)[0].jobs.values()) == 0


def test_the_same_model_is_known_once_it_was_built_for_the_environment(token: str) -> None:
    content = nets.dense().SerializeToString()
    first = submitted(token, "net.onnx", content)
    with writing(open_database()) as connection:
        requests.move(connection, first.id, RequestState.TUNING)
    facts: dict[str, Any] = {
        "layers": 2,
        "exact": 2,
        "complete": True,
        "time_ms": 3.0,
        "errors": {},
    }
    documents = {"net.so": b"code", "net.so.json": b"{}"}
    answers.finish(first, answers.RequestAnswer(RequestState.BUILT, documents), **facts)
    again = submitted(token, "net.onnx", content)
    assert (again.state, again.progress["known"], again.progress["trials"]) == ("known", 2, 0)
    assert [file.name for file in again.files] == ["net.so", "net.so.json"]
    with answers.opened(again, "net.so") as (_, file):
        assert file.read() == b"code"
    assert submitted(token, "net.onnx", content, target_ms=3.0).state == "known"
    for other in ({"target_ms": 2.0}, {"batch": 2}, {"untuned": True}):
        assert submitted(token, "net.onnx", content, **other).state == "accepted"
    with writing(open_database()) as connection:  # as where a target ended it early
        progress = json.dumps({**facts, "exact": 1, "complete": False})
        everything = sa.update(RequestRow).values(progress=progress)
        connection.execute(everything)
    assert submitted(token, "net.onnx", content).state == "accepted"
    again = submitted(token, "net.onnx", content, target_ms=3.0)
    assert (again.state, again.progress["known"]) == ("known", 1)
