"""The hot statements find what they need by an index, on both databases, in a session of many jobs.

The statements are those that the pipeline really sends: they are recorded while it works, then
explained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import claim, entries_of, make_searches
from million_jobs import fill
from sqlalchemy import event

from tuna.artifacts.store import Artifacts
from tuna.coordinator import reaper
from tuna.coordinator.drain import Drain
from tuna.db import jobs, overview, searches, sessions
from tuna.db.engine import make_engine, reading, writing
from tuna.db.models import Job, Search
from tuna.db.types import utc_now
from tuna.libraries.items import DeviceReport
from tuna.libraries.params_text import ParamsText
from tuna.libraries.registry import get_library
from tuna.queue.leases import Leases
from tuna.queue.messages import Report, ReportKind
from tuna.queue.results import ResultStream, StreamEntry

LIBRARY = get_library("noop")
#: Tables that grow with the work; the rest have some rows, for which a scan is right.
LARGE = ("job", "step_result", "trial", "find_db", "find_db_kernel", "config", "kernel")
JOBS = 20_000


@pytest.fixture(scope="module", params=["sqlite", "mariadb"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[sa.Engine]:
    """One database of each kind for this module: filling it takes seconds."""
    from tuna.db import database

    url = f"sqlite:///{tmp_path_factory.mktemp('plans')}/test.sqlite"
    if request.param == "mariadb":
        base = sa.make_url(request.getfixturevalue("mariadb_url"))
        server = make_engine(base.render_as_string(hide_password=False))
        with server.begin() as connection:
            connection.execute(sa.text("CREATE OR REPLACE DATABASE tuna_plans"))
        server.dispose()
        url = base.set(database="tuna_plans").render_as_string(hide_password=False)
    made = make_engine(url)
    database.upgrade(made)
    fill(made, JOBS)
    _fill_results(made)
    yield made
    made.dispose()


def _fill_results(engine: sa.Engine) -> None:
    """Trials, find-db rows and kernels of the jobs that are done."""
    done = "FROM job WHERE state = 'evaluated'"
    at = "'2026-03-02 09:30:00.000000'"
    statements = (
        (
            "INSERT INTO trial (job_id, number, params, output_tail, times_ms, time_ms) SELECT id,"
            f" 0, '', '', '[1.0]', 1.0 {done}"
        ),
        (
            "INSERT INTO find_db (session_id, config_id, solver_id, job_id, time_ms,"
            " workspace_bytes, params, algorithm, updated_at) SELECT session_id, config_id,"
            f" solver_id, id, 1.0, 0, 'p', '', {at} {done}"
        ),
        "INSERT INTO kernel (digest, `blob`, size_bytes) SELECT `key`, '', 0 FROM config",
        (
            "INSERT INTO find_db_kernel (find_db_id, number, kernel, name, args) SELECT find_db.id,"
            " 0, config.`key`, '', '' FROM find_db JOIN config ON config.id = find_db.config_id"
        ),
    )
    with writing(engine) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in LARGE:
            connection.exec_driver_sql(
                f"ANALYZE {'TABLE ' if engine.dialect.name != 'sqlite' else ''}{table}"
            )


@contextmanager
def recorded(engine: sa.Engine) -> Iterator[list[tuple[str, Any]]]:
    """What is sent to the database meanwhile, each statement once."""
    sent: dict[str, Any] = {}

    def note(_c: Any, _cursor: Any, text: str, parameters: Any, _context: Any, many: bool) -> None:
        if not text.startswith(("BEGIN", "SAVEPOINT", "RELEASE")):
            sent.setdefault(text, parameters[0] if many else parameters)

    found: list[tuple[str, Any]] = []
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(engine, "before_cursor_execute", note)
        found.extend(sent.items())


def scans(engine: sa.Engine, text: str, parameters: Any) -> list[str]:
    """The large tables that the plan of a statement reads row by row."""
    sqlite = engine.dialect.name == "sqlite"
    with engine.connect() as connection:
        plan = connection.exec_driver_sql(
            f"EXPLAIN {'QUERY PLAN ' if sqlite else ''}{text}", parameters
        ).all()
    if sqlite:
        found = [re.fullmatch(r"SCAN (\w+)", row.detail) for row in plan]
        return [match[1] for match in found if match and match[1] in LARGE]
    if text.startswith("INSERT") and "SELECT" not in text:
        return []
    return [row.table for row in plan if row.type == "ALL" and row.table in LARGE]


def check(engine: sa.Engine, work: Callable[[], Any], *tables: str) -> None:
    """No statement that `work` sends scans a large table, and they do touch `tables`."""
    with recorded(engine) as sent:
        work()
    for table in tables:
        assert any(re.search(rf"\b{table}\b", text) for text, _ in sent), (
            f"nothing was sent about {table}"
        )
    found = {
        text: tables
        for text, parameters in sent
        if (tables := tuple(scans(engine, text, parameters)))
    }
    assert not found


def drain(engine: sa.Engine, redis_client: redis.Redis, folder: Path) -> Drain:
    stream = ResultStream(redis_client, Leases(redis_client, "plans", 20.0).results_key, "test")
    return Drain(engine, stream, Artifacts(folder.as_uri(), folder / "cache"), 3)


@pytest.mark.parametrize("step", ["build", "measure"])
def test_claiming_goes_by_index(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(LIBRARY, "params", ParamsText(uses_known=True), raising=False)
    monkeypatch.setattr("tuna.queue.work_items.json_object", lambda _: {})
    check(engine, lambda: claim(engine, 1, step, 200), "job", "config", "find_db")


@pytest.mark.parametrize("step", ["build", "measure"])
def test_draining_goes_by_index(
    engine: sa.Engine,
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    monkeypatch.setattr("tuna.queue.work_items.json_object", lambda _: {})
    made = entries_of(claim(engine, 1, step, 200), device=DeviceReport(name="d"))
    check(
        engine,
        lambda: drain(engine, redis_client, tmp_path).write(made),
        *("job", "trial", "step_result"),
        *(["find_db", "find_db_kernel"] if step == "measure" else []),
    )


def test_a_chunk_that_was_started_or_comes_back_is_found_by_index(
    engine: sa.Engine, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuna.queue.work_items.json_object", lambda _: {})
    chunks = [chunk.id for chunk in claim(engine, 1, "build", 200)]
    for kind in (ReportKind.STARTED, ReportKind.RETURNED):
        made = [StreamEntry("1-1", Report(kind=kind, chunk=chunk, worker="w")) for chunk in chunks]
        check(engine, lambda: drain(engine, redis_client, tmp_path).write(made), "job")  # noqa: B023


def test_orphans_are_looked_for_among_the_jobs_in_flight_alone(engine: sa.Engine) -> None:
    def look() -> None:
        with reading(engine) as connection:
            reaper.orphans(connection, 1, ["build", "measure"], utc_now() - timedelta(seconds=5))

    check(engine, look, "job")
    if engine.dialect.name == "mariadb":
        with recorded(engine) as sent:
            look()
        with engine.connect() as connection:
            (row,) = connection.exec_driver_sql(f"EXPLAIN {sent[0][0]}", sent[0][1]).all()
        assert (row.type, row.key) == ("range", "ix_job_claim")
        assert row.rows < JOBS / 4, "more than what is in flight"


def test_the_states_of_jobs_are_counted_in_an_index(engine: sa.Engine) -> None:
    def count() -> None:
        with reading(engine) as connection:
            overview.jobs_by_state(connection, 1)
        overview.read(engine)

    check(engine, count, "job")


def test_the_rounds_of_searches_are_counted_by_index(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        first = sa.select(sa.func.min(Job.id)).where(Job.state == "errored").scalar_subquery()
        row = dict(
            connection.execute(sa.select(Job.__table__).where(Job.id == first)).mappings().one()
        )
        del row["id"]
        made = sa.insert(Job).values(row | {"steps": "new"})
        made_id = connection.execute(made).inserted_primary_key[0]
        (search_id,) = make_searches(connection, Job.id == made_id)
        connection.execute(sa.update(Job).where(Job.id == made_id).values(step=row["step"]))
    with recorded(engine) as sent, reading(engine) as connection:
        assert searches.read(connection, [1]) == {
            1: searches.Searches(1, {}, *2 * [{"errored": 1}])
        }
    assert not [text for text, parameters in sent if scans(engine, text, parameters)]
    if engine.dialect.name == "sqlite":  # MariaDB goes by what it knows of their rows
        with engine.connect() as connection:
            plans = [
                connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", parameters).all()
                for text, parameters in sent
            ]
        of_jobs, _, undone = (" ".join(row.detail for row in plan) for plan in plans)
        assert "COVERING INDEX ix_job_search_id_round (search_id=?)" in of_jobs
        assert "ix_job_claim (session_id=? AND step=? AND state=?)" in undone
    with writing(engine) as connection:
        connection.execute(sa.delete(Search).where(Search.id == search_id))
        assert connection.execute(sa.select(Job.id).where(Job.id == made_id)).all() == []


def test_loading_asks_by_index_which_jobs_are_there(engine: sa.Engine) -> None:
    def load() -> None:
        with writing(engine) as connection:
            jobs.load(connection, jobs.JobRequest(1, "noop", ["build"], "x", "new", tag="t"))

    check(engine, load, "job")


def test_progress_counts_a_sessions_jobs_by_an_index_alone(engine: sa.Engine) -> None:
    """A run counts twice a second: reading the rows themselves took a sixth of MariaDB's time."""
    with writing(engine) as connection:
        session_id, _ = sessions.create(
            connection, LIBRARY.environment(), "one way through the steps"
        )
        columns = [
            column.name for column in Job.__table__.c if column.name not in ("id", "session_id")
        ]
        rows = sa.select(sa.literal(session_id), *(Job.__table__.c[name] for name in columns))
        some = rows.where(Job.steps == "build,measure", Job.part == 0, Job.round == 0).limit(2000)
        connection.execute(sa.insert(Job).from_select(["session_id", *columns], some))
    with reading(engine) as connection:
        with recorded(engine) as sent:
            found = jobs.by_steps(connection, session_id)
        everything = sa.select(Job.steps, Job.state, Job.step, sa.func.count()).where(
            Job.session_id == session_id
        )
        counts = connection.execute(everything.group_by(Job.steps, Job.state, Job.step)).all()
        assert found == {tuple(row[:3]): row[3] for row in counts}
    sqlite = engine.dialect.name == "sqlite"
    for text, parameters in sent:
        with engine.connect() as connection:
            plan = connection.exec_driver_sql(
                f"EXPLAIN {'QUERY PLAN ' if sqlite else ''}{text}", parameters
            ).all()
        if sqlite:
            assert all("COVERING INDEX" in row.detail for row in plan if " job " in row.detail), (
                text,
                plan,
            )
        else:
            read = [row for row in plan if row.table == "job"]
            assert all("Using index" in row.Extra for row in read), (text, plan)


def test_loading_searches_makes_each_once_with_its_first_round(engine: sa.Engine) -> None:
    facts = {"searched": ["Noop0"], "search": "search", "solvers": ["Noop0"], "tag": "t"}
    request = jobs.JobRequest(1, "noop", ["build", "measure"], "x", "new", **facts)
    with writing(engine) as connection:
        assert [jobs.load(connection, request) for _ in range(2)] == [1, 0]
        rounds = sa.select(Job.steps, Job.step, Job.round).join(Search, Search.id == Job.search_id)
        assert [tuple(row) for row in connection.execute(rounds)] == [
            ("search,build,measure", "search", 0)
        ]
        connection.execute(sa.delete(Search))
