"""A database with the baseline's schema and work in flight is upgraded, exports the same bytes, and
goes on; an upgrade that is killed is ended by the next one.

`tests/assets/baseline/README.md` says how the database and the exports were made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from databases import columns_and_keys, differences
from settings_changes import change_setting

from tuna.db.database import KNOWN

ASSETS = Path(__file__).parents[1] / "assets" / "baseline"
ROWS = {
    "session": 6,
    "environment": 6,
    "config": 12,
    "config_tag": 12,
    "model": 1,
    "framework": 1,
    "model_config": 4,
    "job": 65,
    "search": 4,
    "step_result": 143,
    "trial": 107,
    "find_db": 46,
    "find_db_kernel": 39,
    "kernel": 50,
    "golden": 2,
    "golden_entry": 43,
    "golden_kernel": 44,
    "device": 5,
    "token": 1,
    "worker": 1,
}
VALUES = (
    "SELECT namespace FROM installation",
    "SELECT id, session_id, state, step, attempt, cause FROM job ORDER BY id",
    "SELECT id, job_id, step, attempt, cause FROM step_result ORDER BY id",
    "SELECT id, params, time_ms FROM trial ORDER BY id",
    "SELECT id, time_ms, params FROM find_db ORDER BY id",
    "SELECT digest, kernel.blob FROM kernel ORDER BY digest",
    "SELECT version, state FROM golden ORDER BY version",
    "SELECT id, time_ms, params FROM golden_entry ORDER BY id",
)
#: The machine of session 2, as the stand-in for fin shows it.
MACHINE = {
    "arch": "gfx90a",
    "num_cu": 104,
    "rocm": "6.2.0-66",
    "miopen": "3.3.0",
    "tweak": "2d1fd997",
}

UPGRADE = """
import sys
from tuna.db.database import upgrade
from tuna.db.engine import make_engine
upgrade(make_engine(sys.argv[1]))
"""
TypeIn = Callable[..., Any]
Capture = pytest.CaptureFixture[str]


def fingerprint(path: Path) -> str:
    """SHA-256 of a file, or its text where that is short.

    Without the four bytes in which an SQLite file names the version of SQLite that wrote it.
    """
    data = path.read_bytes()
    if path.name.endswith(".txt") and len(data) < 3000:
        return data.decode()
    if data.startswith(b"SQLite format 3\0"):
        data = data[:96] + bytes(4) + data[100:]
    return hashlib.sha256(data).hexdigest()


def fingerprints(folder: Path) -> dict[str, str]:
    """Of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): fingerprint(path) for path in files}


@pytest.fixture(params=["sqlite", "mariadb"])
def database(
    request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sa.Engine]:
    """An engine on the database, which the settings name."""
    if request.param == "sqlite":
        (home / "tuna.sqlite").write_bytes(
            lzma.decompress((ASSETS / "tuna.sqlite.xz").read_bytes())
        )
        yield sa.create_engine(f"sqlite:///{home / 'tuna.sqlite'}", poolclass=sa.NullPool)
        return
    base = sa.make_url(request.getfixturevalue("mariadb_url"))
    url = base.set(database=f"tuna_{uuid.uuid4().hex[:12]}")
    server, engine = (sa.create_engine(each, poolclass=sa.NullPool) for each in (base, url))
    with server.begin() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {url.database}")
    load(engine, lzma.decompress((ASSETS / "tuna.sql.xz").read_bytes()).decode())
    change_setting(monkeypatch, "TUNA_DB_URL", url.render_as_string(hide_password=False))
    yield engine
    with server.begin() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {url.database}")


def load(engine: sa.Engine, dump: str) -> None:
    """Run the statements of a dump, which has no line end within a value."""
    with engine.connect().execution_options(no_parameters=True) as connection:
        for statement in dump.split(";\n"):
            if statement.strip():
                connection.exec_driver_sql(statement)
        connection.commit()


def rows(engine: sa.Engine, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(query)]


def good(type_in: TypeIn, *words: object) -> str:
    """What a command prints that ends well."""
    ended = type_in("tuna", *words)
    assert ended.code == 0, (words, ended)
    return str(ended.out)


def test_an_upgrade_loses_nothing_and_leaves_what_the_models_say(
    database: sa.Engine, type_in: TypeIn, caplog: pytest.LogCaptureFixture
) -> None:
    before = {query: rows(database, query) for query in VALUES}
    ended = type_in("tuna", "db", "upgrade")
    assert f"schema {KNOWN[0]} -> " in ended.out
    assert "Dropped: 1 time that other programs reported" in caplog.text
    assert {table: rows(database, f"SELECT count(*) FROM {table}")[0][0] for table in ROWS} == ROWS
    for query in VALUES:
        assert rows(database, query) == before[query]
    assert differences(database) == []


def contents(engine: sa.Engine) -> dict[str, Any]:
    """The columns and keys of all tables, and all rows but the values that each upgrade draws
    anew."""
    tables = sa.inspect(engine).get_table_names()
    with engine.connect() as connection:
        found: dict[str, Any] = {"": columns_and_keys(connection)}
        for table in tables:
            drawn = ("namespace", "secret", "gateway_secret") if table == "installation" else ()
            columns = [
                column["name"]
                for column in sa.inspect(engine).get_columns(table)
                if column["name"] not in drawn
            ]
            chosen = ", ".join(f"`{name}`" for name in columns)
            found[table] = sorted(
                map(repr, connection.exec_driver_sql(f"SELECT {chosen} FROM `{table}`").all())
            )
    return found


@pytest.mark.drill(only=True)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("empty_engine", ["mariadb"], indirect=True)
def test_an_upgrade_that_is_killed_at_any_moment_is_ended_by_the_next(
    empty_engine: sa.Engine,
) -> None:
    engine = sa.create_engine(empty_engine.url, poolclass=sa.NullPool)
    name = engine.url.database
    words = [sys.executable, "-c", UPGRADE, engine.url.render_as_string(hide_password=False)]
    subprocess.run(words, check=True)
    undisturbed = contents(engine)
    tables = f"SELECT count(*) FROM information_schema.tables WHERE table_schema = '{name}'"
    for number in range(6):
        with engine.begin() as connection:
            connection.exec_driver_sql("SET foreign_key_checks = 0")
            connection.exec_driver_sql(f"CREATE OR REPLACE DATABASE {name}")
        goal = random.randrange(len(undisturbed))
        with subprocess.Popen(words) as process:
            while rows(engine, tables)[0][0] < goal:
                time.sleep(0.005)
            process.kill()
        if number % 2:
            kill_statements(engine)
        subprocess.run(words, check=True)
        assert contents(engine) == undisturbed, goal


def kill_statements(engine: sa.Engine) -> None:
    """End what the server still does in a database for clients that have gone."""
    with engine.connect() as connection:
        others = (
            "SELECT id FROM information_schema.processlist WHERE db = database() AND id !="
            " connection_id()"
        )
        for number in connection.exec_driver_sql(others).scalars().all():
            with contextlib.suppress(sa.exc.DBAPIError):  # gone by itself
                connection.exec_driver_sql(f"KILL {number}")


def test_exports_are_byte_equal(database: sa.Engine, type_in: TypeIn, tmp_path: Path) -> None:
    good(type_in, "db", "upgrade")
    exports = json.loads((ASSETS / "exports.json").read_text())
    assert len(exports) > 20
    for number, (words, expected) in enumerate(exports.items()):
        good(type_in, "export", *words.split(), "-d", tmp_path / str(number))
        assert fingerprints(tmp_path / str(number)) == expected, words


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "database",
    ["sqlite", pytest.param("mariadb", marks=pytest.mark.drill(only=True))],
    indirect=True,
)
def test_the_work_goes_on(
    database: sa.Engine,
    type_in: TypeIn,
    rocm: Callable[..., Path],
) -> None:
    rocm(**MACHINE)
    good(type_in, "db", "upgrade")
    measured = rows(database, "SELECT id, attempt FROM job WHERE state = 'evaluated' ORDER BY id")
    assert good(type_in, "retry", "--session-id", 2).startswith("session 2: 4 jobs try again")
    # In a process of its own, since Celery keeps the first broker of a process.
    line = [sys.executable, "-m", "tuna", "run", "--session-id", "2"]
    ended = subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)
    assert ended.returncode == 0, ended
    (session,) = json.loads(good(type_in, "status", "--session-id", 2, "--json"))
    assert session["jobs"] == {"canceled": 2, "evaluated": 21}
    assert set(measured) < set(
        rows(database, "SELECT id, attempt FROM job WHERE state = 'evaluated'")
    )
    assert (
        "ConvAsm3x3U"
        in Path(
            good(type_in, "report", "--session-id", 2, "-o", "report.html").splitlines()[-1]
        ).read_text()
    )
    assert "40 entries" in good(
        type_in, "golden", "build", 2, "--session-id", 2, "--base", 1, "--overwrite"
    )
    listed = json.loads(good(type_in, "golden", "list", "--json"))
    assert [(one["version"], one["state"], one["current"]) for one in listed] == [
        (1, "promoted", True),
        (2, "draft", False),
    ]
