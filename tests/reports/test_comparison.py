"""`tuna compare`: two sessions beside each other, on SQLite and MariaDB."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder

from tuna.cli import report
from tuna.db import networks
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.errors import BadInput, NotFound
from tuna.reports.comparison import ALL_LAYERS, Comparison, compare, ratio_of_medians

STEADY = (0.99, 1.0, 1.01, 1.0, 1.0)


def result(
    build: DatabaseBuilder,
    session: int,
    driver: str,
    solver: str,
    time_ms: float,
    repeats: Sequence[float] = STEADY,
) -> None:
    """A winner whose repeats are `time_ms` times `repeats`."""
    number = build.solver(solver, library=solver.partition("-")[0])
    config = build.config(driver)
    job = build.job(session, config, number)
    build.trial(job, 0, time_ms, times_ms=json.dumps([time_ms * factor for factor in repeats]))
    build.winner(session, config, number, time_ms, job)


def two_sessions(build: DatabaseBuilder) -> tuple[int, int]:
    """The second is faster on one layer, slower on another, as fast on the third, and each has one
    of its own."""
    ours, theirs = build.session("tvm"), build.session("onednn", device="AMD EPYC 9B45")
    for driver, fast, other in zip(DRIVERS, (2.0, 3.0, 4.0), (1.0, 9.0, 4.01), strict=False):
        result(build, ours, driver, "tvm-slow", fast * 2)
        result(build, ours, driver, "tvm-fast", fast)
        result(build, theirs, driver, "onednn-brgconv", other)
    result(build, ours, DRIVERS[3], "tvm-fast", 1.0)
    result(build, theirs, DRIVERS[4], "onednn-brgconv", 1.0)
    build.job(
        ours, build.config(DRIVERS[4]), build.solver("tvm-fast", library="tvm"), state="errored"
    )
    return ours, theirs


@pytest.fixture
def found(engine: sa.Engine) -> Comparison:
    """The comparison of `two_sessions`, the first layer of which a network has twice."""
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        ids = two_sessions(build)
        model, framework = networks.Named("Net", "1"), networks.Named("Torch", "2")
        networks.add_model(connection, model)
        networks.add_framework(connection, framework)
        weights = {
            build.config(DRIVERS[0]): 2,
            build.config(DRIVERS[1]): 1,
            build.config(DRIVERS[4]): 7,
        }
        networks.set_weights(connection, *networks.ids(connection, model, framework), 1, weights)
    with reading(engine) as connection:
        return compare(connection, ids)


def test_each_layer_has_the_time_of_each_sessions_fastest_solver(found: Comparison) -> None:
    ours, theirs = (session.session_id for session in found.sessions)
    shown = [
        [(best.solver, best.time_ms) if best else None for best in layer.bests]
        for layer in found.layers
    ]
    assert shown == [
        [("tvm-fast", 2.0), ("onednn-brgconv", 1.0)],
        [("tvm-fast", 3.0), ("onednn-brgconv", 9.0)],
        [("tvm-fast", 4.0), ("onednn-brgconv", 4.01)],
        [("tvm-fast", 1.0), None],
        [None, ("onednn-brgconv", 1.0)],
    ]
    assert [layer.fastest for layer in found.layers] == [theirs, ours, None, None, None]
    assert found.wins == (1, 1)
    assert [layer.missing for layer in found.layers[2:]] == [
        ("", ""),
        ("", "no jobs"),
        ("no winner", ""),
    ]
    assert [session.layers for session in found.sessions] == [4, 4]


def test_a_ratio_is_to_the_first_session_with_its_interval(found: Comparison) -> None:
    second = [layer.ratios[1] for layer in found.layers]
    assert [ratio.value if ratio else None for ratio in second] == [0.5, 3.0, 4.01 / 4, None, None]
    assert all(layer.ratios[0] is None for layer in found.layers)
    for ratio in second[:3]:
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        assert ratio.low < ratio.value < ratio.high
        assert ratio.high / ratio.low < 1.05


def test_totals_count_what_both_have_as_often_as_the_network_does(found: Comparison) -> None:
    assert [(total.name, total.layers, total.runs, total.times_ms) for total in found.totals] == [
        (ALL_LAYERS, 3, 3, (9.0, pytest.approx(14.01))),
        ("Net 1", 2, 3, (7.0, 11.0)),
    ]
    assert found.totals[1].ratios == (1.0, 11 / 7)
    assert found.geometric_means == (1.0, pytest.approx((0.5 * 3 * 4.01 / 4) ** (1 / 3)))
    assert json.loads(json.dumps(found.as_json()))["totals"][1]["ratios"] == [1.0, 11 / 7]


def test_an_imported_result_has_a_ratio_without_an_interval(build: DatabaseBuilder) -> None:
    ours, theirs = build.session("tvm"), build.session("miopen")
    for session, time_ms in ((ours, 2.0), (theirs, 1.0)):
        build.winner(
            session, build.config(DRIVERS[0]), build.solver("S"), time_ms, trial_number=None
        )
    (layer,) = compare(build.connection, [ours, theirs]).layers
    assert layer.ratios[1] is not None
    assert (layer.ratios[1].value, layer.ratios[1].low, layer.fastest) == (0.5, None, theirs)


def test_what_is_not_like_for_like_is_said(build: DatabaseBuilder) -> None:
    ours, theirs = build.session("tvm"), build.session("onednn", device="Another CPU", num_cu=8)
    for session in (ours, theirs):
        result(build, session, DRIVERS[0], "S", 1.0)
    device, cores = compare(build.connection, [ours, theirs]).differences
    assert f"session {ours}: AMD EPYC 9B45; session {theirs}: Another CPU" in device
    assert f"session {ours}: 2; session {theirs}: 8" in cores
    same = build.session("onednn", reason="the same machine")
    result(build, same, DRIVERS[0], "S", 1.0)
    assert compare(build.connection, [ours, same]).differences == ()
    native = build.session("tvm", reason="in blocks", conditions={"layouts": "native"})
    result(build, native, DRIVERS[0], "S", 1.0)
    (layouts,) = compare(build.connection, [native, same]).differences
    assert f"layouts (session {native}: native; session {same}: default)" in layouts


def test_what_cannot_be_compared_is_refused(build: DatabaseBuilder) -> None:
    ours, theirs = build.session("tvm"), build.session("onednn")
    result(build, ours, DRIVERS[0], "S", 1.0)
    result(build, theirs, DRIVERS[1], "S", 1.0)
    with pytest.raises(BadInput, match="at least two"):
        compare(build.connection, [ours, ours])
    with pytest.raises(NotFound, match="Unknown session 99"):
        compare(build.connection, [ours, 99])
    with pytest.raises(NotFound, match="no layer") as nothing:
        compare(build.connection, [ours, theirs])
    assert f"session {ours}: 1, session {theirs}: 1" in nothing.value.hint
    with pytest.raises(NotFound, match="tag"):
        compare(build.connection, [ours, theirs], tag="nowhere")


@pytest.mark.parametrize("repeats", [3, 7, 20])
def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says(repeats: int) -> None:
    generator, held, rounds = random.Random(1), 0, 800
    for _ in range(rounds):
        first = [math.exp(generator.gauss(0, 0.05)) for _ in range(repeats)]
        second = [1 + generator.expovariate(20) for _ in range(repeats)]
        ratio = ratio_of_medians(statistics.median(first), first, statistics.median(second), second)
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 1 / (1 + math.log(2) / 20) <= ratio.high
    assert 0.92 <= held / rounds <= 0.99


def test_a_layer_is_one_line_at_80_columns(
    found: Comparison, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was broken into five, to make room for intervals and solvers."""
    monkeypatch.setattr(report, "table_width", lambda: 80)
    layers = [
        replace(layer, label=f"conv 1x1024x14x14 k{200 + number} 1x1 s1 p0 NCHW fp32 F")
        for number, layer in enumerate(found.layers)
    ]
    other = replace(found.layers[0], label="gemm 128x768x768 NN fp32")
    report._print_comparison(replace(found, layers=(*layers, other)))
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if "k201" in line)
    assert row.split()[-3:] == ["3", "9", "3.000"]
    assert max(len(line) for line in lines if not line.startswith("session ")) <= 80
    report._print_comparison(replace(found, layers=tuple(layers)))
    assert "layer, all 1x1 s1 p0 NCHW fp32 F" in capsys.readouterr().out


def test_compare_shows_both_sessions_and_warns(type_in: Callable[..., object]) -> None:
    with writing(open_database()) as connection:
        build = DatabaseBuilder(connection)
        ours, theirs = two_sessions(build)
        elsewhere = build.session("tvm", reason="elsewhere", device="Another CPU")
        result(build, elsewhere, DRIVERS[0], "S", 1.0)
    shown = type_in("tuna", "compare", "--session-id", ours, "--session-id", theirs)
    assert shown.code == 0, shown.err
    assert shown.err == ""
    (row,) = [line for line in shown.out.splitlines() if "3x224x224" in line]
    assert row.split()[-7:-3] == ["2", "1", "0.500", "[0.493,"]
    assert row.split()[-2:] == [str(theirs), "onednn-brgconv"]
    assert "only 1 tvm-fast" in shown.out
    document = json.loads(
        type_in("tuna", "compare", "--session-id", ours, "--session-id", theirs, "--json").out
    )
    assert document["layers"][1]["ratios"][1]["value"] == 3.0
    assert (
        "different devices"
        in type_in("tuna", "compare", "--session-id", ours, "--session-id", elsewhere).err
    )
    assert type_in("tuna", "compare", "--session-id", ours).code == 2
    assert type_in("tuna", "compare", "--session-id", ours, "--session-id", 99).code == 3
