"""A session of high priority beside one with a long queue."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs
from private_servers import wait_until
from processes import Processes

from tuna.db import database, sessions
from tuna.db.engine import reading, writing
from tuna.db.models import Job
from tuna.libraries.registry import get_library


@pytest.mark.drill(only=True)
def test_the_first_job_of_an_urgent_session_is_taken_within_two_seconds(
    engine: sa.Engine, processes: Processes
) -> None:
    database.upgrade(engine)
    make_jobs(engine, 10_000)
    with writing(engine) as connection:
        urgent, _ = sessions.create(connection, get_library("noop").environment(), "urgent")
        sessions.set_options(connection, urgent, {"priority": 9})
    processes.start("tuna", "enqueue", "--all")
    processes.worker("compile")
    processes.worker("eval")

    def begun(session_id: int) -> int:
        waiting = Job.state.in_(["new", "compile_queued"])
        with reading(engine) as connection:
            query = (
                sa.select(sa.func.count())
                .select_from(Job)
                .where(Job.session_id == session_id, ~waiting)
            )
            return connection.execute(query).scalar_one()

    wait_until(lambda: begun(1) > 500, 60, "work on the long queue")
    names = [column.name for column in Job.__table__.c if column.name not in ("id", "session_id")]
    new = {
        "step": sa.literal("build"),
        "state": sa.literal("new"),
        "attempt": sa.literal(0),
        "chunk": sa.null(),
    }
    columns = [new.get(name, Job.__table__.c[name]) for name in [*names]]
    with writing(engine) as connection:
        rows = sa.select(sa.literal(urgent), *columns).where(Job.id <= 10)
        connection.execute(sa.insert(Job).from_select(["session_id", *names], rows))
    loaded_at = time.monotonic()
    wait_until(lambda: begun(urgent) > 0, 60, "the urgent job")
    taken_s = time.monotonic() - loaded_at
    assert begun(1) < 90_000, "the long queue has not ended meanwhile"
    assert taken_s <= 2.0
    print(f"taken after {taken_s:.2f} s")
