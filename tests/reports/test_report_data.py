"""The figures of a report: every number is what the rows say."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import softmax_kind
import sqlalchemy as sa
from builders import DRIVERS, START, DatabaseBuilder, tuned_network
from hypothesis import given
from hypothesis import strategies as st
from softmax_kind import Softmax

from tuna.configs import ConfigKind, DataType, parse_line
from tuna.db import models
from tuna.errors import NotFound
from tuna.reports.layers import MeasuredTrial, best_so_far
from tuna.reports.queries import read_figures
from tuna.reports.totals import Totals
from tuna.testing.kind_contract import registered

CONV, GEMM = DRIVERS[1], DRIVERS[5]


class Quantised(Softmax):
    """Of a kind that multiplies another type than that of its answer."""

    kind = "quantised"
    product_type = DataType.FP8_E4M3


def device(build: DatabaseBuilder, session: int, name: str, peak_gflops: float | None) -> None:
    """A device row in the session's environment."""
    environment = build.connection.execute(
        sa.select(models.Session.environment_id).where(models.Session.id == session)
    )
    build.insert(
        models.DeviceRow,
        environment_id=environment.scalar_one(),
        name=name,
        peak_gflops=peak_gflops,
        updated_at=build.clock,
    )


def test_candidates_with_the_winners_code_are_its_ties(build: DatabaseBuilder) -> None:
    session, config = build.session(), build.config(CONV)
    solver, other = build.solver("Tiles"), build.solver("Default")
    code = {name: name * 64 for name in "ab"}
    steps = "search,compile,eval"
    rounds = [build.job(session, config, solver, steps=steps, round=number) for number in (0, 1)]
    for job, codes in zip(rounds, ("aab", "ba"), strict=True):
        for number, one in enumerate(codes):
            build.trial(job, number, 2.0 if one == "a" else 3.0, artifact=code[one])
    build.winner(session, config, solver, 2.0, rounds[0])
    default = build.job(session, config, other)
    build.trial(default, 0, 4.0, artifact=code["b"])
    build.winner(session, config, other, 4.0, default)
    (layer,) = read_figures(build.connection, session).layers
    assert [(one.solver, one.ties) for one in layer.solvers] == [("Tiles", 2), ("Default", 0)]


def test_a_layer_with_two_solvers(build: DatabaseBuilder) -> None:
    session, config = build.session(), build.config(CONV)
    fast, slow = build.solver("Fast"), build.solver("Slow")
    for solver, times in [(slow, [8.0, 4.0]), (fast, [6.0, 2.0, None])]:
        job = build.job(session, config, solver)
        for number, time_ms in enumerate(times):
            build.trial(job, number, time_ms, cause=None if time_ms else "run_error")
        build.step(job, "eval", 10.0, 5.0, device="card 0")
        build.winner(session, config, solver, min(t for t in times if t), job, workspace_bytes=1024)
    device(build, session, "card 0", 1000.0)
    (layer,) = read_figures(build.connection, session).layers
    flops = parse_line(CONV)[0].flops
    assert layer.best is not None
    assert [(s.solver, s.time_ms, s.times_slower, s.trials, s.failed) for s in layer.solvers] == [
        ("Fast", 2.0, 1.0, 3, 1),
        ("Slow", 4.0, 2.0, 2, 0),
    ]
    assert layer.best.gflops == pytest.approx(flops / 2e-3 / 1e9)
    assert layer.peak_share == pytest.approx(flops / 2e-3 / 1e9 / 1000)
    assert (layer.trials, layer.failed, layer.median_ms, layer.speed_up) == (5, 1, 5.0, 2.5)
    assert [
        [(p.number, p.time_ms, p.best_ms) for p in solver.points] for solver in layer.solvers
    ] == [
        [(1, 6.0, 6.0), (2, 2.0, 2.0)],
        [(1, 8.0, 8.0), (2, 4.0, 4.0)],
    ]


def test_the_idle_share_is_what_a_device_did_not_measure(build: DatabaseBuilder) -> None:
    session, config = build.session(), build.config(CONV)
    for index, (name, busy_s) in enumerate([("card 0", 6.0), ("card 1", 1.0), ("card 0", 3.0)]):
        job = build.job(session, config, build.solver(f"S{index}"))
        build.step(job, "compile", 100.0, 100.0)
        build.clock = START + timedelta(seconds=10 * index)
        build.step(job, "eval", 10.0, busy_s, device=name)
    figures = read_figures(build.connection, session)
    assert [(d.name, d.steps, d.busy_s, d.span_s) for d in figures.devices] == [
        ("card 0", 2, 9.0, 30.0),
        ("card 1", 1, 1.0, 10.0),
    ]
    assert [d.idle_share for d in figures.devices] == [pytest.approx(0.7), pytest.approx(0.9)]
    assert figures.idle_share == pytest.approx(1 - 10 / 40)
    assert figures.header.first == START


def test_devices_with_one_name_are_idle_each_for_itself(build: DatabaseBuilder) -> None:
    """Eight of them that measure half of the time have measured four times as long as it took."""
    session, config = build.session(), build.config(CONV)
    for index in range(8):
        build.clock = START
        job = build.job(session, config, build.solver(f"S{index}"))
        build.step(job, "eval", 10.0, 5.0, device="card", worker=f"host:{index}")
    figures = read_figures(build.connection, session)
    assert [(d.name, d.steps, d.busy_s, d.span_s) for d in figures.devices] == [
        ("card", 8, 40.0, 80.0)
    ]
    assert figures.idle_share == pytest.approx(0.5)
    totals = Totals(trials=False)
    assert totals.advance(build.connection, 10.0)
    found = totals.sessions()[session]
    assert (found.devices, found.idle_share) == (8, pytest.approx(0.5))


def test_the_peak_is_unknown_where_it_was_not_measured_or_does_not_fit(
    build: DatabaseBuilder,
) -> None:
    session = build.session()
    half = build.config(GEMM.replace("gemm ", "gemmfp16 "))
    for config in (half, build.config(CONV)):
        job = build.job(session, config, build.solver("S"))
        build.step(job, "eval", 1.0, 1.0, device="card 0" if config == half else "card 1")
        build.winner(session, config, build.solver("S"), 1.0, job)
    device(build, session, "card 0", 1000.0)
    device(build, session, "card 1", None)
    layers = read_figures(build.connection, session).layers
    assert [layer.peak_share for layer in layers] == [None, None]
    assert [layer.peak_unknown for layer in layers] == [
        "the peak is measured in fp32 only",
        "the device's peak was not measured",
    ]


def test_the_peak_of_a_gpu_is_that_of_the_layers_data_type(build: DatabaseBuilder) -> None:
    session = build.session()
    kinds = ("gemm ", "gemmfp16 ", "gemmint8 ")
    for number, kind in enumerate(kinds):
        config, solver = build.config(GEMM.replace("gemm ", kind)), build.solver("S")
        job = build.job(session, config, solver)
        build.step(job, "eval", 1.0, 1.0, device="card 0")
        build.winner(session, config, solver, 1.0 / (1 + number), job)
    device(build, session, "card 0", 1000.0)
    build.connection.execute(sa.update(models.DeviceRow).values(peak_source="device"))
    layers = read_figures(build.connection, session).layers
    shares = {layer.driver.split()[1]: layer.peak_share for layer in layers}
    full = shares["gemm"]
    assert full
    assert shares == {"gemm": full, "gemmfp16": full * 2 / 16, "gemmint8": full * 3 / 32}


def test_the_peak_of_a_quantised_layer_is_that_of_8_bits(build: DatabaseBuilder) -> None:
    session, layer = build.session(), Quantised(64, 64)
    config, solver = build.config(layer), build.solver("S")
    job = build.job(session, config, solver)
    build.step(job, "eval", 1.0, 1.0, device="card 0")
    build.winner(session, config, solver, 1.0, job)
    device(build, session, "card 0", 1000.0)
    build.connection.execute(sa.update(models.DeviceRow).values(peak_source="device"))
    with registered(ConfigKind(Quantised)):
        (found,) = read_figures(build.connection, session).layers
    assert found.peak_share == pytest.approx(layer.flops / 1e-3 / 1e9 / (32 * 1000))


def test_a_layer_without_a_winner_says_why(build: DatabaseBuilder) -> None:
    session, config = build.session(), build.config(CONV)
    build.job(session, config, build.solver("A"), state="errored", cause="build_timeout")
    build.job(session, config, build.solver("B"), state="errored", cause="build_timeout")
    build.job(session, config, build.solver("C"), state="compile_queued")
    figures = read_figures(build.connection, session)
    assert figures.layers[0].no_winner == "1 job compile_queued, 2 jobs errored (build_timeout)"
    assert figures.layers[0].best is None
    assert figures.jobs == (("errored", 2), ("compile_queued", 1))
    assert (figures.with_winner, figures.mean_speed_up, figures.peak_share) == (0, None, None)


def test_failures_have_an_example_and_the_command_that_repeats_it(build: DatabaseBuilder) -> None:
    session, config = build.session(), build.config(CONV)
    job = build.job(session, config, build.solver("A"))
    build.trial(job, 0, None, cause="build_error")
    build.trial(job, 1, None, cause="build_error", output_tail="no such register")
    build.step(job, "compile", 1.0, 1.0)
    build.step(job, "eval", 1.0, 1.0, ok=False, cause="worker_lost", output_tail="gone")
    build.step(job, "eval", 1.0, 1.0, attempt=2, ok=False, cause="worker_lost", output_tail="gone")
    other = build.job(build.session(reason="other"), config, build.solver("A"))
    build.trial(other, 0, None, cause="run_error")
    failures = read_figures(build.connection, session).failures
    assert [(f.cause, f.trials, f.attempts, f.output_tail) for f in failures] == [
        ("build_error", 2, 0, "no such register"),
        ("worker_lost", 0, 2, "gone"),
    ]
    for failure, step in zip(failures, ("compile", "eval"), strict=True):
        assert failure.reproduce.startswith(
            f"tuna reproduce --library tvm --step {step} --solver A"
        )
    assert {f.job_id for f in failures} == {job}


def test_a_session_without_anything_has_empty_figures(build: DatabaseBuilder) -> None:
    figures = read_figures(build.connection, build.session())
    assert (figures.layers, figures.jobs, figures.failures, figures.devices) == ((), (), (), ())
    assert (figures.wall_s, figures.idle_share, figures.trials_per_minute) == (None, None, None)
    assert dict(figures.header.environment)["Flag threads"] == "1"
    with pytest.raises(NotFound, match="Unknown session 99"):
        read_figures(build.connection, 99)


def test_a_config_that_this_version_cannot_read_is_shown_without_rates(
    build: DatabaseBuilder,
) -> None:
    session, config = build.session(), build.config(CONV)
    build.connection.execute(sa.update(models.ConfigRow).values(json='{"kind": "newkind", "n": 1}'))
    build.winner(session, config, build.solver("A"), 1.0)
    (layer,) = read_figures(build.connection, session).layers
    assert (layer.flops, layer.peak_share) == (None, None)
    assert layer.best is not None
    assert (layer.best.time_ms, layer.best.gflops) == (1.0, None)


def test_a_kind_that_somebody_brings_has_rates_too(build: DatabaseBuilder) -> None:
    layer = Softmax(128, 1000)
    with registered(softmax_kind.KIND):
        session, config = build.session(), build.config(layer)
        build.winner(session, config, build.solver("A"), 0.5)
        (figures,) = read_figures(build.connection, session).layers
    assert (figures.label, figures.driver, figures.flops) == (
        layer.label,
        layer.json_text(),
        layer.flops,
    )
    assert figures.best is not None
    assert figures.best.gflops == pytest.approx(layer.flops / 0.5e-3 / 1e9)


@given(st.lists(st.builds(MeasuredTrial, st.integers(0, 9), st.floats(1e-3, 1e3)), max_size=30))
def test_the_best_so_far_never_rises(measured: list[MeasuredTrial]) -> None:
    points = best_so_far(measured)
    assert [point.number for point in points] == list(range(1, len(measured) + 1))
    assert sorted(point.time_ms for point in points) == sorted(trial.time_ms for trial in measured)
    best = [point.best_ms for point in points]
    assert best == sorted(best, reverse=True)
    assert best_so_far(list(reversed(measured))) == points or len(set(measured)) < len(measured)


def test_the_whole_network_adds_up(build: DatabaseBuilder) -> None:
    figures = read_figures(build.connection, tuned_network(build))
    assert (len(figures.layers), figures.with_winner) == (6, 5)
    assert (
        figures.trials
        == build.connection.execute(
            sa.select(sa.func.count()).select_from(models.TrialRow)
        ).scalar_one()
    )
    assert sum(failure.trials for failure in figures.failures) == figures.failed
    assert sum(number for _, number in figures.jobs) == 17
    assert 0 < (figures.idle_share or 0) < 1
    assert 0 < (figures.peak_share or 0) < 1


def test_the_figures_have_a_json_form_with_the_winners_params(build: DatabaseBuilder) -> None:
    session = tuned_network(build)
    figures = read_figures(build.connection, session)
    document = json.loads(json.dumps(figures.as_json()))
    best = document["layers"][0]["solvers"][0]
    stored = build.connection.execute(
        sa.select(models.FindDb.params).where(models.FindDb.job_id == best["job_id"])
    ).scalar_one()
    assert best["params"] == stored != ""
    assert document["layers"][0]["speed_up"] == figures.layers[0].speed_up
    assert document["header"]["first"] == figures.header.first.isoformat()  # type: ignore[union-attr]
    assert document["header"]["environment"]["Library"] == "tvm"
    assert document["jobs"] == dict(figures.jobs)
    assert document["trials"] == figures.trials
