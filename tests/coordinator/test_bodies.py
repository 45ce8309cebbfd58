"""A config whose text is too large for a field: its body is kept in SQL and reaches the worker as
an artifact."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
import sqlalchemy as sa
from celery_doubles import InProcess
from jobs_builder import states

from tuna.artifacts.store import Artifacts
from tuna.configs import Config, ConfigKind, from_json
from tuna.coordinator import staging
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.publisher import Backends
from tuna.db import configs, jobs, sessions, solvers
from tuna.db.engine import reading, writing
from tuna.db.models import ConfigRow as Row
from tuna.db.models import KernelRow, StepResultRow
from tuna.errors import BadInput, StorageFull, StoreUnavailable
from tuna.jobs.serving import SessionWork
from tuna.libraries.base import Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult as Result
from tuna.libraries.items import WorkItem, result_of
from tuna.libraries.registry import get_library
from tuna.settings import get_settings
from tuna.testing.kind_contract import registered
from tuna.vocabulary import Cause
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

TEXTS = [f"def f{number}(): ...\n".encode() * 2500 for number in range(3)]


@dataclass(frozen=True)
class Function(Config):
    """A function of a program: its text is the body."""

    kind: ClassVar[str] = "function"
    body_field: ClassVar[str] = "digest"

    name: str
    digest: str

    @property
    def label(self) -> str:
        return f"function {self.name}"

    @property
    def flops(self) -> int:
        return 1


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


FUNCTIONS = [Function(f"f{number}", digest(text)) for number, text in enumerate(TEXTS)]
BODIES = {digest(text): text for text in TEXTS}


@pytest.fixture(autouse=True)
def _kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(get_library("noop"), "kinds", ("function",), raising=False)
    with registered(ConfigKind(Function)):
        yield


@pytest.fixture()
def session_id(engine: sa.Engine) -> int:
    with writing(engine) as connection:
        number, _ = sessions.create(connection, get_library("noop").environment(), "test")
        assert configs.store(connection, FUNCTIONS, "t", bodies=BODIES) == configs.Stored(3, 3)
        solvers.update_solvers(connection, get_library("noop"))
    solvers.update_applicability(engine, get_library("noop"), number, "t")
    with writing(engine) as connection:
        request = jobs.JobRequest(
            number, "noop", ["build", "measure"], "test", "new", tag="t", solvers=["Noop1"]
        )
        assert jobs.load(connection, request) == len(FUNCTIONS)
    return number


@pytest.fixture()
def store(engine: sa.Engine, tuna_home: Path) -> Artifacts:
    """The store as workers see it: signed with the installation's secret."""
    with reading(engine) as connection:
        return Artifacts.from_settings(
            get_settings(), "", sessions.artifact_keys(connection, get_settings())
        )


@pytest.fixture()
def coordinator(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path, session_id: int, store: Artifacts
) -> Coordinator:
    with reading(engine) as connection:
        info = sessions.get(connection, session_id)
    runner = Runner(
        RedisLink(redis_client, get_settings().lease_s), RunContext(store, tuna_home, (0,))
    )
    work = SessionWork(session_id, info.environment, get_library("noop"))
    return Coordinator(Backends(engine, redis_client, InProcess(runner), get_settings()), [work])


def _library_that_reads(lose: Callable[[WorkItem], None]) -> Callable[..., Iterator[Result]]:
    def run(_step: Step, items: Sequence[WorkItem], context: RunContext) -> Iterator[Result]:
        for item in items:
            assert isinstance(item.layer, Function)
            lose(item)
            try:
                body = context.artifacts.get(item.body or "")
            except KeyError as error:
                yield result_of(
                    item, ok=False, cause=Cause.ARTIFACT_LOST, output_tail=f"body {error} is gone"
                )
                continue
            right = body == TEXTS[int(item.layer.name[1:])]
            yield result_of(item, ok=right, cause=None if right else Cause.WRONG_RESULT)

    return run


def _causes(engine: sa.Engine) -> list[tuple[str, str | None]]:
    with reading(engine) as connection:
        rows = connection.execute(
            sa.select(StepResultRow.step, StepResultRow.cause).order_by(StepResultRow.id)
        )
        return sorted((row.step, row.cause or "") for row in rows)


@pytest.mark.both_databases_in_drills
def test_every_item_finds_the_body_of_its_config(
    engine: sa.Engine, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        get_library("noop"), "run", _library_that_reads(lambda _: None), raising=False
    )
    coordinator.run(lambda: None, lambda: states(engine) == {"evaluated": 3})
    assert _causes(engine) == [("build", "")] * 3 + [("measure", "")] * 3


def test_a_body_that_is_lost_is_put_again_when_its_job_is_published_again(
    engine: sa.Engine, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    def lose(item: WorkItem) -> None:
        if item.step == "measure" and item.body == FUNCTIONS[0].digest and not lost:
            lost.append(item.body)
            (file,) = (get_settings().home / "artifacts").rglob(item.body)
            file.unlink()

    monkeypatch.setattr(get_library("noop"), "run", _library_that_reads(lose), raising=False)
    coordinator.run(lambda: None, lambda: states(engine) == {"evaluated": 3})
    assert len(lost) == 1
    # The job went back to its first step, as for every lost artifact.
    assert _causes(engine) == [("build", "")] * 4 + [("measure", "")] * 3 + [
        ("measure", "artifact_lost")
    ]


def _items(session_id: int, *digests: str | None) -> list[WorkItem]:
    facts: dict[str, Any] = {
        "library": "noop",
        "step": "build",
        "solver": "Noop1",
        "config": {},
        "attempt": 1,
    }
    return [
        WorkItem(job_id=n, session_id=session_id, body=body, **facts)
        for n, body in enumerate(digests)
    ]


def test_only_what_the_store_lacks_is_put_and_each_body_once(
    engine: sa.Engine, session_id: int, store: Artifacts
) -> None:
    first, second, _ = (function.digest for function in FUNCTIONS)
    store.put(BODIES[second])
    assert (
        staging.stage_artifacts(engine, store, _items(session_id, first, None, second, first)) == 1
    )
    assert staging.stage_artifacts(engine, store, _items(session_id, first, second, None)) == 0
    assert store.get(first) == BODIES[first]


def test_for_a_store_that_is_full_a_coordinator_waits(
    engine: sa.Engine, session_id: int, store: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: bytes) -> str:
        raise StorageFull("no room")

    monkeypatch.setattr(store, "put", full)
    with pytest.raises(StoreUnavailable, match="no room"):
        staging.stage_artifacts(engine, store, _items(session_id, FUNCTIONS[0].digest))


@pytest.mark.both_databases_in_drills
def test_a_config_without_its_body_is_refused(engine: sa.Engine) -> None:
    function = FUNCTIONS[0]
    with (
        pytest.raises(BadInput, match=f"needs the body {function.digest}"),
        writing(engine) as connection,
    ):
        configs.store(connection, [function], "t")
    with pytest.raises(BadInput, match="another SHA-256"), writing(engine) as connection:
        configs.store(connection, [function], "t", bodies={function.digest: b"something else"})
    with reading(engine) as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(Row)).scalar_one() == 0
        assert (
            connection.execute(sa.select(sa.func.count()).select_from(KernelRow)).scalar_one() == 0
        )


def test_a_body_is_stored_once_and_read_back(engine: sa.Engine, session_id: int) -> None:
    again = Function("again", FUNCTIONS[1].digest)
    with writing(engine) as connection:
        assert configs.store(connection, [again], "u").added == 1, "its body is there already"
    with reading(engine) as connection:
        assert (
            connection.execute(sa.select(sa.func.count()).select_from(KernelRow)).scalar_one() == 3
        )
        assert configs.body(connection, again.digest) == TEXTS[1]


def test_a_digest_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="64 hex digits"):
        from_json({"kind": "function", "name": "f", "digest": "../../etc/passwd"})


def test_a_config_that_does_not_fit_into_its_column_is_refused(engine: sa.Engine) -> None:
    with (
        pytest.raises(BadInput, match="json of a function config has") as error,
        writing(engine) as connection,
    ):
        configs.store(connection, [Function("f" * 5000, FUNCTIONS[0].digest)], "t", bodies=BODIES)
    assert "body" in error.value.hint
