"""Private servers for a benchmark, with the settings of docker/, and meters for CPU and memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.private_servers import mariadb_server, redis_server
from tuna.errors import ServiceError

_DOCKER = Path(__file__).parent.parent / "docker"
_SAMPLE_S = 0.2


@contextlib.contextmanager
def home(kind: str) -> Iterator[Path]:
    """A private TUNA_HOME with embedded servers (`sqlite`), or MariaDB and Redis (`mariadb`)."""
    # A socket's path must be short.
    with (
        tempfile.TemporaryDirectory(prefix="tuna-bench-", dir="/tmp") as name,
        contextlib.ExitStack() as stack,
    ):
        for variable in [v for v in os.environ if v.startswith(("TUNA_", "CELERY_"))]:
            del os.environ[variable]
        # the library noop, the stand-in for fin
        os.environ |= {"TUNA_HOME": name, "TUNA_SIMULATED": "1"}
        if kind == "mariadb":
            try:
                os.environ["TUNA_DB_URL"] = stack.enter_context(
                    mariadb_server(defaults=_DOCKER / "mariadb.cnf")
                )
            except ServiceError as error:
                raise SystemExit(f"{error} {error.hint or ''}") from None
            url = stack.enter_context(redis_server(str(_DOCKER / "redis.conf")))
            os.environ |= {
                "TUNA_BROKER_URL": url.replace("unix", "redis+socket"),
                "TUNA_REDIS_URL": url,
            }
        yield Path(name)


def peak_mib() -> float:
    """Peak resident memory of this process, in MiB."""
    # Not getrusage: ru_maxrss is inherited from the parent across fork and exec.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class CpuMeter:
    """CPU seconds of this process and its children, servers included, in a `with` block.

    The children are sampled periodically, because times of killed ones cannot be read afterwards.
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
                self._seen[process.pid, process.create_time()] = (
                    process.name(),
                    times.user + times.system,
                )
