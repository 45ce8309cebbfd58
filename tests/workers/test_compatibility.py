"""A worker for one session refuses to start where the session's results would mean something
else."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.testing.noop import NoopLibrary
from tuna.workers import served_queues
from tuna.workers.worker_process import scratch_folder

HERE = NoopLibrary().environment()


def test_the_same_environment_is_served() -> None:
    text = served_queues.session_text(3, HERE)
    assert served_queues.session_queue(text, on_device=True) == f"eval.{HERE.key}"
    assert served_queues.session_queue(text, on_device=False) == "compile.noop-1"


def test_another_one_is_refused_in_words() -> None:
    other = dataclasses.replace(HERE, arch="gfx942", num_cu=304, flags={"xnack": "on"})
    with pytest.raises(BadInput) as error:
        served_queues.session_queue(served_queues.session_text(3, other), on_device=True)
    assert str(error.value) == (
        "This machine cannot work for session 3, which needs "
        "architecture gfx942, here none; compute units 304, here 0; xnack on, here none."
    )


def test_any_machine_with_the_toolchain_compiles() -> None:
    other = dataclasses.replace(HERE, arch="gfx942", num_cu=304)
    assert (
        served_queues.session_queue(served_queues.session_text(3, other), on_device=False)
        == "compile.noop-1"
    )
    older = dataclasses.replace(HERE, toolchain="noop-0")
    with pytest.raises(BadInput, match="needs toolchain noop-0, here noop-1"):
        served_queues.session_queue(served_queues.session_text(3, older), on_device=False)


def test_every_field_of_an_environment_is_compared() -> None:
    for field in dataclasses.fields(Environment):
        value = {"num_cu": 7, "flags": {"a": "b"}, "conditions": {"caches": "cold"}}.get(
            field.name, "other"
        )
        # a session's choice, not a fact of a machine
        expected = 0 if field.name == "conditions" else 1
        assert (
            len(served_queues.differences(dataclasses.replace(HERE, **{field.name: value}), HERE))
            == expected
        )


def test_scratch_of_dead_processes_of_this_machine_alone_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    for name in ("node1-999999999", "node2-999999999", "node1-old", "node1-1"):
        (tmp_path / name).mkdir()
    # of an earlier process with this number
    (tmp_path / f"node1-{os.getpid()}" / "chunk-1").mkdir(parents=True)
    mine = scratch_folder(tmp_path)
    assert list(mine.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {
        "node2-999999999",
        "node1-old",
        "node1-1",
        mine.name,
    }
