"""`tuna doctor` on services: what is well, what costs time, what would lose data."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from private_servers import redis_server, with_password
from settings_changes import change_setting
from shared_data import needed_program
from sqlalchemy import event

from tuna.api import checks as doctor
from tuna.api.checks import servers
from tuna.api.checks.findings import Finding, judge_clock, judge_version
from tuna.db import database
from tuna.db.engine import make_engine
from tuna.errors import ServiceError
from tuna.settings import Settings

Type = Callable[..., Any]
PASSWORD = "it's-a-secret"  # noqa: S105


def _by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


@pytest.fixture
def start_redis() -> Iterator[Callable[..., str]]:
    """`start_redis("--appendonly", "yes")`: the URL of a server with a password."""
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> str:
            url = stack.enter_context(redis_server("--requirepass", PASSWORD, *options))
            return with_password(url, PASSWORD)

        yield start


def _redis(url: str, tmp_path: Path) -> dict[str, Finding]:
    return _by_name(doctor.of_redis(_settings_of(url, tmp_path)))


def _settings_of(url: str, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, redis_url=url, broker_url=url)


def test_a_redis_as_it_should_be(start_redis: Callable[..., str], tmp_path: Path) -> None:
    url = start_redis("--appendonly", "yes")
    client = redis.Redis.from_url(url)
    client.acl_setuser(
        "tuna", enabled=True, passwords=["+p"], keys=["*"], channels=["*"],
        categories=["+@all", "-@admin", "-@dangerous"], commands=["+info"],
    )  # fmt: skip
    found = _redis(url.replace(f":{PASSWORD}@", "tuna:p@"), tmp_path)
    assert "vulnerabilities" in found.pop("redis security").text, (
        "whatever version this machine has"
    )
    assert all(finding.ok and not finding.warning for finding in found.values()), found
    assert (
        found["redis durability"].text == "appendonly yes, appendfsync not to be seen by this user"
    )
    assert found["redis rights"].text == "no right to administer"
    assert client.keys() == [], "nothing is left behind"


def test_a_redis_that_is_nearly_full_is_said_with_figures(
    start_redis: Callable[..., str], tmp_path: Path
) -> None:
    url = start_redis("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru")
    client = redis.Redis.from_url(url)
    for number in range(17):
        client.set(f"other{number}", b"x" * 1_000_000)
    found = _redis(url, tmp_path)
    assert not found["redis room"].ok
    assert re.fullmatch(
        r"[\d.]+ MB of 21\.0 MB used, maxmemory-policy allkeys-lru", found["redis memory"].text
    )


def test_a_redis_in_cluster_mode_is_refused(
    start_redis: Callable[..., str], tmp_path: Path
) -> None:
    mode = next(
        one
        for one in doctor.of_redis(_settings_of(start_redis("--cluster-enabled", "yes"), tmp_path))
        if one.what == "redis mode"
    )
    assert (mode.ok, mode.text) == (False, "cluster")


def test_a_redis_that_drops_transactions_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needed_program("/usr/bin/redis-server")
    # the wheel's is of version 6, which drops nothing
    monkeypatch.setenv("PATH", f"/usr/bin:{os.environ['PATH']}")
    with redis_server("--appendonly", "yes") as url:
        client: Any = redis.Redis.from_url(url)
        assert int(client.info()["redis_version"].split(".")[0]) >= 7
        assert _redis(url, tmp_path)["redis replay"].text == "of transactions, as the user default"
        assert not _redis(url, tmp_path)["redis replay"].warning
        client.acl_setuser(
            "admin", enabled=True, nopass=True, keys=["*"], channels=["*"], categories=["+@all"]
        )
        client.execute_command("ACL SETUSER", "default", "reset")
        admin = url.replace("unix://", "unix://admin:p@")
        assert "resetpass ~* &* +@all" in _redis(admin, tmp_path)["redis replay"].hint
        redis.Redis.from_url(admin).execute_command(
            "ACL SETUSER", "default", "off", "resetpass", "~*", "&*", "+@all"
        )
        assert not _redis(admin, tmp_path)["redis replay"].warning


def test_a_redis_that_may_forget(start_redis: Callable[..., str], tmp_path: Path) -> None:
    found = _redis(start_redis("--appendonly", "no", "--maxmemory-policy", "allkeys-lru"), tmp_path)
    assert not found["redis memory"].ok
    assert "noeviction" in found["redis memory"].hint
    assert found["redis durability"].ok, "what is in Redis alone is done again"
    assert found["redis durability"].warning
    assert found["redis rights"].text == "may administer the server"
    assert found["redis rights"].warning


def test_a_redis_user_without_the_rights(start_redis: Callable[..., str], tmp_path: Path) -> None:
    url = start_redis()
    redis.Redis.from_url(url).acl_setuser(
        "poor",
        enabled=True,
        passwords=["+p"],
        keys=["*"],
        commands=["+ping", "+info", "+time", "+hello", "+client"],
    )
    found = _redis(url.replace(f":{PASSWORD}@", "poor:p@"), tmp_path)
    assert not found["redis stream"].ok
    assert "xadd" in found["redis stream"].text.lower()


def test_a_redis_without_a_password(tmp_path: Path) -> None:
    finding = servers._guard(None, "redis://cache.example.com:6379/0")
    assert (finding.text, finding.ok, finding.warning) == ("no password", True, True)


@pytest.mark.parametrize(
    ("ahead_s", "warning"), [(0.0, False), (1.5, False), (2.5, True), (-3600.0, True)]
)
def test_a_clock_that_goes_wrong(ahead_s: float, warning: bool) -> None:
    finding = judge_clock("redis clock", time.time() + ahead_s, time.time())
    assert (finding.ok, finding.warning) == (True, warning)
    assert f"{ahead_s:+.1f} s" in finding.text or not ahead_s


def test_both_databases_are_well(engine: sa.Engine) -> None:
    found = _by_name(doctor.of_sql(engine))
    assert all(finding.ok for finding in found.values()), found
    assert database.HEAD in found["database"].text
    assert found["database tables"].text == "can be created"
    assert not [name for name in sa.inspect(engine).get_table_names() if "doctor" in name]
    if engine.dialect.name != "sqlite":
        assert found["database isolation"].text == "READ-COMMITTED"
        assert "+0.0 s" in found["database clock"].text or "-0.0 s" in found["database clock"].text


def test_a_database_that_cannot_be_written_must_change(sqlite_engine: sa.Engine) -> None:
    event.listen(sqlite_engine, "connect", lambda db, _: db.execute("PRAGMA query_only = ON"))
    sqlite_engine.dispose()
    found = _by_name(doctor.of_sql(sqlite_engine))
    assert (found["database"].ok, found["database rows"].ok) == (True, False)
    assert "attempt to write a readonly database" in found["database rows"].text


def test_a_check_that_a_read_only_disk_ends_keeps_what_it_found() -> None:
    def look() -> Iterator[Finding]:
        yield Finding("redis", True, "redis 8.0.0")
        raise OSError(errno.EROFS, "Read-only file system", "/srv/run/redis.users")

    text = "Read-only file system: /srv/run/redis.users"
    assert doctor._answered("redis", look) == [
        Finding("redis", True, "redis 8.0.0"),
        Finding("redis", False, text, "set TUNA_HOME"),
    ]


def test_a_mariadb_that_loses_commits_in_a_power_cut(mariadb_engine: sa.Engine) -> None:
    with mariadb_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        try:
            found = _by_name(doctor.of_sql(mariadb_engine))
        finally:
            connection.exec_driver_sql("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    assert not found["database durability"].ok
    assert "innodb_flush_log_at_trx_commit = 1" in found["database durability"].hint


def test_a_table_with_another_collation(mariadb_engine: sa.Engine) -> None:
    with mariadb_engine.connect() as connection:
        connection.exec_driver_sql(
            "ALTER TABLE config_tag CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
        )
    found = _by_name(doctor.of_sql(mariadb_engine))["database collation"]
    assert not found.ok
    assert found.text == "config_tag differ"
    with mariadb_engine.connect() as connection:
        for statement in found.hint.partition(": ")[2].split("; "):
            connection.exec_driver_sql(statement)
    assert _by_name(doctor.of_sql(mariadb_engine))["database collation"].ok, "the hint mends it"


@pytest.mark.parametrize("rights", ["SELECT, INSERT, UPDATE, DELETE", "SELECT, INSERT, UPDATE"])
def test_a_mariadb_user_with_few_rights(mariadb_engine: sa.Engine, rights: str) -> None:
    user, database = f"u{uuid.uuid4().hex[:10]}", mariadb_engine.url.database
    with mariadb_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE USER {user}@localhost IDENTIFIED BY 'x'")
        connection.exec_driver_sql(f"GRANT {rights} ON {database}.* TO {user}@localhost")
        poor_url = mariadb_engine.url.set(username=user, password="x")  # noqa: S106
        poor = make_engine(poor_url.render_as_string(hide_password=False))
        try:
            found = _by_name(doctor.of_sql(poor))
        finally:
            poor.dispose()
            connection.exec_driver_sql(f"DROP USER {user}@localhost")
    if "DELETE" in rights:
        assert (found["database tables"].ok, found["database tables"].warning) == (True, True)
        assert "tuna db upgrade" in found["database tables"].hint
    else:
        assert not found["database rows"].ok
        assert "DELETE command denied" in found["database rows"].text
    assert found["database rights"].text == "on Tuna's database only"
    assert _by_name(doctor.of_sql(mariadb_engine))["database rights"].warning, (
        "root may do anything"
    )


@pytest.mark.parametrize(
    ("found", "ok"), [((10, 5, 9), False), ((10, 6, 0), True), ((11, 8, 6), True)]
)
def test_an_old_version_is_refused(found: tuple[int, ...], ok: bool) -> None:
    assert judge_version("database version", "MariaDB", found, servers._MARIADB).ok is ok


@pytest.mark.service
def test_the_embedded_services_are_well(type_in: Type) -> None:
    ended = type_in("tuna", "doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(ended.out)}
    assert ended.code == 0
    assert findings["redis"]["text"].startswith("embedded Redis ")
    assert {"database", "database durability", "redis memory", "redis stream", "artifacts"} <= set(
        findings
    )
    assert "broker" not in findings, "it is the embedded Redis"


def test_services_that_are_away_are_findings_without_secrets(
    type_in: Type, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setenv("TUNA_DB_URL", f"mysql+pymysql://u:{PASSWORD}@127.0.0.1:1/tuna")
    monkeypatch.setenv("TUNA_REDIS_URL", f"redis://:{PASSWORD}@127.0.0.1:1")
    change_setting(monkeypatch, "TUNA_BROKER_URL", f"amqp://u:{PASSWORD}@127.0.0.1:1//")
    ended = type_in("tuna", "doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(ended.out)}
    assert ended.code == 1
    assert not found["database"]["ok"]
    assert not found["redis"]["ok"]
    assert not found["broker"]["ok"]
    assert PASSWORD not in ended.out + ended.err


def test_servers_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, silent ones took 13 to 22 s."""
    all_asked = threading.Barrier(4, timeout=60)

    def silent(*_: object) -> Iterator[Finding]:
        all_asked.wait()
        raise ServiceError("no answer")

    monkeypatch.setattr(doctor, "broker_is_apart", lambda _: True)
    for check in ("open_database", "of_redis", "of_broker", "of_artifacts"):
        monkeypatch.setattr(doctor, check, silent)
    found = {finding.what: finding for finding in doctor.doctor()}
    assert (found["database"].text, found["database"].ok) == ("no answer", False)


def test_rabbitmq_says_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Transport:
        server_properties = {"product": "RabbitMQ", "version": "3.7.28-1"}  # noqa: RUF012

    class Connection:
        def __init__(self, *_: object, **__: object) -> None:
            self.connection = Transport

        def __enter__(self) -> Connection:
            return self

        def __exit__(self, *_: object) -> None: ...

        def ensure_connection(self, **_: object) -> None: ...

    monkeypatch.setattr("kombu.Connection", Connection)
    (finding,) = doctor.of_broker(Settings(home=tmp_path, broker_url="amqp://u:p@h/v"))
    assert (finding.ok, finding.text) == (False, "RabbitMQ 3.7.28")
    Transport.server_properties = {"product": "RabbitMQ", "version": "4.1.0"}
    (finding,) = doctor.of_broker(Settings(home=tmp_path, broker_url="amqp://u:p@h/v"))
    assert finding.ok


def test_another_project_that_brings_a_package_of_this_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own,) = doctor.of_installation()
    assert own.ok
    about = tmp_path / "tuna-0.5.15.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tuna\nVersion: 0.5.15\n")
    (about / "top_level.txt").write_text("tuna\n")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = doctor.of_installation()
    assert not finding.ok
    assert "pip uninstall tuna, then install tuna-autotuner again" in finding.hint
