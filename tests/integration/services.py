"""Servers that the seeds' commands expect at port 6379, each on a loopback address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from shared_data import need

from tuna.embedded_redis import program

PORT = 6379
_START_S = 60.0


@contextlib.contextmanager
def _server(command: list[str], address: str, env: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection((address, PORT), 1):
                break
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{command[0]} did not start"
            time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def redis_at(address: str) -> Iterator[None]:
    """A Redis without persistence."""
    with _server([program(), "--bind", address, "--port", str(PORT), "--save", "", "--appendonly", "no"], address):
        yield


@contextlib.contextmanager
def rabbitmq_at(address: str, vhost: str, user: str, password: str, folder: Path) -> Iterator[None]:
    """A RabbitMQ that has one virtual host and one user."""
    server = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the one in PATH insists on a user of its own
    need(server.exists(), "RabbitMQ (apt-get install rabbitmq-server)")
    for name in ("data", "log", "home"):
        (folder / name).mkdir(parents=True)
    (folder / "plugins").write_text("[].\n")
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = {address}:{PORT}\ndefault_vhost = {vhost}\ndefault_user = {user}\n"
        f"default_pass = {password}\nloopback_users = none\n"
    )
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "RABBITMQ_NODENAME": f"tuna{os.getpid()}@localhost",
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_DIST_PORT": str(25000 + os.getpid() % 1000),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
    }
    try:
        with _server([str(server)], address, env):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
