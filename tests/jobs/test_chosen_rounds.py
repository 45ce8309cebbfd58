"""Which round of which search is published next, and which policy says so when none is named."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from celery_doubles import Silent
from jobs_builder import make_jobs, make_searches
from queries import execute, read_rows
from settings_changes import change_setting

from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.policies import Need, Policy, Share, Snapshot, fair, gradient
from tuna.coordinator.policies.snapshot import in_order, policy
from tuna.coordinator.publisher import Backends
from tuna.db.engine import writing
from tuna.db.models import Framework, Job, Model, ModelConfig, TrialRow
from tuna.db.types import utc_now
from tuna.jobs.serving import SessionWork, read_works
from tuna.libraries.base import Step
from tuna.settings import get_settings
from tuna.vocabulary import Resource

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from search_library import SearchLibrary

pytestmark = pytest.mark.both_databases_in_drills


class LearningLibrary(SearchLibrary):
    """What ends a round, and what begins the next, are for the same processes."""

    steps = (*SearchLibrary.steps, Step("learn", Resource.CPU))


@pytest.fixture()
def work(engine: sa.Engine) -> SessionWork:
    """Two layers, each with a search whose second round waits after 10 ms in the first."""
    session_id = make_jobs(engine, 2, solvers=["Noop0"])
    with writing(engine) as connection:
        make_searches(connection)
        connection.execute(sa.update(Job).values(step="measure", state="evaluated"))
        names = [c.name for c in Job.__table__.c if c.name not in ("id", "round", "step", "state")]
        rows = sa.select(
            *(Job.__table__.c[name] for name in names),
            sa.literal(1),
            sa.literal("search"),
            sa.literal("new"),
        )
        connection.execute(sa.insert(Job).from_select([*names, "round", "step", "state"], rows))
        for job_id in connection.execute(sa.select(Job.id).where(Job.round == 0)).scalars().all():
            facts = {"output_tail": "", "times_ms": "[10]", "step": "measure", "clock": "cpu"}
            connection.execute(
                sa.insert(TrialRow).values(job_id=job_id, number=0, time_ms=10.0, **facts)
            )
        (found,) = read_works(connection, [session_id])
    return replace(found, library=SearchLibrary())


@pytest.fixture()
def make(
    engine: sa.Engine, redis_client: redis.Redis, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Coordinator]:
    change_setting(monkeypatch, "TUNA_QUEUE_BOUND", "1")

    def coordinator(work: SessionWork, policy: Policy | None = None) -> Coordinator:
        backends = Backends(engine, redis_client, Silent(), get_settings())  # type: ignore[arg-type]
        return Coordinator(backends, [work], policy=policy)

    return coordinator


def in_model(engine: sa.Engine, *weights: int) -> None:
    """Give the layers these weights in a model."""
    with writing(engine) as connection:
        connection.execute(sa.insert(Model).values(id=1, name="net", version="1"))
        connection.execute(sa.insert(Framework).values(id=1, name="f", version="1"))
        configs = (
            connection.execute(sa.select(Job.config_id).distinct().order_by(Job.config_id))
            .scalars()
            .all()
        )
        for config_id, weight in zip(configs, weights, strict=True):
            row = {
                "model_id": 1,
                "framework_id": 1,
                "gpu_count": 1,
                "config_id": config_id,
                "weight": weight,
            }
            connection.execute(sa.insert(ModelConfig).values(row))


def taken(engine: sa.Engine) -> list[tuple[int, str]]:
    query = (
        sa.select(Job.config_id, Job.steps).where(Job.chunk.is_not(None)).order_by(Job.leased_at)
    )
    return [tuple(row) for row in read_rows(engine, query)]


def test_the_layer_that_weighs_more_in_the_model_is_searched_first(
    engine: sa.Engine, work: SessionWork, make: Callable[..., Coordinator]
) -> None:
    in_model(engine, 1, 9)
    coordinator = make(work)
    assert coordinator.publish() == 1
    assert coordinator.snapshots.policy([work]) is gradient
    assert taken(engine) == [(2, "search,build,measure")]


@pytest.mark.parametrize("weights", [(), (0, 0)])
def test_without_weights_rounds_are_claimed_by_the_chunk(
    engine: sa.Engine, work: SessionWork, make: Callable[..., Coordinator], weights: tuple[int, ...]
) -> None:
    if weights:
        in_model(engine, *weights)
    coordinator = make(work)
    assert coordinator.snapshots.policy([work]) is fair
    assert coordinator.publish() == 1
    assert taken(engine) == [(1, "search,build,measure"), (2, "search,build,measure")]


def test_several_sessions_are_served_in_turn_whatever_their_layers_weigh(
    engine: sa.Engine, work: SessionWork, make: Callable[..., Coordinator]
) -> None:
    in_model(engine, 1, 9)
    works = [work, replace(work, session_id=2)]
    snapshots = make(work).snapshots
    snapshots.refresh(works)
    assert snapshots.policy(works) is fair


def test_jobs_that_do_not_search_are_published_as_such_beside_rounds(
    engine: sa.Engine, work: SessionWork, make: Callable[..., Coordinator]
) -> None:
    """Their claim is by the step, and takes no round along that the policy did not choose."""
    in_model(engine, 1, 9)
    with writing(engine) as connection:
        second = sa.and_(Job.round == 1, Job.config_id == 2)
        connection.execute(sa.update(Job).where(second).values(step="build"))
        connection.execute(
            sa.update(Job)
            .where(Job.round == 1, Job.config_id == 1)
            .values(search_id=None, round=0, steps="build,measure", step="build")
        )
    make(work, gradient).publish()
    assert taken(engine) == [(1, "build,measure")]


@policy(Need.ROUNDS)
def longest_first(snapshot: Snapshot) -> list[Share]:
    """What waits longest."""
    return in_order(snapshot, lambda step: (step.since_s,))


def test_the_round_that_waits_longest_is_first_where_the_policy_says_so(
    engine: sa.Engine, work: SessionWork, make: Callable[..., Coordinator]
) -> None:
    hour_ago = utc_now() - timedelta(hours=1)
    execute(
        engine, sa.update(Job).where(Job.round == 1, Job.config_id == 2).values(updated_at=hour_ago)
    )
    make(work, longest_first).publish()
    assert taken(engine) == [(2, "search,build,measure")]


@pytest.mark.parametrize(
    ("number", "steps", "first"),
    [
        (1, "search,build,measure,learn", "search"),
        (0, "search,build,measure,learn", "learn"),  # a search that begins makes nobody wait
        # nor one that would keep the process for all its rounds
        (1, "search,build,learn", "learn"),
    ],
)
def test_a_session_goes_on_with_the_next_round_where_the_last_one_ended(
    engine: sa.Engine,
    work: SessionWork,
    make: Callable[..., Coordinator],
    number: int,
    steps: str,
    first: str,
) -> None:
    """The device is out of work until what the next round proposes is built."""
    with writing(engine) as connection:
        connection.execute(sa.delete(TrialRow))
        connection.execute(sa.delete(Job).where(Job.round == 1 - number))
        ends = {"steps": "search,build,measure,learn", "step": "learn", "state": "searching"}
        connection.execute(sa.update(Job).where(Job.config_id == 1).values(ends))
        proposes = {"steps": steps, "step": "search", "state": "new"}
        connection.execute(sa.update(Job).where(Job.config_id == 2).values(proposes))
    coordinator = make(replace(work, library=LearningLibrary()), fair)
    order = []
    while coordinator.publish():
        with writing(engine) as connection:
            order += (
                connection.execute(sa.select(Job.step).where(Job.chunk.is_not(None)))
                .scalars()
                .all()
            )
            connection.execute(
                sa.update(Job).where(Job.chunk.is_not(None)).values(chunk=None, state="canceled")
            )
        coordinator._leases.drop(coordinator._leases.all())
    assert order == [first, *({"search", "learn"} - {first})]


def test_a_coordinator_divides_a_round_between_the_devices_that_are_there(
    engine: sa.Engine,
    work: SessionWork,
    make: Callable[..., Coordinator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two devices are live, and one round waits to be measured; the other layer's rounds have
    ended."""
    with writing(engine) as connection:
        second = (Job.round == 1, Job.config_id == 1)
        connection.execute(
            sa.update(Job).where(Job.round == 1).values(state="evaluated", step="measure")
        )
        job_id = connection.execute(sa.select(Job.id).where(*second)).scalar_one()
        connection.execute(sa.update(Job).where(*second).values(state="compiled"))
        facts = {"output_tail": "", "times_ms": "[]", "step": "build", "job_id": job_id}
        rows = [{**facts, "number": number, "artifact": "c" * 64} for number in range(8)]
        connection.execute(sa.insert(TrialRow), rows)
    change_setting(monkeypatch, "TUNA_QUEUE_BOUND", "10")
    coordinator = make(work)
    (queue,) = {work.queue(step) for step in work.steps if step.name == "measure"}
    monkeypatch.setattr(coordinator.snapshots, "_live_processes", lambda: Counter({queue: 2}))
    assert coordinator.publish() == 2
    query = sa.select(Job.part, sa.func.count()).join(TrialRow, TrialRow.job_id == Job.id)
    found = read_rows(
        engine, query.where(Job.chunk.is_not(None)).group_by(Job.id).order_by(Job.part)
    )
    assert [tuple(row) for row in found] == [(0, 4), (1, 4)]
