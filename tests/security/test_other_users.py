"""Another Unix user of the machine: what it made is not used, what is ours it cannot read or
block."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis
from command_lines import Ended
from settings_changes import change_setting

from tuna.artifacts.copies import ArtifactCache
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.common.files import make_home
from tuna.errors import BadInput
from tuna.sandbox.device_lock import device_lock
from tuna.services.embedded_redis import EmbeddedRedis
from tuna.settings import get_settings
from tuna.workers.worker_process import scratch_folder

#: A user id that nobody has.
OTHER = 54321
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def _lock(path: Path) -> None:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)


def _as_other(act: Callable[[], object]) -> str:
    """What `act` returns, or the name of the error that it raises, in a process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            said = str(act())
        except OSError as error:
            said = type(error).__name__
        except BaseException:
            said = traceback.format_exc()
        os.write(writer, said.encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.fixture()
def shared() -> Iterator[Path]:
    """A folder like /tmp, in which every user may make files."""
    folder = Path(tempfile.mkdtemp(prefix="tuna-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture()
def use_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    def use(place: Path) -> None:
        change_setting(monkeypatch, "TUNA_HOME", str(place))

    return use


COMMANDS = [
    ("status",),
    ("results", "--session-id", 1),
    ("doctor",),
    ("run", "--session-id", 1),
    ("workers",),
    ("worker", "compile"),
]


@as_root
@pytest.mark.parametrize("words", COMMANDS)
def test_a_home_that_another_user_made_is_not_used(
    shared: Path,
    use_home: Callable[[Path], None],
    type_in: Callable[..., object],
    words: tuple[object, ...],
) -> None:
    """What is planted there would run as us."""
    planted = shared / "home"
    assert _as_other(lambda: planted.mkdir(mode=0o755)) == "None"
    use_home(planted)
    ended = type_in("tuna", *words)
    assert ended.code == 2
    assert (
        f"TUNA_HOME, {planted}, belongs to another user.\n  set TUNA_HOME to a folder of your own"
        in ended.err
    )
    assert list(planted.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "mode"),
    [*((words, 0o777) for words in COMMANDS), *((("status",), m) for m in (0o1777, 0o770, 0o702))],
)
def test_a_home_that_others_may_write_to_is_not_used(
    home: Path, type_in: Callable[..., object], words: tuple[object, ...], mode: int
) -> None:
    home.chmod(mode)
    get_settings.cache_clear()
    ended = type_in("tuna", *words)
    assert ended.code == 2
    assert f"Other users may write to TUNA_HOME, {home}." in ended.err
    assert f"then run: chmod 700 {home}" in ended.err
    home.chmod(0o755)
    get_settings.cache_clear()
    assert get_settings().home == home


def test_a_worker_does_not_start_there(home: Path) -> None:
    home.chmod(0o777)
    words = [sys.executable, "-c", "import tuna.celery_app"]  # what `celery -A` does first
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Other users may write to TUNA_HOME" in done.stderr
    assert "Traceback" not in done.stderr


@as_root
def test_a_link_of_another_user_is_no_home(
    shared: Path, home: Path, use_home: Callable[[Path], None]
) -> None:
    """It points to a folder of ours now, and elsewhere as soon as it was looked at."""
    link = shared / "home"
    assert _as_other(lambda: link.symlink_to(home)) == "None"
    use_home(link)
    with pytest.raises(BadInput, match="belongs to another user"):
        get_settings()
    link.unlink()
    link.symlink_to(home)
    use_home(link)
    assert get_settings().home == link


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_home_is_made_for_its_user_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_home(tmp_path / "a" / "home")
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "home").stat().st_mode & 0o777 == 0o700


@as_root
def test_the_embedded_redis_and_the_locks_are_closed_to_others(
    shared: Path, use_home: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(shared))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    use_home(shared / "home")
    server = EmbeddedRedis(get_settings().run_dir)
    server.acquire()
    try:
        with device_lock(["GPU-1"]):
            ours = [
                server.socket,
                shared / "home" / "run" / "redis.lock",
                shared / "home" / "run" / "redis.users",
            ]
            locks = list(shared.glob("tuna-*/device-*.lock"))
            assert locks
            with socket.socket(socket.AF_UNIX) as probe:
                assert _as_other(lambda: probe.connect(str(server.socket))) == "PermissionError"
            for path in [*ours, *locks]:
                assert path.exists()
                assert _as_other(path.read_bytes) == "PermissionError"
                assert _as_other(lambda path=path: _lock(path)) == "PermissionError"
                assert _as_other(path.unlink) == "PermissionError"
            assert _as_other(lambda: (shared / "home").rename(shared / "gone")) == "PermissionError"
            assert _as_other(lambda: list((shared / "home").iterdir())) == "PermissionError"
    finally:
        server.release()


def _open_to_others(folder: Path) -> list[str]:
    """Files below a folder that this process can read, and files and folders that it can write
    to."""
    found = []
    for place, _, names in os.walk(folder):
        found += [place] if os.access(place, os.W_OK) else []
        found += [f"{place}/{name}" for name in names if os.access(f"{place}/{name}", os.R_OK)]
    return found


@as_root
def test_in_a_home_that_others_may_enter_there_is_nothing_to_read(
    shared: Path, use_home: Callable[[Path], None], type_in: Callable[..., Ended]
) -> None:
    """Older versions, and people, made homes with mode 0755; a plain umask then leaves what lies in
    it readable."""
    home = shared / "home"
    home.mkdir()
    before = os.umask(0o022)
    home.chmod(0o755)
    try:
        use_home(home)
        assert type_in("tuna", "init-session", "noop", "-l", "r").code == 0
        settings = get_settings()
        store = Artifacts.from_settings(settings, "n", Keys.of_secret("5" * 64))
        store.prepare()
        store.put(b"code")
        ArtifactCache(home / "cache" / "artifacts", 1 << 20).put("0" * 64, b"code")
        with TemporaryDirectory(dir=scratch_folder(settings.run_dir / "scratch")) as chunk:
            Path(chunk, "kernel.so").write_bytes(b"code")
            files = [path for path in home.rglob("*") if path.is_file()]
            assert {path.relative_to(home).parts[0] for path in files} >= {
                "tuna.sqlite",
                "artifacts",
                "run",
                "cache",
            }
            assert _as_other(lambda: _open_to_others(home)) == "[]"
    finally:
        os.umask(before)


@as_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_for_the_socket_that_another_user_made_is_not_used_and_blocks_nothing(
    shared: Path,
    use_home: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    eventually: Callable[[Callable[[], object], float], None],
) -> None:
    """A long TUNA_HOME has its socket in the folder for temporary files, whose names others see."""
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    home = shared / ("h" * 120)
    make_home(home)
    use_home(home)
    server = EmbeddedRedis(get_settings().run_dir)
    server.acquire()
    place = server.socket.parent
    assert place.parent == shared
    assert place.stat().st_mode & 0o777 == 0o700
    address = str(server.socket)
    with socket.socket(socket.AF_UNIX) as probe:
        assert _as_other(lambda: probe.connect(address)) == "PermissionError"
    server.release()
    eventually(lambda: not place.exists(), 60)
    plant = (
        (lambda: place.mkdir(mode=0o777)) if kind == "folder" else (lambda: place.symlink_to(home))
    )
    assert _as_other(plant) == "None"
    again = EmbeddedRedis(get_settings().run_dir)
    again.acquire()
    assert again.socket.parent not in (place, home)
    with contextlib.closing(redis.Redis.from_url(again.url)) as client:
        assert client.ping()
    assert EmbeddedRedis(get_settings().run_dir).socket == again.socket
    place = again.socket.parent
    again.release()
    eventually(lambda: not place.exists(), 60)
    third = EmbeddedRedis(get_settings().run_dir)
    third.acquire()
    assert third.socket == again.socket, "who knows the address still reaches it"
    third.release()
    eventually(lambda: not place.exists(), 60)


def test_homes_of_batch_jobs_have_names_that_nobody_can_guess() -> None:
    scripts = sorted((Path(__file__).parents[2] / "slurm").glob("*.sbatch"))
    assert len(scripts) == 4
    for script in scripts:
        lines = [line for line in script.read_text().splitlines() if "/tmp" in line]
        assert lines == ['TUNA_HOME="$(mktemp -d "${SLURM_TMPDIR:-/tmp}/tuna-XXXXXXXXXX")"']
