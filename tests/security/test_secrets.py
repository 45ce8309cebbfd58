"""Passwords in settings reach only their server: not logs, errors, command lines, child
processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import sqlalchemy as sa
from jobs_builder import make_jobs, states
from private_servers import redis_server, with_password
from settings_changes import change_setting

from tuna.common import logs
from tuna.db import database
from tuna.db.engine import make_engine, reading
from tuna.db.models import Base
from tuna.errors import TunaError
from tuna.queue.connection import connect
from tuna.sandbox.processes import Child, child_env, run
from tuna.settings import get_settings

SQL, REDIS = "hunter2sql", "hunter2redis"
SECRET_URL = "redis://:hunter2@somewhere"  # noqa: S105 (nobody's)
Set = Callable[..., None]


@pytest.fixture()
def set_urls(home: Path, monkeypatch: pytest.MonkeyPatch) -> Set:
    """`set_urls(DB_URL="...")`: settings for this test."""

    def put(**settings: str) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(f"TUNA_{name}", value)
        get_settings.cache_clear()

    return put


@pytest.fixture()
def guarded_redis() -> Iterator[str]:
    """URL of a Redis that requires a password."""
    with redis_server("--requirepass", REDIS, host="127.0.0.1") as url:
        yield with_password(url, REDIS)


@pytest.fixture()
def guarded_sql(mariadb_url: str) -> Iterator[str]:
    """URL of a MariaDB database whose user has a password."""
    base = sa.make_url(mariadb_url)
    server = make_engine(base.render_as_string(hide_password=False))
    with server.begin() as connection:
        for statement in (
            "CREATE DATABASE tuna_secret",
            f"CREATE USER tuna_secret@localhost IDENTIFIED BY '{SQL}'",
            "GRANT ALL ON tuna_secret.* TO tuna_secret@localhost",
        ):
            connection.execute(sa.text(statement))
    url = base.set(username="tuna_secret", password=SQL, database="tuna_secret")
    yield url.render_as_string(hide_password=False)
    with server.begin() as connection:
        connection.execute(sa.text("DROP DATABASE tuna_secret"))
        connection.execute(sa.text("DROP USER tuna_secret@localhost"))
    server.dispose()


def _leaks(text: str) -> bool:
    return SQL in text or REDIS in text or "hunter2" in text


def _command_lines(process: psutil.Process) -> set[str]:
    found = set()
    for one in [process, *process.children(recursive=True)]:
        try:
            found.add(" ".join(one.cmdline()))
        except psutil.Error:
            continue
    return found


def test_a_whole_run_at_debug_level_tells_no_password(
    home: Path, tmp_path: Path, guarded_sql: str, guarded_redis: str, set_urls: Set,
    type_in: Callable[..., Any],
) -> None:  # fmt: skip
    set_urls(
        DB_URL=guarded_sql, BROKER_URL=guarded_redis, REDIS_URL=guarded_redis, LOG_LEVEL="DEBUG"
    )
    engine = make_engine(guarded_sql)
    database.upgrade(engine)
    make_jobs(engine, 1, options={"trials": 1, "fail": "Noop3"})
    words = [sys.executable, "-m", "tuna", "run", "--session-id", "1", "--compile-processes", "1"]
    with open(tmp_path / "out", "wb") as out:
        process = psutil.Popen(words, stdout=out, stderr=out, cwd=tmp_path)
        seen: set[str] = set()
        while process.poll() is None:
            seen |= _command_lines(process)
            time.sleep(0.25)
    assert states(engine)["evaluated"] == 9, (tmp_path / "out").read_text()
    assert len(seen) >= 3, "the workers were seen"
    assert not [line for line in seen if _leaks(line)]
    told = [type_in("tuna", *line) for line in (
        ("status", "--json"), ("status", "--session-id", 1), ("doctor", "--json"), ("doctor",),
        ("--debug", "status"),
        ("report", "--session-id", 1, "-o", "report.html"),
        ("export", "--session-id", 1, "--form", "kernel"),
        ("db", "upgrade"),
    )]  # fmt: skip
    assert "127.0.0.1" in (tmp_path / "out").read_text() + "".join(
        path.read_text() for path in (home / "logs").iterdir()
    )
    assert not [ended for ended in told if _leaks(ended.out + ended.err)]
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "redis.conf"]
    assert {"report.html", "out"} <= {path.name for path in files}
    assert not [path for path in files if _leaks(path.read_bytes().decode("latin-1"))]
    with reading(engine) as connection:
        for table in Base.metadata.sorted_tables:
            assert not _leaks(repr(connection.execute(sa.select(table)).all())), table.name
    client = redis.Redis.from_url(guarded_redis)
    assert not [
        key
        for key in client.scan_iter()
        if client.type(key) == b"string" and _leaks(repr(client.get(key)))
    ]
    engine.dispose()


def test_a_wrong_password_is_refused_without_repeating_it(
    guarded_sql: str, guarded_redis: str, set_urls: Set, type_in: Callable[..., Any]
) -> None:
    set_urls(DB_URL=guarded_sql.replace(SQL, "hunter2wrong"))
    for words in (("status",), ("--debug", "status")):
        try:
            ended = type_in("tuna", *words)
            assert ended.code == 4
            text = ended.err
        except TunaError as error:
            text = str(error) + repr(error.__cause__)
        assert "Access denied" in text
        assert not _leaks(text)
    set_urls(BROKER_URL=guarded_redis.replace(REDIS, "hunter2wrong"))
    ended = type_in("tuna", "doctor", "--json")
    assert ended.code == 1
    assert not _leaks(ended.out + ended.err)
    assert "password" in ended.out


BROKEN = [
    "redis://:hunter2/x@127.0.0.1:9/0", "redis://:hunter2#x@127.0.0.1:9/0", "redis://:hunter2?x@127.0.0.1:9/0",
    "redis://:hunter2@[127.0.0.1:9/0", "http://:hunter2@127.0.0.1/0", "hunter2", "redis://:hunter2@127.0.0.1:9/?db=hunter2",
    "amqp://me:hunter2@127.0.0.1:9//", "amqp://me:hunter2/x@127.0.0.1:9//", "redis://me:hunter2@127.0.0.1:9/0",
]  # fmt: skip


@pytest.mark.parametrize("url", BROKEN)
@pytest.mark.parametrize("name", ["BROKER_URL", "REDIS_URL"])
def test_a_broken_url_of_redis_is_not_repeated(set_urls: Set, name: str, url: str) -> None:
    set_urls(**{"BROKER_URL": "redis://127.0.0.1:9", name: url})
    with pytest.raises(TunaError) as caught:
        connect(get_settings())
    assert not _leaks(f"{caught.value} {caught.value.hint}")


@pytest.mark.parametrize(
    "url",
    ["mysql+pymysql://me:hunter2@127.0.0.1:9/tuna", "mysql://me:hun@hunter2@127.0.0.1:9/t", "mysql://me:x@h:hunter2/t",
     "mysql+nodriver://me:hunter2@h/t", "postgresql://me:hunter2@h/t", "nosuch://me:hunter2@h/t",
     "hunter2", "://hunter2",
     "mysql://me:hunter2@[::1/t"],
)  # fmt: skip
def test_a_broken_url_of_the_database_is_not_repeated(
    set_urls: Set, type_in: Callable[..., Any], url: str
) -> None:
    set_urls(DB_URL=url)
    ended = type_in("tuna", "status")
    assert ended.code in (2, 4)
    assert not _leaks(ended.out + ended.err)


def test_a_worker_that_cannot_start_says_why_without_the_password(
    set_urls: Set, home: Path
) -> None:
    set_urls(BROKER_URL="redis://:hunter2/x@127.0.0.1:9/0")
    words = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "tuna.celery_app",
        "worker",
        "-Q",
        "compile",
        "-c",
        "1",
        "-l",
        "DEBUG",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "edis" in done.stderr
    assert not _leaks(done.stdout + done.stderr)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_in_a_log_shows_no_local_variables(form: str, tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.configure("DEBUG", form, str(tmp_path / "log"))

    def fail(url: str) -> None:
        raise ValueError(f"it has {len(url)} characters")

    try:
        fail(SECRET_URL)
    except ValueError:
        logging.getLogger("somebody").exception("it failed")
    finally:
        root.handlers, root.level = before
    text = (tmp_path / "log").read_text()
    assert "it has 26 characters" in text
    assert not _leaks(text)


def test_settings_can_be_printed(set_urls: Set) -> None:
    url = "redis://:hunter2@h"
    set_urls(DB_URL=url, BROKER_URL=url, REDIS_URL=url)
    for text in (repr(get_settings()), str(get_settings()), get_settings().model_dump_json()):
        assert not _leaks(text)


def test_a_setting_that_is_refused_is_not_repeated(
    home: Path, tmp_path: Path, type_in: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_CONFIG", "tuna.toml")
    (tmp_path / "tuna.toml").write_text('db_url = ["mysql://me:hunter2@h/t"]\n')
    get_settings.cache_clear()
    ended = type_in("tuna", "status")
    assert ended.code == 2
    assert not _leaks(ended.err)
    (tmp_path / "tuna.toml").write_text('db_url = "mysql://me:hunter2@h/t\n')
    get_settings.cache_clear()
    assert not _leaks(type_in("tuna", "status").err)


SECRETS = {
    "TUNA_DB_URL": "hunter2", "TUNA_BROKER_URL": "hunter2", "TUNA_REDIS_URL": "hunter2",
    "CELERY_BROKER_URL": "hunter2",
    "CELERY_RESULT_BACKEND": "hunter2", "TUNA_ARTIFACTS_KEY": "hunter2",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
}  # fmt: skip


def test_what_compiles_and_measures_does_not_get_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    get_settings()
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert not _leaks(repr(child_env()))
    done = run(
        [sys.executable, "-c", "import os, json; print(json.dumps(dict(os.environ)))"], timeout_s=30
    )
    assert "PATH" in json.loads(done.output)
    assert not _leaks(done.output)
    code = (
        "import os\nHANDLERS = {'look': lambda: {'environ': dict(os.environ), 'line':"
        " open('/proc/self/cmdline').read()}}\n"
    )
    (tmp_path / "looker.py").write_text(code)
    child = Child(
        "looker", env=child_env({"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"})
    )
    try:
        assert not _leaks(repr(child.call({"op": "look"}, 30)))
    finally:
        child.close()


def test_fin_does_not_get_the_settings(
    tmp_path: Path, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuna.libraries.miopen import fin

    change_setting(monkeypatch, "TUNA_SANDBOX_WRITE", str(tmp_path))
    get_settings()
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "fin"
    script.write_text(
        f'#!/bin/sh\nenv > {tmp_path}/env\ntr "\\0" " " < /proc/$$/cmdline >> {tmp_path}/env\necho'
        ' "[{}]" > "$4"\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(fin, "program", lambda: script)
    assert fin.call([{}], fin.FinCall(tmp_path)) == [{}]
    assert "MIOPEN_FIND_MODE" in (tmp_path / "env").read_text()
    assert not _leaks((tmp_path / "env").read_text())
    assert os.environ["TUNA_DB_URL"] == "hunter2"
