"""What MITuna's result loop got wrong, done right: no result is never a good one, and text is only
text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import accepted, claim, make_jobs, states
from queries import read_rows

from tuna.artifacts.store import Artifacts
from tuna.coordinator.drain import Drain
from tuna.db.engine import reading
from tuna.db.models import FindDb, Job, StepResultRow
from tuna.libraries.base import Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import WorkItem, result_of
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.queue.results import ResultStream
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

MAX = 3
QUOTED = "it's \"broken\"; UPDATE job SET state='evaluated' WHERE '1'='1'; -- \\' %s {}"


class Silent(NoopLibrary):
    """Gives no result for any item."""

    def run(self, step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[Result]:
        """Nothing."""
        return iter(())


class Raises(NoopLibrary):
    """Fails in its own code after the first item."""

    def run(self, step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[Result]:
        """One result, then an exception."""
        yield result_of(items[0], ok=True, started_at=1.0, ended_at=2.0)
        raise RuntimeError(QUOTED)


class Quotes(NoopLibrary):
    """Fails for a reason full of quotes."""

    def run(self, step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[Result]:
        """A failure for each item."""
        for item in items:
            fault = {"ok": False, "cause": Cause.RUN_ERROR, "output_tail": QUOTED}
            yield result_of(item, **fault, started_at=1.0, ended_at=2.0)


@pytest.fixture(autouse=True)
def _is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For long enough that its failures are charged at once."""
    monkeypatch.setattr("tuna.workers.health.ALONE_S", 0.0)


def work_off(
    engine: sa.Engine, client: redis.Redis, folder: Path, library: NoopLibrary, session_id: int
) -> int:
    """One round: claim, run in a real worker's runner, drain; returns the number of chunks."""
    store = Artifacts((folder / "a").as_uri(), folder / "c")
    leases = Leases(client, "n", 30)
    claimed = claim(engine, session_id, "build", 1000, library=library)
    if not claimed:
        return 0
    leases.open([chunk.id for chunk in claimed])
    runner = Runner(RedisLink(client, 30), RunContext(artifacts=store, scratch=folder, cpus=()))
    for chunk in claimed:
        facts = {"library": "noop", "step": "build", "environment": "", "toolchain": ""}
        assert (
            runner.run(
                Chunk(id=chunk.id, namespace="n", items=tuple(chunk.items), **facts), library
            )
            == "finished"
        )
    drain = Drain(engine, ResultStream(client, leases.results_key, "me"), store, MAX)
    while drain.once():
        pass
    return len(claimed)


@pytest.mark.parametrize(("library", "good"), [(Silent(), 0), (Raises(), 1)])
def test_a_job_without_a_result_is_never_compiled(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path, library: NoopLibrary, good: int
) -> None:
    session_id = make_jobs(engine, 1)
    work_off(engine, redis_client, tmp_path, library, session_id)
    assert states(engine) == {"new": 10 - good} | ({"compiled": good} if good else {})
    assert len(accepted(engine)) == good
    failed = read_rows(
        engine, sa.select(StepResultRow.cause, StepResultRow.output_tail).where(~StepResultRow.ok)
    )
    assert len(failed) == 10 - good
    assert {row.cause for row in failed} == {"infra"}
    assert all(row.output_tail for row in failed)


def test_a_job_that_never_gets_a_result_ends_as_errored(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path
) -> None:
    session_id = make_jobs(engine, 1)
    rounds = 0
    while work_off(engine, redis_client, tmp_path, Silent(), session_id):
        rounds += 1
        assert rounds <= MAX
    assert (rounds, states(engine)) == (MAX, {"errored": 10})
    assert read_rows(engine, sa.select(FindDb.id)) == []


def test_a_reason_with_quotes_is_stored_as_it_is(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path
) -> None:
    session_id = make_jobs(engine, 1)
    work_off(engine, redis_client, tmp_path, Quotes(), session_id)
    with reading(engine) as connection:
        assert set(connection.execute(sa.select(StepResultRow.output_tail)).scalars()) == {QUOTED}
        assert set(connection.execute(sa.select(Job.cause)).scalars()) == {"run_error"}
    assert "compiled" not in states(engine)
    assert "evaluated" not in states(engine)
