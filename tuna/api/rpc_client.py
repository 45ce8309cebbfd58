"""The client of a master: joins it over the network, and runs workers on this machine."""

from __future__ import annotations

from collections.abc import Callable

from tuna.api.workers import create_client_token
from tuna.errors import BadInput
from tuna.libraries.tvm.rpc import Tracker
from tuna.membership.tcp_port import open_ports
from tuna.queue.connection import release_services, uses_embedded
from tuna.settings import get_settings
from tuna.workers.rpc_client import Client, Runner, own_master

#: Expiry of a token that a client of this home makes for itself.
_OWN_TOKEN_S = 600.0


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
    tracker on `runner_port` of this machine. `line`: what `create_client_token` gave; needless for
    a master of this home. Needs the main thread. Raises BadInput, LibraryMissing, ServiceError.
    """
    client = Client(server, Runner.parse(target, device, runner_port), get_settings(), say)
    client.connect()
    return client.serve(client.join(line) if line else client.join(*_own_token(server)))


def _own_token(server: str) -> tuple[str, Tracker]:
    """A token of this home, if its master is the one at `server`, and the address of that; raises
    BadInput."""
    settings = get_settings()
    master = own_master(server, open_ports(settings.run_dir)) if uses_embedded(settings) else None
    if master is None:
        raise BadInput(
            f"The master at {server} lets a client join with a token alone.",
            hint=(
                "type there: `tuna token create --role client`, and give its line here in"
                " TUNA_JOIN, or with --token"
            ),
        )
    try:
        return create_client_token(_OWN_TOKEN_S), master
    finally:
        release_services(settings)  # the master's alone: a client joins over TCP
