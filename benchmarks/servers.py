"""Private servers for a benchmark, with the settings that docs/operations.md recommends, and what they cost."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from tuna.embedded_redis import program

_DOCKER = Path(__file__).parent.parent / "docker"
_START_S = 60.0
_SAMPLE_S = 0.2


@contextlib.contextmanager
def home(kind: str) -> Iterator[Path]:
    """A TUNA_HOME of its own and no other setting but the servers: `sqlite` embeds them, `mariadb` starts both."""
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="tuna-bench-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        for variable in [v for v in os.environ if v.startswith(("TUNA_", "CELERY_"))]:
            del os.environ[variable]
        os.environ["TUNA_HOME"] = name
        if kind == "mariadb":
            os.environ["TUNA_DB_URL"] = stack.enter_context(mariadb(Path(name, "m")))
            path = quote(str(stack.enter_context(redis(Path(name, "r")))))
            os.environ |= {"TUNA_BROKER_URL": f"redis+socket://{path}", "TUNA_REDIS_URL": f"unix://{path}"}
        yield Path(name)


@contextlib.contextmanager
def mariadb(folder: Path) -> Iterator[str]:
    """The URL of an empty database `tuna` on a MariaDB with docker/mariadb.cnf: durable commits, binary log."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    server, install = (shutil.which(name, path=path) for name in ("mariadbd", "mariadb-install-db"))
    if server is None or install is None:
        raise SystemExit("MariaDB is not installed: apt-get install mariadb-server")
    folder.mkdir(mode=0o700)
    data, socket = folder / "data", folder / "s.sock"
    user = ["--user=root"] if os.getuid() == 0 else []
    subprocess.run(
        [install, "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal", *user],
        check=True,
        capture_output=True,
    )
    settings = [f"--defaults-file={_DOCKER / 'mariadb.cnf'}", f"--datadir={data}", f"--socket={socket}"]
    with _server([server, *settings, "--skip-networking", *user], socket, folder / "log"):
        client = shutil.which("mariadb", path=path) or "mysql"
        subprocess.run([client, "--no-defaults", f"-S{socket}", "-uroot", "-eCREATE DATABASE tuna"], check=True)
        yield f"mysql+pymysql://root@localhost/tuna?unix_socket={socket}"


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[Path]:
    """The socket of a Redis with docker/redis.conf: append-only file, synced every second."""
    folder.mkdir(mode=0o700)
    socket = folder / "s.sock"
    command = [program(), str(_DOCKER / "redis.conf"), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder)]
    with _server(command, socket, folder / "log"):
        yield socket


@contextlib.contextmanager
def _server(command: list[str], socket: Path, log: Path) -> Iterator[None]:
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not start: {log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def peak_mib() -> float:
    """Peak resident memory of this process, in MiB."""
    # Not getrusage: its peak starts with that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class CpuMeter:
    """CPU seconds (user and system) that this process and all its children spend in a `with` block, servers included.

    The children are looked at now and then, because those that are killed leave no account.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._before: dict[tuple[int, float], float] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuMeter:
        self._look()
        self._before = {key: seconds for key, (_, seconds) in self._seen.items()}
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def seconds(self) -> dict[str, float]:
        """By program: `mariadbd`, `redis-server`, and `python` for everything else."""
        total: dict[str, float] = {}
        for key, (name, seconds) in self._seen.items():
            name = name if name in ("mariadbd", "redis-server") else "python"
            total[name] = total.get(name, 0.0) + seconds - self._before.get(key, 0.0)
        return total

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._look()

    def _look(self) -> None:
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._seen[process.pid, process.create_time()] = process.name(), times.user + times.system
