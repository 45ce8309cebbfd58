"""`tuna.open()`: methods that are typed, describe before they write, and raise what the commands
raise."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import create_autospec

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder

import tuna
from tuna import api
from tuna.api.client import ModelHandle, SessionResults
from tuna.configs import ConvConfig
from tuna.db import models
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.errors import BadInput, LibraryMissing, NotFound
from tuna.results.result_rows import html_table
from tuna.vocabulary import BASELINE
from tuna_models import api as models_api

ROOT = Path(__file__).parents[2]
LINE = '{"kind": "gemm", "m": 8, "n": 8, "k": 8}'
#: A script with three mistakes; the comments say what a type checker finds.
MISTAKES = """\
import tuna

t = tuna.open()
t.query(n_best="three")  # arg-type
t.session("tvm").candidates()  # call-arg
t.session("tvm").run().bets()  # attr-defined
"""


def rows(table_of: type[models.Base]) -> int:
    """How many rows a table has."""
    with reading(open_database()) as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table_of)).scalar_one()


def test_importing_tuna_loads_nothing_heavy() -> None:
    heavy = (
        "sqlalchemy",
        "celery",
        "redis",
        "tvm",
        "pydantic",
        "numpy",
        "rich",
        "click",
        "pandas",
        "tuna.api",
    )
    code = f"import sys, tuna; tuna.open; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out == "[]\n"


def test_a_home_is_made_where_it_is_asked_for_and_one_is_open_at_a_time(
    home: Path, tmp_path: Path
) -> None:
    first = tuna.open()
    assert first.home == home
    assert not first.query()
    second = tuna.open(tmp_path / "another")
    assert (tmp_path / "another" / "tuna.sqlite").exists()
    assert not second.query()
    for call in (first.query, first.models, first.status, lambda: first.session("noop")):
        with pytest.raises(BadInput, match="one home at a time") as error:
            call()
        assert str(home) in error.value.hint
    os.environ["TUNA_HOME"] = str(home)


def test_a_session_is_written_by_run_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_autospec(api.run, return_value=SimpleNamespace(errored=2))
    monkeypatch.setattr(api, "run", run)
    plan = tuna.open().session("noop", reason="why").layers([LINE])
    more = plan.solvers("Noop1", "Noop2").options(trials=True).options(sleep_s=0.5)
    assert (plan.names, plan.values) == ((), {})
    assert rows(models.Session) == rows(models.ConfigRow) == 0
    done = more.run(processes=1)
    assert (done.errored, run.call_args.kwargs["processes"]) == (2, 1)
    with reading(open_database()) as connection:
        jobs = connection.execute(
            sa.select(models.Job.options, models.SolverRow.name).join(models.SolverRow)
        ).all()
    assert [(name, options) for options, name in jobs] == [
        (name, {"trials": True, "sleep_s": 0.5}) for name in ("Noop1", "Noop2")
    ]
    assert more.run().session_id == done.session_id
    assert rows(models.Job) == 2
    assert plan.layers(tag=done.tag).run().session_id == done.session_id
    assert rows(models.Job) == 10


def test_what_cannot_be_is_raised_as_the_commands_raise_it(home: Path) -> None:
    t = tuna.open()
    noop = t.session("noop")
    for wrong, error, sentence in (
        (lambda: noop.layers(), BadInput, "Say which layers"),
        (lambda: noop.run(), BadInput, "Say which layers"),
        (lambda: noop.layers(tag="none").run(), NotFound, "'none'"),
        (lambda: noop.layers("none.txt").run(), BadInput, "none.txt"),
        (lambda: noop.layers(["nonsense"]).run(), api.NothingImported, "layers-"),
        (lambda: noop.layers([LINE]).candidates(3).run(), BadInput, "candidates"),
        (lambda: noop.layers([LINE]).solvers("S").run(), BadInput, "'S'"),
        (lambda: t.session("none").layers([LINE]).run(), NotFound, "none"),
        (lambda: t.query(since="yesterday"), BadInput, "'yesterday' is not a time"),
        (lambda: t.coverage("x", "znver5"), NotFound, "Unknown model or tag"),
        (lambda: t.model("x"), NotFound, "Unknown model"),
        (lambda: t.tune("x.tflite"), BadInput, "x.tflite"),
    ):
        with pytest.raises(error, match=sentence):  # type: ignore[arg-type]
            wrong()


@pytest.fixture
def tuned(home: Path) -> SessionResults:
    """A session of two layers, one with a baseline that seems the fastest, one with a baseline
    alone."""
    with writing(open_database()) as connection:
        build = DatabaseBuilder(connection)
        session, untuned = build.session(), build.solver("Untuned", algorithm=BASELINE)
        for layer, times in ((DRIVERS[1], {"A": 2.0, "B": 3.0}), (DRIVERS[2], {})):
            config = build.config(layer, tag="mine")
            build.winner(session, config, untuned, 1.0)
            for name, time_ms in times.items():
                build.winner(session, config, build.solver(name), time_ms)
        build.winner(session, build.config(ConvConfig(1, 8, 6, 6, 8, 1, 1)), build.solver("A"), 1.0)
    return SessionResults(session, "mine", 0)


def test_the_best_of_each_layer_is_no_baseline_unless_there_is_no_other(
    tuned: SessionResults,
) -> None:
    assert [(row.solver, row.time_ms) for row in tuned.best()] == [("A", 2.0), ("Untuned", 1.0)]
    assert len(tuned.results()) == 4, "only the layers of the tag"


def test_rows_are_a_table_in_a_notebook_and_a_data_frame_with_pandas(
    tuned: SessionResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = tuned._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<tr>") == 3
    evil = replace(tuned.best()[0], layer="<script>")
    found = replace(tuned.best(), rows=(evil,), more=True)
    assert "<script>" not in found._repr_html_()
    title, row, note = str(found).splitlines()
    assert (title.split()[:3], row.split()[0]) == (["layer", "solver", "ms"], "<script>")
    assert "there are more" in note
    assert "there are more" in found._repr_html_()
    assert html_table("<b>", ("a",), [(1,), (0.5,), (None,)]).count("&lt;b&gt;") == 1
    if find_spec("pandas"):
        frame = found.frame()
        assert list(frame["layer"]) == ["<script>"]
        assert str(frame["measured_at"].dt.tz) == "UTC"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LibraryMissing, match="pandas"):
        found.frame()


def test_a_model_is_built_as_it_was_tuned(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = SimpleNamespace(name="net", version="1" * 64)
    answers: dict[str, Any] = {
        "import_model": SimpleNamespace(model=stored),
        "open_work": contextlib.nullcontext(),
        "tune_model": SimpleNamespace(errored=1),
        "build_model": "built",
        "show_model": (stored, []),
    }
    doubles = {
        name: create_autospec(getattr(models_api, name), return_value=answer)
        for name, answer in answers.items()
    }
    for name, double in doubles.items():
        monkeypatch.setattr(models_api, name, double)
    model = tuna.open().tune("nets/net.onnx", minutes=5, batch=8, candidates=2, winograd=False)
    assert model == ModelHandle(f"net@{stored.version}", winograd=False, errored=1)
    assert model.build("net.so") == "built"  # type: ignore[comparison-overlap]
    assert doubles["import_model"].call_args.args == ("net", Path("nets/net.onnx"))
    asked = doubles["tune_model"].call_args.kwargs
    assert (asked["winograd"], asked["minutes"], asked["candidates"]) == (False, 5, 2)
    assert doubles["build_model"].call_args.args == (model.name, Path("net.so"))
    assert doubles["build_model"].call_args.kwargs["winograd"] is False
    assert tuna.open().model("net").name == model.name
    assert "<caption>net@" in model._repr_html_()


def test_nothing_is_sent_over_a_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    t = tuna.open()
    assert not t.query()
    assert t.models() == []
    assert t.status() == []


@pytest.mark.drill(only=True)
def test_a_users_script_passes_a_strict_type_checker_and_mistakes_do_not(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(MISTAKES)
    # Elsewhere than in the checkout, where only an installation can be found.
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        str(ROOT / "examples" / "tune_layers.py"),
        str(wrong),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    expected = [line.split("# ")[1] for line in MISTAKES.splitlines() if "# " in line]
    assert [line.rsplit("[")[-1].rstrip("]") for line in found] == expected, done.stdout
    assert all("wrong.py" in line for line in found)
