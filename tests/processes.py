"""Coordinators and workers as programs of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
from fork_server import ForkServer, forking
from private_servers import listens, wait_until

from tuna.queue.connection import release_services
from tuna.services.embedded_redis import socket_path
from tuna.settings import get_settings


class Processes:
    """Coordinator and workers as programs of their own, as a person starts them."""

    def __init__(self, home: Path, server: ForkServer | None) -> None:
        self._home = home
        self._server = server
        self._all: list[psutil.Process] = []

    def start(self, *words: str, forked: bool = True) -> psutil.Popen:
        """Start `python -m WORDS`; unless `forked`, its command line and variables can be read in
        /proc."""
        with forking(self._server if forked else None), open(self._home / "log", "ab") as log:
            process = psutil.Popen(
                [sys.executable, "-m", *words], stdout=log, stderr=log, start_new_session=True
            )
        self._all.append(process)
        return process

    def coordinator(self) -> psutil.Popen:
        return self.start("tuna", "enqueue", "--session-id", "1")

    def worker(self, queue: str) -> psutil.Popen:
        return self.start(
            "celery",
            "-A",
            "tuna.celery_app",
            "worker",
            "-Q",
            queue,
            "-c",
            "1",
            "-n",
            f"{os.urandom(4).hex()}@x",
        )

    def kill(self, process: psutil.Popen) -> None:
        """kill -9 of the process alone; what it leaves must end by itself."""
        process.send_signal(signal.SIGKILL)
        process.wait()

    def kill_all(self) -> None:
        for process in self._all:
            if process.is_running():
                for child in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                        child.kill()
            process.wait()


def below(process: psutil.Process) -> list[psutil.Process]:
    """What it started, without the embedded Redis and its guard, which stay as long as another
    process uses them."""
    found = []
    for one in process.children(recursive=True):
        # it has ended, though nobody may have reaped it yet
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("redis-server" in word for word in one.cmdline()):
                found.append(one)
    return found


def stop_redis() -> None:
    """Wait for the end of the embedded Redis, which ends with its last user: a killed one takes its
    time."""
    settings = get_settings()
    release_services(settings)
    wait_until(lambda: not listens(str(socket_path(settings.run_dir))), 120, "end of Redis")
