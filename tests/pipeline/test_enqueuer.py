"""The enqueuer claims, publishes and drains side by side, on both databases."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import accepted, make_jobs, states, trials

from tuna.artifacts import Artifacts
from tuna.db import sessions
from tuna.db.engine import reading
from tuna.libraries.base import RunContext
from tuna.libraries.registry import get_library
from tuna.pipeline.drain import Drain
from tuna.pipeline.enqueue import Enqueuer, SessionWork
from tuna.pipeline.runner import Runner
from tuna.pipeline.wire import Chunk
from tuna.settings import get_settings

LIBRARY = get_library("noop")


class InProcess:
    """In the place of Celery: what is sent is done at once."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def producer_or_acquire(self) -> Any:
        return contextlib.nullcontext()

    def send_task(self, _name: str, kwargs: dict[str, str], **_: Any) -> None:
        assert self._runner.run(Chunk.model_validate_json(kwargs["chunk"]), LIBRARY) == "finished"


@pytest.fixture()
def enqueuer(engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path) -> Enqueuer:
    session_id, settings = make_jobs(engine, 40, options={"trials": 1}), get_settings()
    with reading(engine) as connection:
        info, namespace = sessions.get(connection, session_id), sessions.namespace(connection)
    context = RunContext(Artifacts(tuna_home.as_uri(), tuna_home), tuna_home, (0,))
    celery = InProcess(Runner(redis_client, settings.lease_s, context))
    work = SessionWork(session_id, namespace, info.environment, LIBRARY)
    return Enqueuer(engine, redis_client, celery, settings, work)


def test_every_job_is_done_once(engine: sa.Engine, enqueuer: Enqueuer) -> None:
    enqueuer.run(lambda: None, lambda: states(engine) == {"evaluated": 400})
    assert {count for *_, count in accepted(engine)} == {1}
    assert (len(accepted(engine)), trials(engine)) == (800, 400)
    assert enqueuer.drain.counts.refused == 0


def test_an_error_of_the_drain_ends_the_run(
    engine: sa.Engine, enqueuer: Enqueuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Drain, "write", fail)
    with pytest.raises(ValueError, match="a bug"):
        enqueuer.run(lambda: None, lambda: False)
    assert states(engine)["compile_queued"] > 0, "what was published stays claimed, for the next enqueuer to find"
