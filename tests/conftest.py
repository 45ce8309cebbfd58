"""Fixtures that talk to services: both databases, a Redis, a TUNA_HOME of one's own with command lines in it."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from command_lines import PROGRAMS, Ended
from shared_data import need

from tuna.cli.main import guarded
from tuna.db import schema
from tuna.db.engine import make_engine
from tuna.embedded_redis import EmbeddedRedis
from tuna.libraries.miopen.environment import visible_gpu
from tuna.settings import get_settings
from tuna.testing.rocm import install
from tuna.testing.servers import find, mariadb_server, wait_until

os.environ["TUNA_SIMULATED"] = "1"  # the library noop
# A suite that runs in the background of a script ignores Ctrl-C, and what it starts would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """Base URL of a MariaDB server: TUNA_TEST_MARIADB_URL, else one that is started for these tests."""
    given = os.environ.get("TUNA_TEST_MARIADB_URL")
    if given:
        yield given
        return
    need(find("mariadb-install-db"), "MariaDB (apt-get install mariadb-server)")
    with mariadb_server("--innodb-buffer-pool-size=64M") as url:
        yield url


@pytest.fixture(params=["sqlite", "mariadb"])
def empty_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    """An engine on an empty database, on both kinds in turn."""
    if request.param == "sqlite":
        engine = make_engine(f"sqlite:///{tmp_path}/test.sqlite")
        yield engine
        engine.dispose()
        return
    base = sa.make_url(request.getfixturevalue("mariadb_url"))
    name = f"tuna_{uuid.uuid4().hex[:12]}"
    server = make_engine(base.render_as_string(hide_password=False))
    with server.begin() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine = make_engine(base.set(database=name).render_as_string(hide_password=False))
    yield engine
    engine.dispose()
    with server.begin() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name}"))
    server.dispose()


@pytest.fixture()
def engine(empty_engine: sa.Engine) -> sa.Engine:
    """An engine on a database with the current schema."""
    schema.upgrade(empty_engine)
    return empty_engine


@pytest.fixture(scope="session")
def _redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.acquire()
    yield server
    server.release()


@pytest.fixture()
def redis_client(_redis_server: EmbeddedRedis) -> redis.Redis:
    """A client of an empty Redis."""
    client = redis.Redis(unix_socket_path=str(_redis_server.socket))
    client.flushall()
    return client


@pytest.fixture()
def tuna_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty TUNA_HOME and no other setting."""
    for name in [name for name in os.environ if name.startswith(("TUNA_", "CELERY_")) and "TEST" not in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TUNA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TUNA_SIMULATED", "1")  # the library noop
    get_settings.cache_clear()
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    get_settings.cache_clear()


@pytest.fixture()
def home(tuna_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TUNA_HOME, and the folder above it as the current one."""
    monkeypatch.chdir(tmp_path)
    return tuna_home


@pytest.fixture()
def type_in(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`type_in("tuna", "status")` or `type_in("go_fish", "noop", "--init_session", ...)`, in this process."""

    def run(program: str, *words: object) -> Ended:
        capsys.readouterr()
        code = guarded(PROGRAMS[program], [str(word) for word in words], name=program)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture()
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`rocm(num_cu=120, options={...})`: a ROCm tree with the double of fin, which the settings then name.

    It bears no mark, so that its results are taken for real ones, unless `marked=True`.
    """

    def make(**facts: Any) -> Path:
        for name, value in install(tmp_path / "rocm", **{"marked": False, **facts}).items():
            monkeypatch.setenv(name, value)
        get_settings.cache_clear()
        visible_gpu.cache_clear()
        return tmp_path / "rocm"

    yield make
    get_settings.cache_clear()
    visible_gpu.cache_clear()


@pytest.fixture()
def eventually() -> Callable[[Callable[[], object], float], None]:
    """`eventually(condition, seconds)`: poll until it holds."""
    return wait_until
