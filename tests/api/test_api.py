"""`tuna.api`: what the commands do, from Python: data and errors, nothing printed, quickly
imported."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from tuna import api
from tuna.errors import BadInput, NotFound
from tuna.vocabulary import Cause

LAYERS = """\
MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1
MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 16 -y 1 -x 1 -F 1
MIOpenDriver conv --nonsense
"""
PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.fixture
def layers(home: Path, tmp_path: Path) -> Path:
    """Two layers and a mistake, in the current folder."""
    path = tmp_path / "layers.txt"
    path.write_text(LAYERS)
    return path


@pytest.fixture
def session(layers: Path) -> api.StartedSession:
    """A session with jobs: two layers, ten solvers."""
    made = api.init_session("noop", "a test")
    api.import_configs(layers, "small")
    api.update_solvers("noop")
    api.update_applicability(made.id)
    api.load_jobs(made.id, tag="small", reason="test", options={"trials": 1})
    return made


@pytest.mark.usefixtures("forked")
def test_the_code_for_a_notebook_runs_as_it_stands(
    layers: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    imports, session, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = imports + session.replace('"tvm"', '"noop"').replace('"candidates": 16', '"trials": 1')
    assert "noop" in text
    assert "trials" in text
    names: dict[str, Any] = {}
    exec(compile(text, "docs/python.md", "exec"), names)  # noqa: S102  # our own document
    assert names["end"].states == {"evaluated": 20}
    assert names["end"].errored == names["end"].unfinished == 0
    assert len(names["winners"]) == 2
    out, _ = capfd.readouterr()
    assert [" Noop0 1.0 " in line for line in out.splitlines()] == [True, True], (
        "that of its own print"
    )


def test_each_function_says_what_it_does_and_what_it_returns() -> None:
    for name in api.__all__:  # sorted by ruff
        found = getattr(api, name)
        assert name in ("Role", "VisitorRole") or inspect.getdoc(found), name
        if inspect.isfunction(found):
            assert "return" in found.__annotations__, name
            assert "click" not in inspect.getsource(sys.modules[found.__module__]), (
                "it is not the command line's"
            )


def test_importing_it_loads_nothing_heavy() -> None:
    heavy = (
        "sqlalchemy",
        "celery",
        "redis",
        "tvm",
        "pydantic",
        "numpy",
        "rich",
        "click",
        "jinja2",
        "structlog",
    )
    code = (
        f"import sys; from tuna import api; print([name for name in {heavy} if name in"
        " sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out == "[]\n"


def test_preparing_a_session_returns_what_it_did(
    layers: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = api.init_session("noop", "why")
    again = api.init_session("noop", "why")
    assert (made.new, again.new, made.id) == (True, False, again.id)
    assert str(made.environment) == "noop 1, none x 0"
    read = api.import_configs(layers, "small")
    assert (read.configs, read.added, read.tagged, read.counts.rejected) == (2, 2, 2, 1)
    assert [rejection.line for rejection in read.rejections] == [3]
    assert [config.label for config in api.list_configs("small")]
    assert api.update_solvers("noop") == len(api.list_solvers("noop")) == 10
    assert api.update_applicability(made.id).pairs == 20
    first = api.load_jobs(made.id, tag="small", reason="x")
    assert (first, api.load_jobs(made.id, tag="small", reason="x")) == (
        api.LoadedJobs(20, 20),
        api.LoadedJobs(0, 20),
    )
    assert api.add_network("model", "resnet", "1")
    assert not api.add_network("model", "resnet", "1")
    assert [str(model) for model, _ in api.list_networks().models] == ["resnet 1"]
    with pytest.raises(FrozenInstanceError):
        made.id = 7  # type: ignore[misc]
    assert capfd.readouterr() == ("", "")


def test_errors_are_raised_and_not_printed(layers: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = api.init_session("noop", "why")
    with pytest.raises(NotFound, match="Unknown session 9"):
        api.status(9)
    with pytest.raises(NotFound):
        api.report(9)
    with pytest.raises(api.NothingImported, match=r"layers\.txt:3") as strict:
        api.import_configs(layers, "small", strict=True)
    assert [rejection.line for rejection in strict.value.rejections] == [3]
    layers.write_text("MIOpenDriver conv --nonsense\n")
    with pytest.raises(api.NothingImported, match="holds no layer") as none:
        api.import_configs(layers, "small")
    assert len(none.value.rejections) == 1
    with pytest.raises(BadInput, match="belongs to noop, not to tvm"):
        api.session_library(made.id, "tvm")
    with pytest.raises(BadInput, match="has no jobs"):
        api.enqueue(made.id)
    with pytest.raises(BadInput, match="No gateway"):
        api.joining().create_token("eval", 60)
    assert capfd.readouterr() == ("", "")


def test_a_database_that_is_not_there_is_refused_before_a_result_that_is(tmp_path: Path) -> None:
    """The result's folder may hold a file of the master's name already."""
    master = tmp_path / "gfx90a.json"
    master.write_text("{}")
    with pytest.raises(BadInput, match=r"absent cannot be read: No such file"):
        api.merge_databases(master, tmp_path / "absent", output=tmp_path)


def test_jobs_are_canceled_and_retried_by_what_they_are(session: api.StartedSession) -> None:
    first = api.cancel(session.id, jobs=[1])
    assert (dict(first.states), first.workers_told) == ({"new": 1}, True)
    assert dict(api.cancel(session.id, tag="small").states) == {"new": 19}
    assert api.retry(session.id) == {}
    (seen,) = api.status()
    assert (seen.jobs, seen.in_flight) == ({"canceled": 20}, 0)


def test_a_job_is_reproduced_here(session: api.StartedSession) -> None:
    results = api.reproduce(
        LAYERS.splitlines()[0],
        library="noop",
        solver="Noop1",
        step="measure",
        options={"fail": "Noop1"},
    )
    assert (results[-1].ok, results[-1].cause) == (False, Cause.RUN_ERROR)
    with pytest.raises(NotFound, match="no solver"):
        api.reproduce(LAYERS.splitlines()[0], library="noop", solver="None", step="measure")


def test_a_report_is_data_or_a_file(session: api.StartedSession, tmp_path: Path) -> None:
    figures = api.report(session.id)
    assert (len(figures.layers), dict(figures.jobs)) == (2, {"new": 20})
    assert (
        api.write_report(session.id, tmp_path / "r.html").read_text().startswith("<!doctype html>")
    )
