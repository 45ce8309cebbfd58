"""A master's session: prepared, gone on with by its trace file, restored from it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from tuna import api
from tuna.configs import GemmConfig, TaskConfig, Workload, parse_line
from tuna.db import configs
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, Job, Session, TrialRow
from tuna.errors import BadInput, ServiceError, TunaError
from tuna.jobs.serving import read_works
from tuna.queue.connection import release_services
from tuna.settings import get_settings
from tuna_remote.master import LayerCounts, MasterPlan, start_master

pytestmark = pytest.mark.keeps_processes  # the private Redis, until the module's end
PLAN = MasterPlan(
    "any",
    [Workload(GemmConfig(m=8, n=8, k=k)) for k in (1, 2)],
    "mine",
    {"trials": True},
    library="noop",
)


@pytest.fixture(autouse=True)
def services(home: Path) -> Iterator[None]:
    yield
    release_services(get_settings())


def forget_database(home: Path) -> None:
    """Lose the home with its database."""
    open_database().dispose()
    release_services(get_settings())
    for path in home.glob("tuna.sqlite*"):
        path.unlink()
    shutil.rmtree(home / "artifacts", ignore_errors=True)


def end_jobs(jobs: int) -> None:
    """End the first jobs, each with a trial and a result."""
    with writing(open_database()) as connection:
        rows = connection.execute(
            sa.select(Job.id, Job.session_id, Job.config_id, Job.solver_id).order_by(Job.id)
        ).all()
        for row in rows[:jobs]:
            done = {"state": "evaluated", "step": "measure", "attempt": 2}
            connection.execute(sa.update(Job).where(Job.id == row.id).values(**done))
            trial = {
                "job_id": row.id,
                "number": 0,
                "params": "{}",
                "output_tail": "",
                "times_ms": "[1.0]",
                "time_ms": 1.0,
            }
            connection.execute(sa.insert(TrialRow).values(**trial))
            keys = {
                "session_id": row.session_id,
                "config_id": row.config_id,
                "solver_id": row.solver_id,
                "job_id": row.id,
            }
            facts = {
                "time_ms": float(row.id),
                "workspace_bytes": 0,
                "params": "{}",
                "trial_number": 0,
                "simulated": True,
            }
            connection.execute(sa.insert(FindDb).values(**keys, **facts))


def states() -> dict[str, int]:
    with writing(open_database()) as connection:
        return dict(
            connection.execute(sa.select(Job.state, sa.func.count()).group_by(Job.state)).all()
        )  # type: ignore[arg-type]


def test_a_master_prepares_its_session(tmp_path: Path) -> None:
    with start_master(PLAN, tmp_path / "trace") as master:
        assert (master.restored, master.others, master.loaded.added) == (False, 0, 20)
        assert master.counts() == LayerCounts(done=0, total=2, workers=0)
        end_jobs(10)
        assert master.counts().done == 1
        master.catch_up()
    assert len((tmp_path / "trace").read_text().splitlines()) == 1 + 20 + 10


def test_layers_that_no_solver_can_run_are_named(tmp_path: Path) -> None:
    (layer,) = parse_line("MIOpenDriver bnorm -n 32 -c 64 -H 54 -W 54 -m 1 --forw 1 -b 0 -s 1 -r 1")
    with start_master(
        replace(PLAN, workloads=[*PLAN.workloads, Workload(layer)]), tmp_path / "trace"
    ) as master:
        assert master.unsolved == [layer.label]
        assert master.counts().total == 2


def test_with_its_database_the_session_goes_on(tmp_path: Path) -> None:
    with start_master(PLAN, tmp_path / "trace") as master:
        first = master.session_id
    end_jobs(3)  # not traced: the master was killed
    third = Workload(GemmConfig(m=8, n=8, k=3))
    more = replace(PLAN, workloads=[*PLAN.workloads, third], options={})
    with start_master(more, tmp_path / "trace") as master:
        assert (master.session_id, master.restored, master.loaded.added) == (first, False, 10)
        assert master.others == 20
    assert states() == {"evaluated": 3, "new": 27}
    assert len((tmp_path / "trace").read_text().splitlines()) == 1 + 20 + 3 + 10


def test_without_its_database_the_session_is_restored(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_master(PLAN, tmp_path / "trace") as master:
        end_jobs(10)
    before = (tmp_path / "trace").read_text()
    with start_master(PLAN, tmp_path / "trace") as master:
        first = master.commit(tmp_path / "table", 3)
    forget_database(home)
    monkeypatch.setattr("tuna_remote.master.enqueue", lambda *_, **__: None)
    logging = replace(PLAN, workloads=[], log_url=str(tmp_path / "logs"))
    (tmp_path / "logs").write_text("a file where the folder would be")
    with (
        start_master(logging, tmp_path / "trace") as master,
        pytest.raises(ServiceError, match="A log cannot be written"),
    ):
        master.run(lambda _: None)
    assert master.restored
    (tmp_path / "logs").unlink()
    with start_master(logging, tmp_path / "trace") as master:
        assert master.loaded.added == 0
        assert master.counts() == LayerCounts(done=1, total=2, workers=0)
        again = master.commit(tmp_path / "table", 3)
        master.run(lambda _: None)
    assert states() == {"evaluated": 10, "new": 10}
    assert (first.results, again.results, again.added) == (3, 3, 0)
    assert (tmp_path / "trace").read_text().startswith(before)
    assert len(list((tmp_path / "logs" / "any").iterdir())) == 10


def test_a_session_that_a_master_left_is_served_by_no_other_unless_named(tmp_path: Path) -> None:
    with start_master(PLAN, tmp_path / "trace") as master:
        left = master.session_id
    other = api.init_session("noop", "another").id
    api.update_applicability(other, PLAN.table)
    api.load_jobs(other, tag=PLAN.table, reason="another")

    def served(session_ids: list[int] | None) -> list[int]:
        with reading(open_database()) as connection:
            return [work.session_id for work in read_works(connection, session_ids)]

    assert served(None) == [other]
    assert served([left]) == [left]
    api.set_session(left, owner=None)
    assert served(None) == [left, other]
    with start_master(PLAN, tmp_path / "trace") as master:
        assert (master.session_id, served(None)) == (left, [other])


def test_a_master_whose_jobs_have_all_ended_ends(tmp_path: Path) -> None:
    with start_master(PLAN, tmp_path / "trace") as master:
        end_jobs(20)
        seen: list[LayerCounts] = []
        master.run(seen.append)
    assert {(one.done, one.total) for one in seen} == {(2, 2)}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (replace(PLAN, table="other"), "is of the table mine, not of other"),
        (replace(PLAN, table=".hidden/x"), "'.hidden/x' is none"),
        (replace(PLAN, options={"trails": 1}), "job option trails is not known"),
        (replace(PLAN, log_url="nothing://x"), "Protocol not known"),
        (
            replace(PLAN, library="tvm", target="lvm -mcpu=x86-64-v2 -num-cores=3", options={}),
            "and this master is for",
        ),
        (replace(PLAN, library="tvm", target="cuda", options={}), "of kind llvm, not 'cuda'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_the_trace_is_refused(
    tmp_path: Path, plan: MasterPlan, said: str
) -> None:
    with start_master(PLAN, tmp_path / "trace"):
        pass
    before = (tmp_path / "trace").read_bytes()
    with pytest.raises(TunaError, match=said), start_master(plan, tmp_path / "trace"):
        pass
    assert (tmp_path / "trace").read_bytes() == before
    with writing(open_database()) as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(Session)).scalar() == 1


def test_a_plan_that_cannot_be_leaves_no_trace(tmp_path: Path) -> None:
    with (
        pytest.raises(BadInput),
        start_master(replace(PLAN, options={"trails": 1}), tmp_path / "trace"),
    ):
        pass
    assert not (tmp_path / "trace").exists()


def test_the_bodies_of_tasks_come_with_them(tmp_path: Path) -> None:
    body = b"a function"
    digest = hashlib.sha256(body).hexdigest()
    task = Workload(TaskConfig(name="softmax", body=digest), body)
    plan = replace(PLAN, workloads=[*PLAN.workloads, task])
    with start_master(plan, tmp_path / "trace") as master:
        assert master.unsolved == [task.config.label], "the library has no solver for it"
        with reading(open_database()) as connection:
            assert configs.body(connection, digest) == body
    lacking = replace(plan, workloads=[Workload(replace(task.config, body="0" * 64))])
    with (
        pytest.raises(BadInput, match="needs the body 000"),
        start_master(lacking, tmp_path / "other"),
    ):
        pass
