"""Ports that gateways of one TUNA_HOME listen on.

`run/gateway-HOST-PORT` is locked (flock) by the process for life, so that commands of this user
know where a gateway listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import quote, unquote

from tuna.common.files import own_folder

#: Default port of `tuna gateway`.
GATEWAY_PORT = 7117
_PREFIX = "gateway-"


def gateway_url(host: str, port: int) -> str:
    """The address by which others reach a gateway; one on all addresses by this machine's name."""
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.getfqdn()
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def open_gateways(run_dir: Path) -> list[tuple[str, int]]:
    """Host and port of the gateways of this TUNA_HOME that listen now."""
    found = []
    for path in sorted(run_dir.glob(f"{_PREFIX}*")):
        host, _, port = path.name.removeprefix(_PREFIX).rpartition("-")
        with contextlib.suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append((unquote(host), int(port)))
    return found


def claim_file(run_dir: Path, host: str, port: int) -> Path:
    return run_dir / f"{_PREFIX}{quote(host, safe='')}-{port}"


def claim_port(run_dir: Path, host: str, port: int) -> int:
    """Lock the file of a port that this process has; returns its descriptor."""
    own_folder(run_dir)
    file = os.open(claim_file(run_dir, host, port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)  # the port is ours: a process that has it is about to end
    return file
