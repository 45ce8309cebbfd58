"""Gateways: where remote workers join, and how many there are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput, TunaError
from tuna.gateway.ports import gateway_url, open_gateways
from tuna.messages import install_extra
from tuna.reports.status import live_workers
from tuna.settings import get_settings
from tuna.vocabulary import queue_name

#: Default port of `tuna gateway`.
GATEWAY_PORT = 7117


def require_server() -> None:
    """Raise TunaError where the packages of a gateway are not installed."""
    if not (find_spec("uvicorn") and find_spec("starlette")):
        raise TunaError("A gateway needs Starlette and uvicorn.", hint=install_extra("serve"))


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[str]:
    """Let remote workers join at HOST:PORT while the block runs; yields the gateway's URL.

    It is a process of its own, which ends with this one, however that ends. Raises BadInput, before
    anything is written, for an address that is not usable or in use.
    """
    require_server()
    from tuna.gateway.listening import gateway_process

    with gateway_process(host, port) as number:
        yield gateway_url(host, number)


def gateway(host: str, port: int, on_start: Callable[[str], None] = lambda _: None) -> None:
    """Serve remote workers in the main thread until a signal comes; `on_start` is called with the
    URL. Raises what `listening` does."""
    require_server()
    from tuna.gateway.listening import run_gateway

    run_gateway(host, port, lambda number: on_start(gateway_url(host, number)))


def own_gateway_url() -> str:
    """The URL of a gateway of this TUNA_HOME that listens; raises BadInput if there is none."""
    found = open_gateways(get_settings().run_dir)
    if not found:
        raise BadInput(
            "No gateway of this TUNA_HOME listens.",
            hint="start one: `tuna gateway`, or name one of the same database with --url",
        )
    return gateway_url(*found[0])


def count_workers(session_id: int) -> int:
    """Live worker processes that measure for a session, by their heartbeats; 0 also where Redis
    does not answer."""
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
        environment = sessions.get(connection, session_id).environment
    queue = queue_name(True, environment.toolchain, environment.machine_key)
    return sum(queue in worker.queues for worker in live_workers(get_settings(), namespace) or ())
