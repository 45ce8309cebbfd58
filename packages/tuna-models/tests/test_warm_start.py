"""Tuning a model begins with the point that won for the bare layer of a task."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from builders import START, DatabaseBuilder
from test_model_store import manifest

from tuna import api
from tuna.api import running
from tuna.configs import ConvConfig, TaskConfig
from tuna.db import models as tables
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm.decisions import readable
from tuna.libraries.tvm.kernel_child import TvmBuilder
from tuna_models import api as models_api
from tuna_models import child
from tuna_models.child_answers import ChildAnswer
from tuna_models.work import store
from tuna_models.work.session import ModelWork

CORE = ConvConfig(1, 16, 8, 8, 32, 1, 1)
TASK = TaskConfig(core=CORE, layouts="native", epilogue=("bias", "relu"))
SOLVER = "TvmConvTile"


class InProcess:
    """The child's functions in this process, which has TVM."""

    def call(self, kind: type[ChildAnswer], op: str, **arguments: Any) -> Any:
        return kind.model_validate(child.HANDLERS[op](**arguments))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("layouts", "place"), [("native", 3), ("layer", 5)])
def test_the_first_candidate_of_a_task_is_what_won_for_its_bare_layer(
    layouts: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWork, "process", lambda *_: InProcess())
    monkeypatch.setattr(running, "run", lambda *_, **__: None)
    here = api.init_session("tvm", "layers", conditions={"layouts": layouts})
    api.update_solvers("tvm")
    with reading(open_database()) as connection:
        facts = connection.execute(sa.select(tables.EnvironmentRow)).one()
    bare = KernelJob(CORE, SOLVER, facts.target, {"layouts": layouts}, 0, place + 1)
    won = TvmBuilder().propose(bare)[place]
    tuned = manifest(TASK, target=facts.target, tvm=facts.library_version)
    with writing(open_database()) as connection:
        store.save(connection, "net", tuned, {})
        solver = connection.execute(
            sa.select(tables.SolverRow.id).where(tables.SolverRow.name == SOLVER)
        ).scalar_one()
        build = DatabaseBuilder(connection, START)
        build.winner(here.id, build.config(CORE), solver, 1.0, params=won)
    models_api.tune_model("net", candidates=4)
    with reading(open_database()) as connection:
        statement = (
            sa.select(tables.Job).join(tables.Session).where(tables.Session.reason == "models")
        )
        (job,) = connection.execute(statement.where(tables.Job.solver_id == solver)).all()
    proposed = TvmBuilder().propose(KernelJob(TASK, SOLVER, facts.target, {}, 0, 4, job.options))
    assert readable(proposed[0]) == readable(won)
    by_estimate = TvmBuilder().propose(KernelJob(TASK, SOLVER, facts.target, {}, 0, 4))
    assert proposed[1:] == by_estimate[:3]


def test_a_point_that_the_space_does_not_have_changes_nothing() -> None:
    target = '{"kind": "llvm", "mcpu": "znver4", "num-cores": 1}'
    plain, hinted = (
        TvmBuilder().propose(KernelJob(TASK, SOLVER, target, {}, 0, 2, options))
        for options in ({}, {"first": "rows 99, pixels 7"})
    )
    assert plain == hinted
