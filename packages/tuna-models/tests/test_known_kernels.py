"""Which results a model is built from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import START, DatabaseBuilder, memory
from test_model_store import manifest as manifest_of

from tuna.configs import ConvConfig, TaskConfig
from tuna.db import models
from tuna_models.manifest import Manifest
from tuna_models.work.known_kernels import (
    ResultScope,
    Winner,
    finalists,
    nearest,
    warm_starts,
    winners,
)

CORE = ConvConfig(1, 64, 28, 28, 64, 3, 3, 1, 1)
TASK = TaskConfig(core=CORE, layouts="native", epilogue=("bias",))
LARGER = replace(TASK, core=replace(CORE, batchsize=8))
NAMED = TaskConfig(name="max_pool", body="0" * 64)
TARGET = '{"kind":"llvm","mcpu":"znver5","num-cores":2}'
EVERYTHING = ResultScope()


@pytest.fixture
def build() -> DatabaseBuilder:
    return DatabaseBuilder(memory().connect())


def manifest(*tasks: TaskConfig) -> Manifest:
    return manifest_of(*tasks, target=TARGET, tvm="0.27.0.post1")


def cold(build: DatabaseBuilder) -> int:
    return build.session(reason="models", conditions={"caches": "cold"})


def names(found: list[Winner]) -> list[str]:
    return [one.params for one in found]


def test_the_best_of_each_solver_comes_first_and_then_what_was_close(
    build: DatabaseBuilder,
) -> None:
    session, task = cold(build), build.config(TASK)
    best = build.winner(session, task, build.solver("F4", algorithm="Winograd"), 1.0, params="f4")
    assert best
    build.winner(session, task, build.solver("F2", algorithm="Winograd"), 1.2, params="f2")
    build.winner(session, task, build.solver("Tile"), 3.0, params="tile")
    (job,) = build.connection.execute(
        models.FindDb.__table__.select().where(models.FindDb.params == "f4")
    ).all()
    for number, (time_ms, params) in enumerate(
        [(1.0, "f4"), (1.1, "f4b"), (1.3, "f4c"), (2.0, "f4d")]
    ):
        build.trial(job.job_id, number, time_ms, params=params)
    build.trial(job.job_id, 9, None, params="failed", cause="wrong_result")
    found = finalists(build.connection, manifest(TASK, NAMED), EVERYTHING)
    assert {key: names(each) for key, each in found.items()} == {TASK.key: ["f4", "f2", "f4b"]}
    direct = finalists(build.connection, manifest(TASK), ResultScope(winograd=False))
    assert names(direct[TASK.key]) == ["tile"]


def test_results_of_other_versions_of_the_kernels_are_not_used(build: DatabaseBuilder) -> None:
    old = build.session(reason="models", toolchain="tvm-0.27.0.post1-kernels-0")
    build.winner(old, build.config(TASK), build.solver("Tile"), 1.0, params="stale")
    assert finalists(build.connection, manifest(TASK), EVERYTHING) == {}
    assert nearest(build.connection, manifest(LARGER), EVERYTHING, ()) == {}


def test_results_with_emptied_caches_are_not_compared_with_others(build: DatabaseBuilder) -> None:
    warm, task = build.session(), build.config(TASK)
    build.winner(warm, task, build.solver("Tile"), 0.1, params="warm")
    assert winners(build.connection, manifest(TASK), EVERYTHING)[TASK.key].params == "warm"
    build.winner(cold(build), task, build.solver("Tile"), 0.2, params="cold")
    assert winners(build.connection, manifest(TASK), EVERYTHING)[TASK.key].params == "cold"
    assert winners(build.connection, manifest(TASK), ResultScope(warm))[TASK.key].params == "warm"


def test_other_machines_versions_and_simulated_times_do_not_count(build: DatabaseBuilder) -> None:
    task, solver = build.config(TASK), build.solver("Tile")
    build.winner(
        build.session(arch="znver4", target='{"kind":"llvm","mcpu":"znver4"}'), task, solver, 1.0
    )
    build.winner(build.session(reason="old", library_version="0.26"), task, solver, 1.0)
    build.winner(build.session(reason="simulated"), task, solver, 1.0, simulated=True)
    assert winners(build.connection, manifest(TASK), EVERYTHING) == {}


def test_a_golden_version_counts_alone(build: DatabaseBuilder) -> None:
    session, task, solver = cold(build), build.config(TASK), build.solver("Tile")
    build.winner(session, task, solver, 1.0, params="session")
    facts = {"library": "tvm", "version": 1, "state": "promoted", "created_at": START}
    golden = build.insert(models.Golden, **facts)
    entry = {"arch": "znver5", "num_cu": 2, "workspace_bytes": 0, "environment_id": 1}
    entry |= dict.fromkeys(("algorithm", "worker", "device", "clock"), "")
    entry |= {"config_id": task, "solver_id": solver, "session_id": session}
    build.insert(models.GoldenEntry, golden_id=golden, time_ms=2.0, params="golden", **entry)
    assert names(
        finalists(build.connection, manifest(TASK), ResultScope(golden_id=golden))[TASK.key]
    ) == ["golden"]


def test_the_same_layer_lends_its_params_before_one_of_another_size(build: DatabaseBuilder) -> None:
    session, solver = cold(build), build.solver("Tile")
    wanted = manifest(TASK)
    assert nearest(build.connection, wanted, EVERYTHING, ()) == {}
    build.winner(session, build.config(LARGER), solver, 1.0, params="larger")
    assert nearest(build.connection, wanted, EVERYTHING, ())[TASK.key].params == "larger"
    native = build.session(reason="layers", conditions={"layouts": "native"})
    build.winner(native, build.config(CORE), solver, 1.0, params="bare")
    assert nearest(build.connection, wanted, EVERYTHING, ())[TASK.key].params == "bare"
    assert nearest(build.connection, wanted, EVERYTHING, {TASK.key}) == {}


def test_what_won_for_the_bare_layer_is_the_warm_start_in_whatever_layouts(
    build: DatabaseBuilder,
) -> None:
    session, layers = cold(build), build.session(reason="layers")
    tile, winograd = build.solver("Tile"), build.solver("F4", algorithm="Winograd")
    build.winner(session, build.config(LARGER), tile, 1.0, params="larger")
    assert warm_starts(build.connection, manifest(TASK, NAMED), EVERYTHING) == {
        TASK.key: {"Tile": "larger"}
    }
    bare = build.config(CORE)
    build.winner(layers, bare, tile, 2.0, params="tile")
    build.winner(layers, bare, winograd, 1.0, params="f4")
    found = warm_starts(build.connection, manifest(TASK), EVERYTHING)
    assert [*found[TASK.key].items()] == [("F4", "f4"), ("Tile", "tile")]
    assert nearest(build.connection, manifest(TASK), EVERYTHING, ())[TASK.key].params == "larger"
    direct = warm_starts(build.connection, manifest(TASK), ResultScope(winograd=False))
    assert direct == {TASK.key: {"Tile": "tile"}}
