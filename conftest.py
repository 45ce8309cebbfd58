"""Fixtures that talk to services: both databases, a Redis, a TUNA_HOME of one's own with command
lines in it."""

from __future__ import annotations

import os
import sys

# Hundreds of processes import Tuna and its tests; without bytecode each compiles them first.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import gc
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis
import sqlalchemy as sa
import structlog
from command_lines import PROGRAMS, Ended
from databases import MariadbDatabase, SqliteTemplate, share_compiled_statements
from durations import Durations
from fin_double.rocm import install
from fork_server import (
    CHILD,
    PROGRAM_MODULES,
    TVM_MODULES,
    ForkServer,
    fork_server,
    forking,
)
from left_behind import LeftBehind
from markers import ServiceGuard, add_markers, parameters
from private_servers import mariadb_server, wait_until
from shared_data import DRILLS, need, needed_program

from tuna.cli.main import guarded
from tuna.cli.seeds import respell
from tuna.db.engine import make_engine
from tuna.libraries.miopen.environment import visible_gpu
from tuna.queue.connection import release_services
from tuna.services.embedded_redis import EmbeddedRedis
from tuna.settings import Settings, get_settings

os.environ["TUNA_SIMULATED"] = "1"  # the library noop
# threads of oneDNN that wait for each other leave the cores to other tests
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
share_compiled_statements()
# structlog's default renders a traceback with all local variables, which takes a second.
structlog.configure(
    processors=[structlog.processors.format_exc_info, structlog.dev.ConsoleRenderer(colors=False)]
)
#: A server that never waits for the disk; what it says of its durability (`tuna doctor`) stays as
#: it is by default.
MARIADB_OPTIONS = (
    "--innodb-buffer-pool-size=64M",
    "--innodb-flush-method=nosync",
    "--sync-frm=0",
    "--innodb-stats-persistent=0",
)

# A suite in the background of a script or under `nohup` ignores these, as would what it starts.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        _own = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, _own)


# The machine may be busy with other things: an example that takes long is no failure.
hypothesis.settings.register_profile("tuna", deadline=None, max_examples=25 if DRILLS == 1 else 200)
hypothesis.settings.load_profile("tuna")

TESTS = Path(__file__).parent / "tests"
#: On PYTHONPATH: kernels are timed for a short time.
QUICK_SITE = str(TESTS / "quick_site")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write how long each file took into tests/durations.json, by which they are ordered",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks; what is for drills is left out of the short suite."""

    def for_drills(item: pytest.Item) -> bool:
        only = any(mark.kwargs.get("only") for mark in item.iter_markers("drill"))
        on_sqlite = item.get_closest_marker("both_databases_in_drills") is not None
        return only or (on_sqlite and "mariadb" in parameters(item))

    if DRILLS == 1:
        left_out = {item for item in items if for_drills(item)}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items if config.option.markexpr else ():  # else asked for where a server starts
        add_markers(item)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected, which stays
    # A folder of its own for temporary files, where Tuna's device locks lie too: tests that run at
    # the same time need not wait for each other's measurements, whose figures no test looks at.
    # pytest's own folders stay where they are.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tuna-tests-")
    os.environ.pop("XDG_RUNTIME_DIR", None)
    config.pluginmanager.register(ServiceGuard())
    config.pluginmanager.register(Durations(config.getoption("--record-durations")))
    if Path("/proc/self/environ").exists():
        config.pluginmanager.register(LeftBehind(config))


def pytest_collection_finish() -> None:
    gc.freeze()  # each full collection would look at a million objects of modules and tests
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.collect()
    gc.freeze()  # pytest collects five times at its end


def pytest_unconfigure() -> None:
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """Base URL of a MariaDB server: TUNA_TEST_MARIADB_URL, else one that is started for these
    tests."""
    given = os.environ.get("TUNA_TEST_MARIADB_URL")
    if given:
        yield given
        return
    needed_program("mariadb-install-db")
    with mariadb_server(*MARIADB_OPTIONS) as url:
        yield url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> SqliteTemplate:
    """A SQLite file with the current schema, to be copied."""
    return SqliteTemplate(tmp_path_factory.mktemp("template") / "tuna.sqlite")


@pytest.fixture(scope="session")
def _mariadb_database(mariadb_url: str) -> Iterator[MariadbDatabase]:
    database = MariadbDatabase(mariadb_url)
    yield database
    database.drop()


@pytest.fixture()
def mariadb_engine(_mariadb_database: MariadbDatabase) -> Iterator[sa.Engine]:
    """An engine on a MariaDB database with the current schema, the same one for all tests, emptied
    before each."""
    engine = make_engine(_mariadb_database.renew())
    yield engine
    engine.dispose()


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


@pytest.fixture(params=["sqlite", "mariadb"])
def engine(request: pytest.FixtureRequest) -> sa.Engine:
    """An engine on a database with the current schema and no rows, on both kinds in turn."""
    found: sa.Engine = request.getfixturevalue(f"{request.param}_engine")
    return found


@pytest.fixture()
def sqlite_engine(sqlite_template: SqliteTemplate, tmp_path: Path) -> Iterator[sa.Engine]:
    """An engine on a SQLite file with the current schema."""
    engine = sqlite_template.engine(tmp_path / "test.sqlite")
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def _redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.acquire()
    yield server
    server.release()


@pytest.fixture()
def redis_client(_redis_server: EmbeddedRedis) -> redis.Redis:
    """A client of an empty Redis."""
    client = redis.Redis.from_url(_redis_server.url)
    client.flushall()
    return client


@pytest.fixture()
def redis_urls(_redis_server: EmbeddedRedis, redis_client: redis.Redis) -> dict[str, str]:
    """The settings that name the Redis of `redis_client`, with its password."""
    url = _redis_server.url
    return {"TUNA_REDIS_URL": url, "TUNA_BROKER_URL": url.replace("unix:", "redis+socket:", 1)}


@pytest.fixture(scope="session")
def tuna_forks() -> Iterator[ForkServer | None]:
    """Forks of a process that has imported what commands and Celery's workers import; none in
    drills."""
    if DRILLS > 1:
        yield None
        return
    with fork_server(PROGRAM_MODULES) as server:
        yield server


@pytest.fixture(scope="session")
def tvm_forks() -> Iterator[ForkServer | None]:
    """Forks of a process that has imported TVM; none in drills."""
    if DRILLS > 1:
        yield None
        return
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with fork_server(TVM_MODULES, {**one_thread, "PYTHONPATH": QUICK_SITE}) as server:
        yield server


@pytest.fixture(scope="session")
def tvm_here() -> None:
    """Skip without TVM at home, fail without it in CI."""
    if find_spec("tvm") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(
            "TVM is not installed: pip install '.[tvm]'"
        )


@pytest.fixture(scope="module")
def forked_children(tvm_forks: ForkServer | None) -> Iterator[None]:
    """Sandboxed children that have TVM start within milliseconds: for modules that test what they
    do, not their start."""
    with forking(tvm_forks, CHILD):
        yield


@pytest.fixture
def forked(tuna_forks: ForkServer | None) -> Iterator[None]:
    """Processes of Python start within milliseconds: for tests of what they do, not of their
    start."""
    with forking(tuna_forks):
        yield


@pytest.fixture
def quick_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes time kernels for a short time: for tests that do not look at the figures. Not in
    drills."""
    if DRILLS == 1:
        monkeypatch.setenv("PYTHONPATH", QUICK_SITE, prepend=os.pathsep)


@pytest.fixture(scope="session")
def xgboost_here() -> None:
    """Skip without xgboost at home, fail without it in CI."""
    need(find_spec("xgboost") is not None, "xgboost (pip install '.[tvm]')")


@pytest.fixture(scope="session")
def knows_machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """`knows_machine(home)`: that TUNA_HOME has what any other's children found out, such as TVM's
    name of the CPU."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "machine"
    shared.mkdir(exist_ok=True)

    def share(home: Path) -> None:
        (home / "cache").mkdir(parents=True)
        (home / "cache" / "machine").symlink_to(shared)

    return share


@pytest.fixture(autouse=True)
def fresh_settings() -> Iterator[None]:
    """Forget the settings after each test: the next one may have other variables."""
    yield
    get_settings.cache_clear()


@pytest.fixture()
def tuna_home(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sqlite_template: SqliteTemplate,
    knows_machine: Callable[[Path], None],
) -> Iterator[Path]:
    """A TUNA_HOME with an embedded database that has no sessions yet, and no other setting."""
    for name in [
        name for name in os.environ if name.startswith(("TUNA_", "CELERY_")) and "TEST" not in name
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TUNA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TUNA_SIMULATED", "1")  # the library noop
    get_settings.cache_clear()
    (tmp_path / "home").mkdir(mode=0o700)
    knows_machine(tmp_path / "home")
    sqlite_template.copy_to(tmp_path / "home" / "tuna.sqlite")
    yield tmp_path / "home"
    release_services(Settings.model_construct(home=tmp_path / "home", broker_url=None))
    get_settings.cache_clear()


@pytest.fixture()
def home(tuna_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TUNA_HOME as of `tuna_home`, and the folder above it as the current one."""
    monkeypatch.chdir(tmp_path)
    return tuna_home


@pytest.fixture()
def empty_home(home: Path) -> Path:
    """The same without a database, as before the first command."""
    (home / "tuna.sqlite").unlink()
    shutil.rmtree(home / "cache")
    return home


@pytest.fixture()
def type_in(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """`type_in("tuna", "status")` or `type_in("go_fish", "noop", "--init_session", ...)`, in this
    process."""

    def run(program: str, *words: object) -> Ended:
        capsys.readouterr()
        seeds = {} if program == "tuna" else {"respell": respell}
        code = guarded(PROGRAMS[program], [str(word) for word in words], name=program, **seeds)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """A file with two layers, for command lines to work on."""
    path = tmp_path / "layers.txt"
    path.write_text(
        "# two layers\n"
        "./bin/MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1\n"
        "./bin/MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 16 -y 1 -x 1 -F 1\n"
    )
    return path


@pytest.fixture()
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`rocm(num_cu=120, options={...})`: a ROCm tree with the double of fin, which the settings
    then name.

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
