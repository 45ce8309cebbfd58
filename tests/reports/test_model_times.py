"""Times of whole models: rows of a run belong together, and a report has those of the models that
its layers are of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import DRIVERS, DatabaseBuilder

from tuna.cli.report import print_winners
from tuna.db import benchmarks, models
from tuna.db.benchmarks import NewBenchmark
from tuna.reports.html import render
from tuna.reports.queries import read_figures


def row(label: str, time_ms: float, **fields: Any) -> NewBenchmark:
    defaults: dict[str, Any] = {
        "model_id": None, "artifact": "0" * 64, "function": "main", "tracker": "10.0.0.7:9190",
        "device": "pi", "extents": {},
        "inputs": "x=n,3:float32", "low_ms": 0.9 * time_ms, "high_ms": 1.1 * time_ms, "repeats": 11,
        "noisy": False, "error": 0.0,
    }  # fmt: skip
    return NewBenchmark(**{**defaults, "label": label, "time_ms": time_ms, **fields})


@pytest.fixture
def session(build: DatabaseBuilder) -> int:
    """A session with a result for a layer of the model `net`, and one for a layer of none."""
    session = build.session()
    for number in (1, 2):
        solver, config = build.solver("Fast"), build.config(DRIVERS[number])
        build.winner(session, config, solver, time_ms=float(number))
    model = build.insert(models.Model, name="net", version="a" * 64)
    framework = build.insert(models.Framework, name="onnx", version="17")
    build.insert(
        models.ModelConfig,
        model_id=model,
        framework_id=framework,
        config_id=1,
        gpu_count=1,
        weight=3,
    )
    return session


def test_rows_of_a_run_are_compared_with_its_first_model_point_by_point(
    build: DatabaseBuilder,
) -> None:
    rows = [
        row(name, time_ms, extents={"n": n})
        for n, times in ((1, (2, 4)), (8, (5, 2.5)))
        for name, time_ms in zip("ab", times, strict=True)
    ]
    run = benchmarks.new_run()
    benchmarks.store(build.connection, run, rows[:2])
    benchmarks.store(build.connection, run, rows[2:])
    found = benchmarks.of_run(build.connection, run)
    assert [(one.label, one.extents["n"], one.ratio, one.first) for one in found] == [
        ("a", 1, 1.0, "a"), ("b", 1, 2.0, "a"), ("a", 8, 1.0, "a"), ("b", 8, 0.5, "a"),
    ]  # fmt: skip
    assert {one.where for one in found} == {"pi at 10.0.0.7:9190"}
    assert benchmarks.of_models(build.connection) == found
    assert benchmarks.of_models(build.connection, [1]) == []


def test_a_run_has_all_its_rows_and_a_list_the_latest(build: DatabaseBuilder) -> None:
    run = benchmarks.new_run()
    benchmarks.store(
        build.connection, run, [row("net.so", 1.0, extents={"n": n}) for n in range(1, 601)]
    )
    assert len(benchmarks.of_run(build.connection, run)) == 600
    assert [one.extents["n"] for one in benchmarks.of_models(build.connection)] == list(
        range(101, 601)
    )


def test_a_report_has_the_runs_of_models_with_its_layers(
    build: DatabaseBuilder, session: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = benchmarks.model_id(build.connection, "net", "a" * 64)
    assert model is not None
    benchmarks.store(
        build.connection,
        benchmarks.new_run(),
        [row("net.so", 2.5, model_id=model), row("<b>.so", 10.0, error=None, noisy=True)],
    )
    benchmarks.store(build.connection, benchmarks.new_run(), [row("stranger.so", 1.0)])
    assert [one.label for one in benchmarks.of_models(build.connection, [model])] == [
        "net.so",
        "<b>.so",
    ]
    figures = read_figures(build.connection, session)
    assert [(one.name, one.first) for one in figures.models] == [
        (f"net.so (net@{'a' * 12})", "net.so"),
        ("<b>.so", "net.so"),
    ]
    page = render(figures)
    assert "Whole models" in page
    assert "&lt;b&gt;.so" in page
    assert "no number" in page
    assert "stranger.so" not in page
    print_winners(figures)
    shown = capsys.readouterr().out
    assert "<b>.so on pi at 10.0.0.7:9190: 10 ms (9 to 11), 4.00 of net.so" in shown
    assert json.loads(json.dumps(figures.as_json()))["models"][1]["ratio"] == 4.0


def test_a_report_without_whole_models_does_not_speak_of_them(
    build: DatabaseBuilder, session: int
) -> None:
    assert "Whole models" not in render(read_figures(build.connection, session))


def test_a_model_that_is_deleted_leaves_its_times(build: DatabaseBuilder, session: int) -> None:
    benchmarks.store(build.connection, benchmarks.new_run(), [row("net.so", 2.5, model_id=1)])
    for table in (models.ModelConfig, models.Model):
        build.connection.execute(table.__table__.delete())
    assert [one.model for one in benchmarks.of_models(build.connection)] == [""]
