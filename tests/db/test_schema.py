"""The schema on SQLite and MariaDB: how it is made, refusals, and what storing means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import databases
import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory
from jobs_builder import make_jobs, states
from queries import read_rows, read_value
from shared_data import DRILLS

from tuna.cli import show
from tuna.configs import GemmConfig
from tuna.db import bulk, configs, database, jobs, solvers
from tuna.db.engine import make_engine, writing
from tuna.db.models import Base, Job, SolverApplicability
from tuna.errors import BadInput, DatabaseError, NotFound, SchemaError, TunaError
from tuna.libraries.registry import get_library

_UPGRADE = """
import sys
from tuna.db.database import upgrade
from tuna.db.engine import make_engine
upgrade(make_engine(sys.argv[1]))
"""


def test_a_new_database_is_just_what_the_models_say(engine: sa.Engine) -> None:
    assert databases.differences(engine) == []


def test_the_head_that_the_code_knows_is_alembics() -> None:
    config = Config()
    config.set_main_option("script_location", str(database.migrations_dir()))
    script = ScriptDirectory.from_config(config)
    assert script.get_current_head() == database.HEAD
    assert (
        tuple(reversed([revision.revision for revision in script.walk_revisions()]))
        == database.KNOWN
    )


def test_upgrading_twice_is_upgrading_once(empty_engine: sa.Engine) -> None:
    for _ in range(2):
        database.upgrade(empty_engine)
    assert database.revision(empty_engine) == database.HEAD


@pytest.mark.parametrize("empty_engine", ["mariadb"], indirect=True)
def test_an_upgrade_that_is_cut_off_after_any_statement_goes_on(empty_engine: sa.Engine) -> None:
    most = 40 if DRILLS == 1 else 1000
    assert databases.upgrade_in_pieces(empty_engine, most) >= 40
    assert databases.differences(empty_engine) == []
    with empty_engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT id FROM installation").all() == [(1,)]


def test_a_database_that_is_not_embedded_is_refused_with_the_command(
    empty_engine: sa.Engine,
) -> None:
    with pytest.raises(SchemaError) as error:
        database.require(empty_engine, embedded=False)
    assert "tuna db upgrade" in error.value.hint


@pytest.mark.parametrize(
    ("revision", "hint"),
    [
        ("9999", "install the version of Tuna that wrote it"),
        ("0042", "`tuna db upgrade` of Tuna 0.1.0 at commit e630f606 first"),
    ],
)
def test_schemas_that_are_newer_or_before_the_baseline_are_refused(
    engine: sa.Engine, revision: str, hint: str
) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE alembic_version SET version_num = '{revision}'"))
    for call in (lambda: database.require(engine, embedded=True), lambda: database.upgrade(engine)):
        with pytest.raises(SchemaError, match=f"has schema {revision}") as error:
            call()
        assert hint in error.value.hint


def test_tables_of_something_else_are_refused_and_left_alone(empty_engine: sa.Engine) -> None:
    with empty_engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE precious (id INTEGER)"))
    with pytest.raises(SchemaError, match="precious"):
        database.upgrade(empty_engine)
    assert sa.inspect(empty_engine).get_table_names() == ["precious"]


@pytest.mark.usefixtures("forked")
def test_processes_may_upgrade_at_once(empty_engine: sa.Engine) -> None:
    url = empty_engine.url.render_as_string(hide_password=False)
    started = [subprocess.Popen([sys.executable, "-c", _UPGRADE, url]) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert database.revision(empty_engine) == database.HEAD


def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"no database " * 1000)
    with pytest.raises(DatabaseError, match="not a database"):
        database.require(make_engine(f"sqlite:///{tmp_path}/x.sqlite"), embedded=True)


@pytest.mark.parametrize("url", ["nonsense", "postgresql://x/y", "mysql+nodriver://u:secret@h/d"])
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(BadInput) as error:
        make_engine(url)
    assert "secret" not in str(error.value)


def test_tags_differ_in_case_and_configs_are_stored_once(engine: sa.Engine) -> None:
    layers = [GemmConfig(m=1, n=1, k=1), GemmConfig(m=1, n=1, k=2)]
    with writing(engine) as connection:
        assert configs.store(connection, layers, "a") == configs.Stored(2, 2)
        assert configs.store(connection, layers, "a") == configs.Stored(0, 0)
        assert configs.store(connection, layers[:1], "A") == configs.Stored(0, 1)
        assert list(configs.tagged(connection, "a")) == layers
        assert list(configs.tagged(connection, "A")) == layers[:1]
        with pytest.raises(NotFound):
            configs.tagged(connection, "b")


def test_a_solver_that_nobody_has_is_an_error_and_loads_nothing(engine: sa.Engine) -> None:
    session_id = make_jobs(engine, 1)
    with pytest.raises(NotFound, match="NoSuch"), writing(engine) as connection:
        jobs.load(
            connection,
            jobs.JobRequest(session_id, "noop", ["build"], "x", "new", solvers=["NoSuch"]),
        )
    assert states(engine) == {"new": 10}


def test_a_solver_that_is_gone_becomes_invalid_and_gets_no_jobs(engine: sa.Engine) -> None:
    session_id = make_jobs(engine, 1)
    library = get_library("noop")

    class Smaller(type(library)):  # type: ignore[misc]
        def solvers(self) -> object:
            return super().solvers()[:3]

    with writing(engine) as connection:
        assert solvers.update_solvers(connection, Smaller()) == 3
        request = jobs.JobRequest(session_id, "noop", ["build"], "x", "new")
        assert jobs.load(connection, request) == 3


def test_a_layer_without_an_answer_keeps_its_solvers_and_fails_the_command(
    engine: sa.Engine,
) -> None:
    session_id = make_jobs(engine, 1)
    library = get_library("noop")

    class Crashing(type(library)):  # type: ignore[misc]
        def applicable(self, *given: object) -> object:
            (config, _), *others = super().applicable(*given)
            return iter([(config, None), *others])

    before = solvers.update_applicability(engine, library, session_id)
    found = solvers.update_applicability(engine, Crashing(), session_id)
    assert (found.configs, len(found.unanswered)) == (before.configs, 1)
    pairs = sa.select(sa.func.count()).select_from(SolverApplicability)
    assert read_value(engine, pairs) == before.pairs
    with pytest.raises(TunaError, match="failed to answer for 1 of 1 layer, such as "):
        show.applicability(found)


def test_claiming_reads_a_range_of_an_index(engine: sa.Engine) -> None:
    session_id = make_jobs(engine, 20)
    statement = (
        sa.select(Job.id)
        .where(Job.session_id == session_id, Job.step == "build", Job.state == "new")
        .order_by(Job.id)
        .limit(10)
    )
    text = str(statement.compile(engine, compile_kwargs={"literal_binds": True}))
    prefix = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    plan = str(read_rows(engine, sa.text(prefix + text)))
    assert "ix_job_claim" in plan
    assert "TEMP B-TREE" not in plan
    assert "filesort" not in plan
    assert bulk.IN_LIST < 32_766


def test_words_that_mysql_9_reserves_are_quoted() -> None:
    """MySQL 9 reserves words that SQLAlchemy does not know of; seen with 9.7."""
    reserved = {"library", "manual", "parallel", "qualify", "tablesample"}
    columns = [column for table in Base.metadata.tables.values() for column in table.columns]
    named = [column for column in columns if column.name in reserved]
    assert len(named) == 5
    assert all(column.name.quote for column in named)
    for file in (database.migrations_dir() / "versions").glob("r*.py"):
        for line in file.read_text().splitlines():
            assert (
                not any(f'sa.Column("{word}"' in line for word in reserved) or "quote=True" in line
            ), line
