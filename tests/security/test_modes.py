"""File modes: other users of the machine have no access to Tuna's files and sockets."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from tuna.services.embedded_redis import EmbeddedRedis
from tuna.settings import get_settings
from tuna.workers.launch import LocalWorkers


@pytest.fixture(params=["made by Tuna", "made before, open to readers"])
def any_home(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    empty_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """A TUNA_HOME with umask 0."""
    before = os.umask(0)
    if request.param == "made by Tuna":
        empty_home.rmdir()
    else:
        empty_home.chmod(0o755)
        (empty_home / "run").mkdir()
        (empty_home / "run").chmod(0o777)
    yield empty_home
    os.umask(before)


def _open_to_others(home: Path) -> list[str]:
    """Paths that other users can open: neither private themselves nor in a private directory."""
    found = []
    for path in home.rglob("*"):
        way = [
            path,
            *(folder for folder in path.parents if folder == home or home in folder.parents),
        ]
        if all(part.lstat().st_mode & 0o007 for part in way):
            found.append(f"{path.relative_to(home)} {stat.filemode(path.lstat().st_mode)}")
    return found


def test_database_sockets_and_logs_are_the_users_alone(
    any_home: Path, type_in: Callable[..., object]
) -> None:
    server = EmbeddedRedis(get_settings().run_dir)
    server.acquire()
    try:
        assert type_in("tuna", "status").code == 0
        workers = LocalWorkers(get_settings().home / "logs")
        workers._log_dir.mkdir(mode=0o700)
        kinds = {path.name for path in any_home.rglob("*")}
        assert {"tuna.sqlite", "redis.lock", "redis.users"} <= kinds
        assert [
            line for line in _open_to_others(any_home) if line.split()[0] not in ("run", "logs")
        ] == []
        for name in ("tuna.sqlite", "tuna.sqlite-wal"):
            assert not (any_home / name).exists() or (any_home / name).stat().st_mode & 0o077 == 0
        assert server.socket.stat().st_mode & 0o077 == 0
        assert server.socket.parent.stat().st_mode & 0o077 == 0
    finally:
        server.release()


def test_the_embedded_redis_listens_on_no_port(home: Path) -> None:
    server = EmbeddedRedis(get_settings().run_dir)
    server.acquire()
    try:
        client = redis.Redis.from_url(server.url)
        process = psutil.Process(client.info()["process_id"])
        assert client.config_get("port")["port"] == "0"
        assert [
            item for item in process.net_connections("inet") if item.status == psutil.CONN_LISTEN
        ] == []
    finally:
        server.release()
