"""`tuna tune` on a model: its options, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_model_store import manifest

from tuna import errors
from tuna_models import api
from tuna_models.api.building import CheckedModel
from tuna_models.cli import tune
from tuna_models.cli.model import show_built
from tuna_models.work.store import StoredModel

pytestmark = pytest.mark.usefixtures("without_workers")
TypeIn = Callable[..., Any]
STORED = StoredModel("net", manifest())
CHECKED = CheckedModel(STORED, 1e-6, "y to 0.001", "", "")


@pytest.fixture
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is started."""
    monkeypatch.setattr(api.ModelWork, "start_workers", lambda _: None)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of any file is imported and can be built."""
    monkeypatch.setattr(tune.api, "import_model", lambda *_, **__: SimpleNamespace(model=STORED))
    monkeypatch.setattr(tune, "show_import", lambda _: None)
    open_work = partial(api.open_work, model="")
    monkeypatch.setattr(tune.api, "open_work", lambda *_, **__: open_work())
    monkeypatch.setattr(tune.api, "check_model", lambda *_, **__: CHECKED)


@pytest.mark.usefixtures("imported")
def test_an_interrupted_tuning_of_a_model_says_what_it_waits_for(
    type_in: TypeIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silent for as long as workers finished their work."""

    def interrupted(*_: object, work: api.ModelWork, **__: object) -> None:
        work.events.on_wait(30, "")
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.api, "tune_model", interrupted)
    ended = type_in("tuna", "tune", tmp_path / "net.onnx")
    assert ended.code == 130
    assert (
        "Stopping: workers have 30 s to finish what they do. Ctrl-C now ends them at once."
        in " ".join(ended.err.split())
    )


def test_values_of_inputs_reach_the_import_of_a_model(
    type_in: TypeIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed: dict[str, object] = {}

    def refused(*_: object, values: dict[str, object], **__: object) -> None:
        fixed.update(values)
        raise errors.BadInput("no model")

    monkeypatch.setattr(tune.api, "import_model", refused)
    values = ("--value", "sr=16000", "--value", "axes=-1,2", "--value", "training=false")
    assert type_in("tuna", "tune", tmp_path / "net.onnx", *values).err.startswith("Error: no model")
    assert fixed == {"sr": [16000], "axes": [-1, 2], "training": [0]}
    ended = type_in("tuna", "tune", tmp_path / "net.onnx", "--value", "sr=fast")
    assert "'sr=fast' is not of the form sr=16000 or axes=1,2." in ended.err


@pytest.mark.usefixtures("imported")
def test_a_model_that_is_not_built_says_how_it_is(
    type_in: TypeIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(session_id=1, added=1, wanted=2, errored=0, unmeasured=1, reached=None)
    monkeypatch.setattr(tune.api, "tune_model", lambda *_, **__: done)
    ended = type_in("tuna", "tune", tmp_path / "net.onnx")
    assert "checked: y to 0.001\n" in ended.out
    assert (
        "1 task is not measured, with the kernel of a similar one or a predicted one" in ended.out
    )
    assert "`tuna model build net -o net.so`" in ended.out


def test_a_time_of_a_busy_machine_is_said_to_be_noisy(capsys: pytest.CaptureFixture[str]) -> None:
    facts: dict[str, Any] = dict.fromkeys(field.name for field in fields(api.BuiltModel))
    empty = {key: {} for key in ("tasks", "shares", "refused", "absent", "errors", "wall_ms")}
    manifest = SimpleNamespace(whole_numbers=0, left_in_fp32={}, promise=None)
    numbers = {"runtime_share": 0.0, "cores": 1, "device": "CPU", "path": "m.so"}
    facts |= {**empty, **numbers, "model": SimpleNamespace(manifest=manifest)}
    for noisy in ([], ["tuna"]):
        show_built(
            api.BuiltModel(**{**facts, "times_ms": {"tuna": [0.05, 1.03, 2.31]}, "noisy": noisy})
        )
        said = capsys.readouterr().out
        mark = "~" if noisy else ""
        assert f"tuna: 1.03{mark} ms (0.05 to 2.31) on CPU" in said
        assert ("~ 1 time is noisy: the machine was busy while it was measured" in said) is bool(
            noisy
        )
