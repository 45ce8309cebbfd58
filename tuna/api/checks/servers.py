"""The doctor's checks of servers: database, Redis, broker, artifact store."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import redis
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from tuna.api.checks.findings import Finding, judge, judge_clock, judge_version
from tuna.db.engine import reading, writing
from tuna.errors import StoreUnavailable, TunaError
from tuna.queue import connection as services
from tuna.queue.announcements import namespaces, with_store
from tuna.queue.results import memory_of
from tuna.services import redis_client
from tuna.settings import Settings

#: Oldest versions with what Tuna needs: SKIP LOCKED, RETURNING, XAUTOCLAIM, quorum queues
_MARIADB, _MYSQL, _SQLITE, _REDIS, _RABBITMQ = (10, 6), (8, 0), (3, 35), (6, 2), (3, 8)
_BROKER_WAIT_S = 3
_COLLATION = "utf8mb4_bin"
#: Minimum of bytes in a packet: the largest kernels have some MiB, and a statement may take double
_PACKET_BYTES = 64 << 20


def of_sql(engine: sa.Engine) -> Iterator[Finding]:
    """A database with the current schema."""
    from tuna.db import database

    where = engine.url.render_as_string(hide_password=True)
    with reading(engine) as connection:
        found = list((_of_sqlite if engine.dialect.name == "sqlite" else _of_mysql)(connection))
    yield Finding("database", True, f"{where}, schema {database.revision(engine)}")
    yield from found
    if (fault := _write_fault(engine)) is not None:
        hint = "let its user INSERT, UPDATE and DELETE, mount it writable, or set TUNA_HOME"
        yield Finding("database rows", False, str(fault), fault.hint or hint)
        return
    yield Finding("database rows", True, "can be written")
    yield _table_rights(engine)


def _of_sqlite(connection: sa.Connection) -> Iterator[Finding]:
    version = connection.dialect.server_version_info or ()
    yield judge_version("database version", "SQLite", version, _SQLITE)
    mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
    # Without WAL (a network folder) readers and the drain block each other, and locks may not hold
    # at all.
    hint = "keep the file on a disk of this machine, not in a network folder"
    yield judge("database durability", mode not in ("wal", "memory"), f"journal_mode {mode}", hint)


def _of_mysql(connection: sa.Connection) -> Iterator[Finding]:
    maria = bool(getattr(connection.dialect, "is_mariadb", False))
    version = getattr(connection.dialect, "_mariadb_normalized_version_info", None) or ()
    version = version or connection.dialect.server_version_info or ()
    name = "MariaDB" if maria else "MySQL"
    yield judge_version("database version", name, version, _MARIADB if maria else _MYSQL)
    known = {row[0].lower(): row[1] for row in connection.exec_driver_sql("SHOW VARIABLES")}
    flush = str(known.get("innodb_flush_log_at_trx_commit"))
    hint = (
        "set innodb_flush_log_at_trx_commit = 1: a power cut loses results that Redis no longer has"
    )
    yield judge(
        "database durability", flush != "1", f"innodb_flush_log_at_trx_commit {flush}", hint
    )
    double = str(known.get("innodb_doublewrite", "ON"))
    hint = "set innodb_doublewrite = ON: a power cut may tear pages"
    yield judge(
        "database pages", double.upper() in ("OFF", "0"), f"innodb_doublewrite {double}", hint
    )
    if str(known.get("log_bin")).upper() in ("ON", "1"):
        sync = str(known.get("sync_binlog"))
        hint = (
            "set sync_binlog = 1: after a power cut the binary log, and what is restored from it,"
            " may lack commits"
        )
        yield judge("database binary log", sync != "1", f"sync_binlog {sync}", hint, warning=True)
    isolation = str(known.get("transaction_isolation") or known.get("tx_isolation"))
    hint = "READ COMMITTED was requested and not granted: claims would block each other"
    yield judge("database isolation", isolation != "READ-COMMITTED", isolation, hint, warning=True)
    yield _collation(connection)
    packet = int(known.get("max_allowed_packet") or 0)
    hint = (
        f"set max_allowed_packet = 256M: a kernel of more than {packet >> 21} MiB is not stored,"
        " and its job fails"
    )
    text = f"max_allowed_packet {packet >> 20} MiB"
    yield judge("database packet", packet < _PACKET_BYTES, text, hint, warning=True)
    before = time.time()
    now = float(connection.exec_driver_sql("SELECT UNIX_TIMESTAMP(NOW(6))").scalar_one())
    yield judge_clock("database clock", now, before)
    grants = [str(row[0]) for row in connection.exec_driver_sql("SHOW GRANTS")]
    whole = [
        grant for grant in grants if " ON *.* " in grant and not grant.startswith("GRANT USAGE ")
    ]
    hint = "give Tuna a user that has rights on its own database only"
    text = "more than Tuna needs" if whole else "on Tuna's database only"
    yield judge("database rights", bool(whole), text, hint, warning=True)


def _collation(connection: sa.Connection) -> Finding:
    rows = connection.exec_driver_sql(
        "SELECT table_name, table_collation FROM information_schema.tables WHERE table_schema ="
        " DATABASE()"
    )
    other = sorted(
        str(name)
        for name, collation in rows
        if collation != _COLLATION and name != "alembic_version"
    )
    change = "; ".join(
        f"ALTER TABLE {name} CONVERT TO CHARACTER SET utf8mb4 COLLATE {_COLLATION}"
        for name in other
    )
    hint = f"names A and a would be the same: SET foreign_key_checks = 0; {change}"
    text = f"{', '.join(other)} differ" if other else _COLLATION
    return judge("database collation", bool(other), text, hint)


def _write_fault(engine: sa.Engine) -> TunaError | None:
    """Return why no row can be written. Nothing is: a database looks at rights, mounts and locks
    also for statements without rows."""
    from tuna.db.models import Job

    none = sa.select(*Job.__table__.columns).where(sa.false())
    names = list(Job.__table__.columns.keys())
    try:
        with writing(engine) as connection:
            connection.execute(sa.insert(Job).from_select(names, none, include_defaults=False))
            connection.execute(sa.update(Job).where(sa.false()).values(state=Job.state))
            connection.execute(sa.delete(Job).where(sa.false()))
    except TunaError as error:
        return error
    return None


def _table_rights(engine: sa.Engine) -> Finding:
    table = sa.Table(
        f"tuna_doctor_{uuid.uuid4().hex[:8]}", sa.MetaData(), sa.Column("id", sa.Integer)
    )
    try:
        with engine.begin() as connection:
            table.create(connection)
            table.drop(connection)
    except DBAPIError as error:
        text = f"cannot create a table: {str(error.orig).splitlines()[0]}"
        return Finding(
            "database tables", True, text, "`tuna db upgrade` needs a user who can", warning=True
        )
    return Finding("database tables", True, "can be created")


def of_redis(settings: Settings) -> Iterator[Finding]:
    """The Redis of results and leases, embedded or not; the embedded one is started."""
    services.ensure_services(settings)
    client: Any = services.connect(settings)
    embedded = settings.redis_url is None and services.uses_embedded(settings)
    before = time.time()
    seconds, micros = client.time()
    info = client.info()
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:3])
    yield judge_version("redis", "embedded Redis" if embedded else "Redis", version, _REDIS)
    yield _holes(info, embedded)
    hint = "use a Redis by itself, or with replicas: Tuna's scripts do not follow to other nodes"
    mode = str(info.get("redis_mode", "standalone"))
    yield judge("redis mode", mode == "cluster", mode, hint)
    memory = memory_of(client)
    hint = "set maxmemory-policy noeviction: a full Redis would forget results and leases"
    yield judge("redis memory", memory.policy != "noeviction", str(memory), hint)
    hint = "raise maxmemory, or remove what else fills it: no work is given out until there is room"
    room = "nearly full" if memory.nearly_full else "enough"
    yield judge("redis room", memory.nearly_full, room, hint)
    if not embedded:
        yield from _append_only(client, info)
        yield judge_clock("redis clock", seconds + micros / 1e6, before)
        yield _guard(client, services.redis_url(settings))
    yield _redis_rights(client)


def _holes(info: dict[str, Any], embedded: bool) -> Finding:
    """Whether the server is older than the version in which known vulnerabilities are fixed."""
    name, version = redis_client.version_of(info)
    fixed = redis_client.first_safe(name, version)
    wanted = ".".join(map(str, fixed or version))
    hint = (
        f"scripts can run code in this version (CVE-2025-49844 and later): use {name} {wanted} or"
        " newer"
    )
    newest = "; install it, or a newer valkey-server: the newest in PATH is taken"
    hint += newest if embedded else ", or look whether your distribution has mended it"
    state = f"vulnerabilities fixed in {wanted}" if fixed else "no known vulnerabilities"
    text = f"{name} {'.'.join(map(str, version))}, {state}"
    return judge("redis security", fixed is not None, text, hint, warning=True)


def _append_only(client: Any, info: dict[str, Any]) -> Iterator[Finding]:
    hint = (
        "set appendonly yes, appendfsync everysec: else queued and undrained work is done again"
        " after a crash"
    )
    if not int(info.get("aof_enabled", 0)):
        yield judge("redis durability", True, "appendonly no", hint, warning=True)
        return
    sync = _configured(client, "appendfsync")
    text = f"appendonly yes, appendfsync {sync or 'not to be seen by this user'}"
    yield judge("redis durability", sync == "no", text, hint, warning=True)
    yield from _replay(client)


def _replay(client: Any) -> Iterator[Finding]:
    """Whether transactions and scripts in the append-only file come back after a crash:
    redis/redis#14541."""
    try:
        said = client.acl_dryrun("default", "XADD", "tuna", "*", "r", "doctor")
    # no right to run ACL, or Redis < 7, which checks no rights on replay
    except redis.ResponseError:
        return
    hint = (
        "in Redis' access list, write: user default off resetpass ~* &* +@all. It stays off, but"
        " some versions replay the append-only file with its rights, and drop each transaction that"
        " it may not run"
    )
    yield judge(
        "redis replay", said != b"OK", "of transactions, as the user default", hint, warning=True
    )


def _configured(client: Any, name: str) -> str | None:
    """A setting of the server; None when this user may not read it, which is the recommended
    setup."""
    try:
        return str(client.config_get(name).get(name))
    except redis.ResponseError:
        return None


def _guard(client: Any, url: str) -> Finding:
    """Whether there is a password, and whether the user has more rights than Tuna needs."""
    parts = urlsplit(url)
    if parts.scheme != "unix" and not parts.password:
        return judge(
            "redis rights",
            True,
            "no password",
            "set one: docker/redis-start shows how",
            warning=True,
        )
    administers = _configured(client, "maxmemory") is not None
    hint = "docker/redis-start has a user with no more rights than Tuna needs"
    text = "may administer the server" if administers else "no right to administer"
    return judge("redis rights", administers, text, hint, warning=True)


def _redis_rights(client: Any) -> Finding:
    """Streams, scripts, expiry: on a temporary key."""
    key = f"tuna:{{doctor-{uuid.uuid4().hex}}}:results"
    try:
        client.xadd(key, {"r": "doctor"}, maxlen=1)
        client.eval("return redis.call('XLEN', KEYS[1])", 1, key)
        client.pexpire(key, 60_000)
        client.delete(key)
    except redis.ResponseError as error:
        return Finding(
            "redis stream", False, str(error), "docker/redis-start has the rights that Tuna needs"
        )
    return Finding("redis stream", True, "can be written, scripts run")


def broker_is_apart(settings: Settings) -> bool:
    return settings.broker_url is not None and services.broker_url(settings) != services.redis_url(
        settings
    )


def of_broker(settings: Settings) -> Iterator[Finding]:
    """A broker that is not the Redis of results."""
    parts = urlsplit(services.broker_url(settings))
    with services.connect_broker(settings, _BROKER_WAIT_S) as connection:
        said: Any = getattr(connection.connection, "server_properties", {})
    name, version = str(said.get("product", parts.scheme)), str(said.get("version", ""))
    if name == "RabbitMQ":
        yield judge_version(
            "broker",
            name,
            tuple(int(part) for part in version.split("-")[0].split(".")[:3]),
            _RABBITMQ,
        )
    else:
        yield Finding(
            "broker", True, f"{parts.scheme} at {parts.hostname or 'localhost'} {version}".strip()
        )


def _with_store(settings: Settings) -> Settings:
    if settings.artifacts_url or services.uses_embedded(settings):
        return settings
    client = services.connect(settings)
    for namespace in namespaces(client):
        with contextlib.suppress(StoreUnavailable):
            return with_store(client, settings, namespace)
    return settings


def of_artifacts(settings: Settings) -> Iterator[Finding]:
    """The artifact store, whose URL a worker may get from coordinators."""
    from tuna.artifacts.store import Artifacts

    settings = _with_store(settings)
    store = Artifacts.from_settings(settings)
    # the same bytes each time, so that a store does not fill up
    data = f"tuna doctor {uuid.getnode()}\n".encode()
    started = time.monotonic()
    ok = store.try_out(data)
    text = f"can be written and read, {1000 * (time.monotonic() - started):.0f} ms"
    yield Finding("artifacts", ok, text if ok else "what is read is not what was written")
    if settings.artifacts_url is None:
        return
    try:
        store.check()
    except StoreUnavailable as error:
        text = "no coordinator has used this store yet, or it is not the one that they use"
        yield Finding("artifacts shared", True, text, f"on a worker: {error.hint}", warning=True)
