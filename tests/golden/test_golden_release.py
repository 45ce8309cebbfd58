"""Promotion and rollback: the current version, immutable versions, the promotion gate."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from golden_scene import ASM, A, B, Scene

from tuna.db import models
from tuna.db.engine import make_engine, reading
from tuna.db.types import utc_now
from tuna.errors import BadInput, NotFound
from tuna.golden import GateViolated, GoldenFrozen, promote, rollback, versions
from tuna.golden.versions import NotReleasable, current


def _current(scene: Scene, library: str = "miopen") -> int | None:
    with reading(scene.engine) as connection:
        now = current(versions(connection, library))
    return now.version if now else None


def _three(scene: Scene) -> None:
    """Versions 1, 2, 3, each 10 % faster than the one before."""
    for number, time_ms in ((1, 1.0), (2, 0.9), (3, 0.81)):
        scene.build(number, scene.session({(A, ASM): time_ms}), base=number - 1 or None)


def test_a_promoted_version_is_current_and_says_when(scene: Scene) -> None:
    _three(scene)
    assert (_current(scene), scene.states()) == (None, {1: "draft", 2: "draft", 3: "draft"})
    before = utc_now()
    report = promote(scene.engine, 1)
    assert (report.against, report.total.new) == (None, 1)
    assert (_current(scene), scene.states()) == (1, {1: "promoted", 2: "draft", 3: "draft"})
    (promoted_at,) = scene.rows(
        sa.select(models.Golden.promoted_at).where(models.Golden.version == 1)
    )[0]
    assert before <= promoted_at <= utc_now()
    promote(scene.engine, 3)
    assert (_current(scene), scene.states()) == (3, {1: "promoted", 2: "draft", 3: "promoted"})


@pytest.mark.both_databases_in_drills
def test_current_is_what_was_promoted_last_not_the_largest_number(scene: Scene) -> None:
    _three(scene)
    promote(scene.engine, 3)
    promote(scene.engine, 2)
    assert _current(scene) == 2
    assert rollback(scene.engine, "miopen")[0].version == 2
    assert _current(scene) == 3


@pytest.mark.both_databases_in_drills
def test_a_rollback_makes_the_release_before_it_current_again(scene: Scene) -> None:
    _three(scene)
    for number in (1, 2, 3):
        promote(scene.engine, number)
    contents = scene.everything()[1:]
    withdrawn, now = rollback(scene.engine, "miopen")
    assert (withdrawn.version, now and now.version, _current(scene)) == (3, 2, 2)
    rollback(scene.engine, "miopen")
    withdrawn, now = rollback(scene.engine, "miopen")
    assert (withdrawn.version, now, _current(scene)) == (1, None, None)
    with pytest.raises(BadInput, match="No golden version of miopen is promoted"):
        rollback(scene.engine, "miopen")
    assert scene.states() == {1: "withdrawn", 2: "withdrawn", 3: "withdrawn"}
    assert scene.everything()[1:] == contents  # nothing is deleted


@pytest.mark.both_databases_in_drills
@pytest.mark.parametrize("withdraw", [False, True])
def test_what_was_promoted_never_changes(scene: Scene, withdraw: bool) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0}))
    promote(scene.engine, 1)
    if withdraw:
        rollback(scene.engine, "miopen")
    before = scene.everything()
    newer = scene.session({(A, ASM): 0.5})
    state = "withdrawn" if withdraw else "promoted"
    with pytest.raises(
        GoldenFrozen, match=f"version 1 of miopen is {state} and never changes"
    ) as refusal:
        scene.build(1, newer, overwrite=True)
    assert refusal.value.hint == "build a new version on it"
    with pytest.raises(GoldenFrozen, match=f"is {state} already"):
        promote(scene.engine, 1)
    assert scene.everything() == before
    assert scene.build(2, newer, base=1).replaced == 1  # but it may be built upon
    assert scene.everything()[1][:1] == before[1]


def test_a_release_outlives_what_becomes_of_its_session(scene: Scene) -> None:
    session = scene.session({(A, ASM): {"time_ms": 1.0, "code": [b"code"]}})
    scene.build(1, session)
    promote(scene.engine, 1)
    before = scene.everything()
    for table in (
        models.FindDbKernel,
        models.FindDb,
        models.TrialRow,
        models.StepResultRow,
        models.Job,
    ):
        scene.execute(sa.delete(table))
    assert scene.everything() == before
    (entry,) = scene.entries(1)
    assert scene.kernels(entry.id) == [(b"code", "k0.o", "-O3")]


@pytest.mark.both_databases_in_drills
def test_a_draft_that_fails_the_gate_stays_a_draft(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0, (B, ASM): 1.0}))
    promote(scene.engine, 1, max_regression=0.0)  # nothing to be slower than
    scene.build(2, scene.session({(A, ASM): 0.5, (B, ASM): 1.2}), base=1)
    before = scene.everything()
    with pytest.raises(
        GateViolated, match="version 2 of miopen is not promoted: 1 layer is more than 10 % slower"
    ) as no:
        promote(scene.engine, 2, max_regression=0.1)
    assert no.value.hint == "look at: `tuna golden report 2 --against 1`"
    assert no.value.exit_code == 1
    with pytest.raises(
        GateViolated,
        match=r"slower, the worst by 20 %: .*; the total weighted time shrinks by 15 %",
    ):
        promote(scene.engine, 2, max_regression=0.1, min_gain=0.5)
    assert scene.everything() == before
    report = promote(scene.engine, 2, max_regression=0.2, min_gain=0.15)
    assert (report.against, report.total.faster, report.total.slower) == (1, 1, 1)


@pytest.mark.both_databases_in_drills
def test_the_gate_compares_with_what_is_current_and_not_with_the_base(scene: Scene) -> None:
    _three(scene)
    promote(scene.engine, 3)
    scene.build(4, scene.session({(A, ASM): 0.85}), base=1)
    with pytest.raises(GateViolated, match=r"slower, the worst by 4\.938 %"):
        promote(scene.engine, 4, max_regression=0.0)
    rollback(scene.engine, "miopen")
    # nothing is current: the base
    assert promote(scene.engine, 4, max_regression=0.0, min_gain=0.15).against == 1
    rollback(scene.engine, "miopen")


def test_a_version_that_lost_layers_is_held_back(scene: Scene) -> None:
    scene.build(2, scene.session({(A, ASM): 0.5}))
    scene.build(1, scene.session({(A, ASM): 1.0, (B, ASM): 1.0}))
    promote(scene.engine, 1)
    with pytest.raises(GateViolated, match="1 layer is missing that version 1 has"):
        promote(scene.engine, 2, max_regression=0.5)
    promote(scene.engine, 2)


def test_each_library_has_a_current_version_of_its_own(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0}))
    scene.build(1, scene.session({(A, "TvmConvIm2col"): 2.0}, library="tvm"))
    with pytest.raises(
        BadInput, match="Several libraries have a golden version 1: miopen, tvm"
    ) as refusal:
        promote(scene.engine, 1)
    assert refusal.value.hint == "choose one with --library"
    assert promote(scene.engine, 1, library="tvm").against is None
    assert (_current(scene), _current(scene, "tvm")) == (None, 1)
    with pytest.raises(BadInput, match="No golden version of miopen is promoted"):
        rollback(scene.engine, "miopen")
    assert rollback(scene.engine, "tvm")[0].library == "tvm"


def test_what_is_not_there_is_neither_promoted_nor_rolled_back(scene: Scene) -> None:
    with pytest.raises(NotFound, match="Unknown golden version 1"):
        promote(scene.engine, 1)
    with pytest.raises(NotFound, match="miopen has no golden versions") as refusal:
        rollback(scene.engine, "miopen")
    assert refusal.value.hint == "libraries: none yet"


def test_of_two_who_promote_a_version_one_does_and_the_other_is_told(scene: Scene) -> None:
    scene.build(1, scene.session({(A, ASM): 1.0}))
    ready, outcomes = threading.Barrier(2, timeout=120), []

    def work() -> None:
        engine = make_engine(scene.engine.url.render_as_string(hide_password=False))
        ready.wait()
        try:
            outcome: Any = promote(engine, 1)
        except GoldenFrozen as error:
            outcome = error
        outcomes.append(outcome)
        engine.dispose()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(isinstance(one, GoldenFrozen) for one in outcomes) == [False, True]


@pytest.mark.both_databases_in_drills
def test_noisy_results_are_released_on_demand_and_simulated_ones_never(scene: Scene) -> None:
    session = scene.session({(A, ASM): {"time_ms": 1.0, "noisy": True}, (B, ASM): 2.0})
    scene.build(1, session, allow_noisy=True)
    with pytest.raises(
        NotReleasable, match="1 of its results were measured on a device that was not quiet"
    ) as refusal:
        promote(scene.engine, 1)
    assert "--allow-noisy" in refusal.value.hint
    with scene.builder() as build:
        build.connection.execute(sa.update(models.FindDb).values(simulated=True))
    with pytest.raises(NotReleasable, match="2 of its results were timed by a stand-in"):
        promote(scene.engine, 1, allow_noisy=True)
    with scene.builder() as build:
        build.connection.execute(sa.update(models.FindDb).values(simulated=False))
    assert promote(scene.engine, 1, allow_noisy=True).version == 1
