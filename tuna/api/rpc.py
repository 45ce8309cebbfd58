"""Masters over the network: the port of the embedded Redis, and the workers that are there."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna.membership.tcp_port import open_port, open_ports
from tuna.queue.connection import embedded, uses_embedded
from tuna.reports.status import live_workers
from tuna.settings import get_settings
from tuna.vocabulary import queue_name


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[str]:
    """Let workers that join with a token reach the embedded Redis at HOST:PORT while the block
    runs; yields its URL for tokens.

    Several processes of one TUNA_HOME may have a port each. The port ends with this process,
    however that ends. Raises BadInput, before anything is written, for an address that is not
    usable or in use, and where TUNA_BROKER_URL is set.
    """
    settings = get_settings()
    if not uses_embedded(settings):
        raise BadInput(
            "TUNA_BROKER_URL is set: workers join at that Redis, and no other port is opened.",
            hint="unset it, or use `tuna enqueue` and `tuna worker ROLE --join LINE`",
        )
    with open_port(embedded(settings), host, port) as number:
        yield _url(host, number)


def master_url() -> str:
    """The URL of an open port of this home's embedded Redis; raises BadInput if there is none."""
    found = open_ports(get_settings().run_dir)
    if not found:
        raise BadInput(
            "Workers join over the network, and the embedded Redis is on this machine only.",
            hint=(
                "set TUNA_BROKER_URL, or start a master with `tuna tune-rpc`, which listens on a"
                " port"
            ),
        )
    return _url(*found[0])


def _url(host: str, port: int) -> str:
    """How others reach a port that is listened on; one on all addresses by this machine's name."""
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.getfqdn()
    return f"redis://[{host}]:{port}/0" if ":" in host else f"redis://{host}:{port}/0"


def count_workers(session_id: int) -> int:
    """Live worker processes that measure for a session, by their heartbeats; 0 also where Redis
    does not answer."""
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
        environment = sessions.get(connection, session_id).environment
    queue = queue_name(True, environment.toolchain, environment.machine_key)
    return sum(queue in worker.queues for worker in live_workers(get_settings(), namespace) or ())
