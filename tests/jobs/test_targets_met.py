"""Jobs of layers for which a known result is fast enough, on both databases."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs
from queries import execute, read_rows

from tuna.coordinator import actions
from tuna.db.engine import reading, writing
from tuna.db.models import FindDb, Golden, GoldenEntry, Job, Session
from tuna.reports.html import render
from tuna.reports.queries import read_figures


@pytest.fixture()
def sessions(engine: sa.Engine) -> tuple[int, int]:
    """Two sessions of one environment with the same layer, of which the first has a result of 1
    ms."""
    first = make_jobs(engine, 1)
    with writing(engine) as connection:
        environment = connection.execute(sa.select(Session.environment_id)).scalar_one()
        row = {"environment_id": environment, "reason": "again", "uuid": "u"}
        second = connection.execute(sa.insert(Session).values(row)).inserted_primary_key[0]
        job = connection.execute(sa.select(Job).order_by(Job.id)).first()
        assert job is not None
        facts = {
            name: getattr(job, name)
            for name in ("config_id", "solver_id", "steps", "step", "reason", "options")
        }
        connection.execute(sa.insert(Job).values(**facts, session_id=second, state="new"))
        result = {
            "session_id": first,
            "config_id": job.config_id,
            "solver_id": job.solver_id,
            "job_id": job.id,
        }
        connection.execute(
            sa.insert(FindDb).values(
                **result, time_ms=1.0, workspace_bytes=0, params="p", algorithm=""
            )
        )
    return first, second


def end(engine: sa.Engine, session_id: int, target_ms: float) -> list[str]:
    with writing(engine) as connection:
        return list(actions.end_met(connection, session_id, target_ms).values())


def states(engine: sa.Engine, session_id: int) -> list[tuple[str, str | None]]:
    query = sa.select(Job.state, Job.stopped).where(Job.session_id == session_id)
    return [tuple(row) for row in read_rows(engine, query)]


def test_another_sessions_result_ends_the_jobs_of_its_layer(
    engine: sa.Engine, sessions: tuple[int, int]
) -> None:
    first, second = sessions
    assert end(engine, second, 0.9) == []
    assert states(engine, second) == [("new", None)]
    assert end(engine, second, 1.5) == end(engine, second, 1.5) == [f"1 ms in session {first}"]
    assert states(engine, second) == [("evaluated", f"target met by 1 ms in session {first}")]


@pytest.mark.parametrize("fault", [{"noisy": True}, {"simulated": True}])
def test_what_was_not_measured_well_meets_nothing(
    engine: sa.Engine, sessions: tuple[int, int], fault: dict[str, bool]
) -> None:
    execute(engine, sa.update(FindDb).values(fault))
    assert end(engine, sessions[1], 1.5) == []


def test_a_golden_version_ends_its_layers_jobs_once_it_is_promoted(
    engine: sa.Engine, sessions: tuple[int, int]
) -> None:
    first, second = sessions
    with writing(engine) as connection:
        result = connection.execute(sa.select(FindDb.config_id, FindDb.solver_id)).one()
        environment = connection.execute(sa.select(Session.environment_id).limit(1)).scalar_one()
        golden = {"library": "noop", "version": 7, "state": "draft"}
        number = connection.execute(sa.insert(Golden).values(golden)).inserted_primary_key[0]
        entry = {
            "golden_id": number,
            "arch": "a",
            "num_cu": 1,
            "session_id": first,
            "environment_id": environment,
        }
        facts = {"workspace_bytes": 0, "params": "", "algorithm": "", "worker": "", "device": ""}
        connection.execute(
            sa.insert(GoldenEntry).values(**entry, **result._mapping, **facts, time_ms=0.5)
        )
    assert end(engine, second, 0.7) == []
    execute(engine, sa.update(Golden).values(state="promoted"))
    assert end(engine, second, 0.7) == ["0.5 ms in golden version 7"]


def test_a_report_of_layers_that_needed_no_trial_names_the_known_result(
    engine: sa.Engine, sessions: tuple[int, int]
) -> None:
    """It said that there are no results."""
    first, second = sessions
    with reading(engine) as connection:
        assert "There are no results" in render(read_figures(connection, second))
    end(engine, second, 1.5)
    with reading(engine) as connection:
        figures = read_figures(connection, second)
    page = " ".join(render(figures).split())
    assert (figures.without_trial, figures.with_winner) == (1, 0)
    assert "No trial was needed." in page
    assert f"no trial: target met by 1 ms in session {first}" in page
    assert "no winner" not in page
    assert "There are no results" not in page
