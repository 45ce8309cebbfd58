"""Gateways, where remote workers join, their tokens, and joining: a gateway as a worker, a master
as its client."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Literal

from tuna.api import Role, get_settings, require_packages_of_server
from tuna.api.rows import access_tokens, open_database, reading, writing
from tuna.api.workers import array_index, board_settings
from tuna.errors import BadInput, ServiceError
from tuna.libraries.boards import WorkerBoards
from tuna.sandbox import discovery
from tuna.services.ports import announced_urls
from tuna.workers.serve import check_options
from tuna.workers.served_queues import ServedQueues, Unavailable
from tuna_remote.gateway import https_client, joined, tokens
from tuna_remote.gateway.master_client import MasterClient, MeasuringPlace
from tuna_remote.gateway.ports import GATEWAY
from tuna_remote.gateway.protocol import MAX_PROCESSES
from tuna_remote.gateway.tokens import JoinToken, client_line

#: Expiry of a token that a client of this home makes for itself.
_OWN_TOKEN_S = 600.0


@contextlib.contextmanager
def listening(host: str, port: int, option: str = "--port") -> Iterator[str]:
    """Let remote workers join at HOST:PORT while the block runs; yields the gateway's URL.

    It is a process of its own, which ends with this one, however that ends. Raises BadInput, before
    anything is written, for an address that is not usable or in use; its hint names the option.
    """
    require_packages_of_server()
    from tuna_remote.gateway.process import gateway_process

    with gateway_process(host, port, option) as url:
        yield url


def gateway(host: str, port: int, on_start: Callable[[str], None] = lambda _: None) -> None:
    """Serve remote workers in the main thread until a signal comes; `on_start` is called with the
    URL. Raises what `listening` does."""
    require_packages_of_server()
    from tuna_remote.gateway.process import run_gateway

    run_gateway(host, port, on_start)


def create_token(
    role: Literal["compile", "eval", "client"], ttl_s: float, url: str | None = None
) -> str:
    """Make a token, and return the one line that `tuna worker --join` takes; pass it on as you
    would a password. For a client, as `tuna rpc-client --token` takes it, there are two tokens in
    the line: it compiles and measures.

    `url`: how workers reach a gateway of this database; default: that of this TUNA_HOME. Raises
    BadInput if there is none.
    """
    if role == "client":
        return client_line(*(_new_token(one, ttl_s, url) for one in ("compile", "eval")))
    return _new_token(role, ttl_s, url).line()


def _new_token(role: Role, ttl_s: float, url: str | None) -> JoinToken:
    urls = _own_urls() if url is None else [url]
    if not urls:
        raise BadInput(
            "No gateway of this TUNA_HOME listens.",
            hint="start one: `tuna gateway`, or name one of the same database with --url",
        )
    engine = open_database()
    with reading(engine) as connection:
        pin = tokens.pin_of_secret(joined.tls_secret(connection))
    token = JoinToken.new(tokens.Gateway.parse_url(urls[0], pin))
    with writing(engine) as connection:
        access_tokens.add(connection, token.id, token.secret, role, ttl_s)
    return token


def _own_urls() -> list[str]:
    """The URLs of the gateways of this TUNA_HOME that listen."""
    return announced_urls(get_settings().run_dir, GATEWAY)


def join(
    role: Role,
    line: str,
    processes: int = 1,
    *,
    devices: str | None = None,
    boards: WorkerBoards | None = None,
) -> None:
    """Become a remote worker with the token of `line`; its settings go into this process's
    environment, for its workers.

    `processes`, `devices`, `boards`: as for `serve_workers`; what it would refuse is refused before
    the token is spent.
    """
    token = JoinToken.parse(line)
    variables = board_settings(role, boards) if boards else {}
    check_options(role, processes, devices, bool(boards))
    if devices is not None:
        processes = len(discovery.choose(discovery.discover(), devices))
    os.environ.update(variables)  # what is measured is the board's, not this machine's
    get_settings.cache_clear()
    served = ServedQueues()
    queue_of = served.under(role)
    queues = [queue for queue in queue_of.values() if isinstance(queue, str)]
    if boards and not queues:
        reasons = " ".join(q.reason for q in queue_of.values() if isinstance(q, Unavailable))
        raise ServiceError(f"This worker has no board to join with. {reasons}")
    names = tuple(queue.partition(".")[2] for queue in queues)
    facts = https_client.facts_of(
        host="-".join(filter(None, (socket.gethostname(), array_index()))),
        device=served.device_name(queues),
        environments=names if role == "eval" else (),
        toolchains=names if role == "compile" else (),
        processes=min(processes, MAX_PROCESSES),
    )
    credentials = https_client.join(token, role, facts)
    os.environ["TUNA_GATEWAY"] = credentials.text()
    os.environ["TUNA_WORKER_NAME"] = credentials.name
    get_settings.cache_clear()


def rpc_client(
    server: str,
    target: str,
    device: str | None = None,
    runner_port: int | None = None,
    line: str | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Join the master at `server` (HOST:PORT) and run workers here until a signal comes; returns
    the exit code.

    They compile, and measure for `target`: here, or on a board with the key `device` at the TVM
    tracker on `runner_port` of this machine. `line`: what `create_token` gave; needless for a
    master of this home. Needs the main thread. Raises BadInput, LibraryMissing, ServiceError.
    """
    place = MeasuringPlace.parse(target, device, runner_port)
    client = MasterClient(server, place, get_settings(), say)
    client.connect()
    return client.serve(client.join(line or _own_token(server)))


def _own_token(server: str) -> str:
    """A token of this home, if a gateway of it listens on the port of `server`; raises BadInput.

    The token's pin keeps it from any other server there.
    """
    port = server.rpartition(":")[2]
    if not any(url.endswith(f":{port}") for url in _own_urls()):
        raise BadInput(
            f"The master at {server} lets a client join with a token alone.",
            hint=(
                "type there: `tuna token create --role client`, and give its line here in"
                " TUNA_JOIN, or with --token"
            ),
        )
    return create_token("client", _OWN_TOKEN_S, f"https://{server}")
