"""The client of a master: joins it over the network, and runs workers on this machine."""

from __future__ import annotations

from collections.abc import Callable

from tuna.api.workers import create_client_token
from tuna.errors import BadInput
from tuna.gateway.master_client import MasterClient, MeasuringPlace
from tuna.gateway.ports import open_gateways
from tuna.settings import get_settings

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
    place = MeasuringPlace.parse(target, device, runner_port)
    client = MasterClient(server, place, get_settings(), say)
    client.connect()
    return client.serve(client.join(line or _own_token(server)))


def _own_token(server: str) -> str:
    """A token of this home, if a gateway of it listens on the port of `server`; raises BadInput.

    The token's pin keeps it from any other server there.
    """
    port = server.rpartition(":")[2]
    if not any(port == str(one) for _, one in open_gateways(get_settings().run_dir)):
        raise BadInput(
            f"The master at {server} lets a client join with a token alone.",
            hint=(
                "type there: `tuna token create --role client`, and give its line here in"
                " TUNA_JOIN, or with --token"
            ),
        )
    return create_client_token(_OWN_TOKEN_S, f"https://{server}")
