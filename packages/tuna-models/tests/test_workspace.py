"""An import and the builds after it share a folder, a child and what that has read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nets
import numpy as np
import onnx
import pytest
import quantised_nets
from command_lines import Ended

from tuna import api
from tuna.coordinator.session_run import Progress, RunEvents
from tuna.libraries.tvm.model_answers import Answers
from tuna.sandbox.cores import usable_count
from tuna.vocabulary import State
from tuna.workers.launch import RunStopped
from tuna_models import child
from tuna_models.api import building
from tuna_models.process import ModelProcess
from tuna_models.reading import importer
from tuna_models.work import model_job
from tuna_models.work import session as model_session

TARGET = '{"kind": "llvm", "mcpu": "x86-64-v3"}'
GIVEN = {
    "inputs": [{"name": "x", "shape": [1, 3, 16, 16], "dtype": "float32", "bounds": None}],
    "seed": 0,
    "recorded": "",
}


@pytest.fixture
def residual(tmp_path: Path) -> Path:
    """A model file."""
    path = tmp_path / "net.onnx"
    onnx.save(nets.residual(), path)
    return path


def _asked(path: Path, output: str) -> dict[str, Any]:
    """Arguments of the child's `answer` on the model file."""
    model = {"path": str(path), "shapes": {"x": [1, 3, 16, 16]}, "values": {}}
    return {"model": model, "given": GIVEN, "by": "", "output": str(path.with_name(output))}


def _arrays(path: Path) -> list[np.ndarray]:
    (case, *_) = Answers.read(path).cases
    return [*case.inputs, *(output.values for output in case.outputs)]


def test_a_fork_writes_the_answers_that_the_child_would_have_written(
    residual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    itself = child.answer(**_asked(residual, "itself.npz"))
    child.begin_answer(**_asked(residual, "fork.npz"))
    monkeypatch.setattr(child, "_answer", lambda **_: pytest.fail("computed twice"))
    assert child.answer(**_asked(residual, "fork.npz")) == itself
    pairs = (_arrays(residual.with_name(name)) for name in ("itself.npz", "fork.npz"))
    assert all(np.array_equal(*pair) for pair in zip(*pairs, strict=True))


def test_what_a_fork_cannot_answer_the_child_does(
    residual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, answer = os.getpid(), child._answer

    def killed(**arguments: Any) -> Any:
        if os.getpid() != own:
            os._exit(9)
        return answer(**arguments)

    monkeypatch.setattr(child, "_answer", killed)
    child.begin_answer(**_asked(residual, "right.npz"))
    assert child.answer(**_asked(residual, "right.npz"))["tolerance"] == 1e-3
    assert _arrays(residual.with_name("right.npz"))


def test_a_model_is_converted_once_for_its_import_and_its_plans(
    residual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    convert = importer.to_relax

    def counted(model: Any, name: str) -> Any:
        read.append(name)
        return convert(model, name)

    monkeypatch.setattr(importer, "to_relax", counted)
    text = str(tmp_path / "text")
    found = child.inspect(asked={"path": str(residual), "target": TARGET}, text=text)
    shapes = {value["name"]: list(value["shape"]) for value in found["inputs"]}
    model = {"path": str(residual), "shapes": shapes, "values": {}}
    options = {"winograd": True, "compare": False, "untuned": False, "folder": str(tmp_path)}
    for _ in range(2):
        child.plan(model=model, target=TARGET, records={}, **options)
    assert read == ["net.onnx"]


@pytest.mark.usefixtures("forked", "quick_timing")
def test_without_minutes_a_model_is_imported_planned_and_linked_by_one_child_and_says_its_rule(
    type_in: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ModelProcess] = []

    class Counted(ModelProcess):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(self)

    monkeypatch.setattr(model_session, "ModelProcess", Counted)
    path, library = tmp_path / f"{'net' * 50}.onnx", tmp_path / "out" / "net.so"
    onnx.save(quantised_nets.residual(), path)
    library.parent.mkdir()
    ended = type_in("tuna", "tune", path, "--minutes", 0, "-o", library, "--no-rivals")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "checked: 5 quantised tensors, each computed from the reference's integers" in said
    assert "whole numbers differ, next to a tie" in said
    assert "no task is measured (--minutes 0)" in said
    usable = usable_count()
    assert f"built for {usable} core{'s' if usable > 1 else ''}" in said
    (session,) = api.list_sessions()
    assert sum(api.status(session.id)[0].jobs.values()) == 1, "the job of the model alone"
    assert [process._child.starts for process in made] == [1]
    assert {path.name for path in library.parent.iterdir()} == {"net.so", "net.so.json"}


def test_the_progress_of_a_build_is_that_of_the_job_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Progress] = []
    work = SimpleNamespace(session_id=lambda: 1, events=RunEvents(seen.append))
    following = model_job._Following(work, None)  # type: ignore[arg-type]
    states = iter([State.COMPILING, State.EVALUATED])
    monkeypatch.setattr(model_job, "_outcome", lambda *_: SimpleNamespace(state=next(states)))
    for _ in range(2):  # asked again only if the session has gone on
        following.follow(Progress({"compiling": 1, "new": 8}, 9, 9, 0))
    with pytest.raises(RunStopped):
        following.follow(Progress({"evaluated": 1, "new": 8}, 9, 8, 0))
    assert seen == [Progress({"compiling": 1}, 1, 1, 0), Progress({"evaluated": 1}, 1, 0, 0)]


def test_a_library_is_copied_to_its_place_on_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, output, replace = tmp_path / "new.so", tmp_path / "net.so", Path.replace
    library.write_bytes(b"code")

    def elsewhere(path: Path, target: Path) -> Path:
        if path == library:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", elsewhere)
    building._move(library, output)
    assert output.read_bytes() == b"code"
