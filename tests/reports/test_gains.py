"""What tuning gained: over the library's default, over another session, in a whole network; and how
sure the times are."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder

from tuna.configs import parse_line
from tuna.db import models, networks
from tuna.db.networks import Named
from tuna.errors import BadInput, NotFound
from tuna.reports.queries import read_figures
from tuna.reports.report_data import EACH_ONCE, Against, OtherTime

FIRST, SECOND, THIRD = DRIVERS[1:4]


def timed(
    build: DatabaseBuilder,
    session: int,
    driver: str,
    untuned_ms: float | None,
    best_ms: float | None,
) -> int:
    """A layer with the library's default and a tuned solver; returns the config."""
    config = build.config(driver)
    for name, algorithm, time_ms in [
        ("TvmUntuned", "Baseline", untuned_ms),
        ("Tile", "Direct", best_ms),
    ]:
        solver = build.solver(name, algorithm=algorithm)
        if time_ms is None:
            build.job(session, config, solver, state="errored", cause="run_error")
        else:
            build.winner(session, config, solver, time_ms)
    return config


def network(
    build: DatabaseBuilder, name: str, counts: dict[int, int], gpus: tuple[int, ...] = (1,)
) -> None:
    """A model with these configs so many times."""
    networks.add_model(build.connection, Named(name, "1"))
    networks.add_framework(build.connection, Named("torch", "2"))
    ids = networks.ids(build.connection, Named(name, "1"), Named("torch", "2"))
    for number in gpus:
        networks.set_weights(build.connection, *ids, number, counts)


def test_gains_are_over_the_default_and_over_the_other_session(build: DatabaseBuilder) -> None:
    session, other = (
        build.session(),
        build.session(library="onednn", reason="vendor", library_version="3.2"),
    )
    first, second, third = (
        timed(build, session, driver, *times)
        for driver, times in [(FIRST, (40.0, 2.0)), (SECOND, (None, 4.0)), (THIRD, (10.0, None))]
    )
    for name, time_ms, noisy in [("jit", 5.0, False), ("brgconv", 3.0, True)]:
        build.winner(other, first, build.solver(name, library="onednn"), time_ms, noisy=noisy)
    figures = read_figures(build.connection, session, other)
    assert figures.header.against == Against(other, "onednn", "3.2", "vendor", ())
    layers = {layer.config_id: layer for layer in figures.layers}
    assert (layers[first].gain_untuned, layers[first].gain_other) == (20.0, 1.5)
    assert layers[first].other == OtherTime("brgconv", 3.0, noisy=True)
    assert (layers[second].gain_untuned, layers[second].gain_other) == (None, None)
    assert (figures.mean_gain_untuned, figures.mean_gain_other) == (pytest.approx(20.0**0.5), 1.5)
    assert layers[third].best is not None, "with no other time the default is the best there is"
    assert (layers[third].best.solver, layers[third].gain_untuned) == ("TvmUntuned", 1.0)


def test_a_default_that_is_faster_is_no_winner_and_the_gain_says_so(build: DatabaseBuilder) -> None:
    session = build.session()
    timed(build, session, FIRST, 1.0, 2.0)
    (layer,) = read_figures(build.connection, session).layers
    assert [(solver.solver, solver.times_slower) for solver in layer.solvers] == [
        ("Tile", 1.0),
        ("TvmUntuned", 0.5),
    ]
    assert layer.gain_untuned == 0.5


def test_totals_count_a_layer_as_often_as_the_network_has_it(build: DatabaseBuilder) -> None:
    session, other = build.session(), build.session(reason="other")
    first, second = (
        timed(build, session, FIRST, 40.0, 2.0),
        timed(build, session, SECOND, None, 4.0),
    )
    build.winner(other, second, build.solver("Tile"), 2.0)
    elsewhere = build.config(THIRD)
    network(build, "ResNet", {first: 3, second: 2, elsewhere: 1}, gpus=(1, 8))
    network(build, "Small", {second: 5})
    network(build, "Unrelated", {elsewhere: 7})
    figures = read_figures(build.connection, session, other)
    resnet, small = figures.totals
    assert (resnet.name, resnet.layers, resnet.missing, resnet.calls, resnet.time_ms) == (
        "ResNet 1",
        2,
        1,
        5,
        14.0,
    )
    assert (resnet.untuned_layers, resnet.gain_untuned) == (1, 20.0)
    assert (resnet.other_layers, resnet.gain_other) == (1, 0.5)
    flops = [parse_line(driver)[0].flops for driver in (FIRST, SECOND)]
    assert resnet.gflops == pytest.approx((3 * flops[0] + 2 * flops[1]) / 14e-3 / 1e9)
    assert (small.name, small.calls, small.time_ms, small.gain_untuned) == (
        "Small 1",
        5,
        20.0,
        None,
    )
    assert [layer.count for layer in figures.layers] == [3, 2]


def test_without_a_network_each_layer_counts_once(build: DatabaseBuilder) -> None:
    session = build.session()
    timed(build, session, FIRST, 40.0, 2.0)
    timed(build, session, SECOND, 20.0, 4.0)
    (total,) = read_figures(build.connection, session).totals
    assert (total.name, total.calls, total.time_ms, total.gain_untuned) == (EACH_ONCE, 2, 6.0, 10.0)


def test_the_json_form_has_the_gains_and_the_totals(build: DatabaseBuilder) -> None:
    session = build.session()
    timed(build, session, FIRST, 40.0, 2.0)
    document = json.loads(json.dumps(read_figures(build.connection, session).as_json()))
    (layer,) = document["layers"]
    assert (layer["untuned_ms"], layer["gain_untuned"], layer["gain_other"]) == (40.0, 20.0, None)
    assert document["mean_gain_untuned"] == pytest.approx(20.0)
    assert document["totals"][0]["time_ms"] == 2.0


def test_the_gain_over_the_other_session_has_an_interval_where_both_have_repeats(
    build: DatabaseBuilder,
) -> None:
    session, other, config = build.session(), build.session(reason="other"), build.config(FIRST)
    for number, best_ms in [(session, 2.0), (other, 3.0)]:
        job = build.job(number, config, build.solver("Tile"))
        build.trial(
            job,
            0,
            best_ms,
            times_ms=json.dumps([best_ms * part for part in (0.98, 0.99, 1, 1, 1, 1.01, 1.02)]),
        )
        build.winner(number, config, build.solver("Tile"), best_ms, job)
    (layer,) = read_figures(build.connection, session, other).layers
    assert layer.other is not None
    assert layer.other.gain_interval is not None
    low, high = layer.other.gain_interval
    assert 1.4 < low < 1.5 < high < 1.6
    build.winner(session, config, build.solver("TvmUntuned", algorithm="Baseline"), 1.0)
    (layer,) = read_figures(build.connection, session, other).layers
    assert layer.other is not None
    assert (layer.gain_other, layer.other.gain_interval) == (1.5, None), (
        "the interval would be that of the default"
    )


def test_a_session_cannot_be_compared_with_itself_or_with_one_without_its_layers(
    build: DatabaseBuilder,
) -> None:
    session, other = build.session(), build.session(reason="other")
    timed(build, session, FIRST, 40.0, 2.0)
    timed(build, other, SECOND, 40.0, 2.0)
    with pytest.raises(BadInput, match="itself"):
        read_figures(build.connection, session, session)
    with pytest.raises(NotFound, match="no layer"):
        read_figures(build.connection, session, other)


def test_the_interval_and_the_command_are_those_of_the_winning_trial(
    build: DatabaseBuilder,
) -> None:
    session, config, solver = build.session(), build.config(FIRST), build.solver("Tile")
    job = build.job(session, config, solver)
    build.trial(job, 0, 9.0, low_ms=9.0, high_ms=9.0)
    build.trial(job, 1, 2.0, low_ms=1.9, high_ms=2.2, params=" tile =  8\n")
    build.step(job, "eval", 1.0, 1.0, "card 0")
    build.winner(session, config, solver, 2.0, job, trial_number=1, noisy=True, clock="cpu")
    (figures,) = read_figures(build.connection, session).layers[0].solvers
    assert figures.interval_ms == (1.9, 2.2)
    assert (figures.noisy, figures.clock) == (True, "cpu")
    assert figures.spread == pytest.approx(0.075)
    assert figures.reproduce.startswith("tuna reproduce --library tvm --step eval --solver Tile")
    assert "--index 1 " in figures.reproduce
    assert [(point.trial, point.params) for point in figures.points][1] == (1, "tile = 8")
    build.connection.execute(sa.update(models.TrialRow).values(low_ms=None))
    assert read_figures(build.connection, session).layers[0].solvers[0].interval_ms is None
