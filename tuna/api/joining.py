"""Gateways, where remote workers join, their tokens, and joining a master as its client."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlsplit

from tuna.db import access_tokens, sessions
from tuna.db.access_tokens import AccessToken
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.errors import BadInput, TunaError
from tuna.gateway import joined, tokens
from tuna.gateway.master_client import MasterClient, MeasuringPlace
from tuna.gateway.ports import gateway_url, open_gateways
from tuna.gateway.tokens import JoinToken, client_line
from tuna.messages import install_extra
from tuna.settings import get_settings

Role = Literal["compile", "eval"]
VisitorRole = Literal["submit", "read", "admin"]
#: Expiry of a token that a client of this home makes for itself.
_OWN_TOKEN_S = 600.0
_SERVICE_URL = "http://127.0.0.1:8080"


def require_packages_of_server() -> None:
    """Raise TunaError where the packages of a gateway are not installed."""
    if not (find_spec("uvicorn") and find_spec("starlette")):
        raise TunaError("A gateway needs Starlette and uvicorn.", hint=install_extra("serve"))


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[str]:
    """Let remote workers join at HOST:PORT while the block runs; yields the gateway's URL.

    It is a process of its own, which ends with this one, however that ends. Raises BadInput, before
    anything is written, for an address that is not usable or in use.
    """
    require_packages_of_server()
    from tuna.gateway.listening import gateway_process

    with gateway_process(host, port) as number:
        yield gateway_url(host, number)


def gateway(host: str, port: int, on_start: Callable[[str], None] = lambda _: None) -> None:
    """Serve remote workers in the main thread until a signal comes; `on_start` is called with the
    URL. Raises what `listening` does."""
    require_packages_of_server()
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


def create_token(role: Role, ttl_s: float, url: str | None = None) -> str:
    """Make a token, and return the one line that `tuna worker --join` takes; pass it on as you
    would a password.

    `url`: how workers reach a gateway of this database; default: that of this TUNA_HOME. Raises
    BadInput if there is none.
    """
    return _new_token(role, ttl_s, url).line()


def create_client_token(ttl_s: float, url: str | None = None) -> str:
    """Make two tokens in one line, as `tuna rpc-client --token` takes it: a client compiles and
    measures. Else like `create_token`."""
    return client_line(*(_new_token(role, ttl_s, url) for role in ("compile", "eval")))


def _new_token(role: Role, ttl_s: float, url: str | None) -> JoinToken:
    address = url or own_gateway_url()
    engine = open_database()
    with reading(engine) as connection:
        pin = tokens.pin_of_secret(joined.tls_secret(connection))
    token = tokens.JoinToken.new(tokens.Gateway.parse_url(address, pin))
    with writing(engine) as connection:
        access_tokens.add(connection, token.id, token.secret, role, ttl_s)
    return token


def create_visitor_token(role: VisitorRole, ttl_s: float, label: str = "") -> str:
    """Make a token for the service, and return it: `ID.SECRET`; pass it on as you would a
    password."""
    token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(24)
    with writing(open_database()) as connection:
        access_tokens.add(connection, token_id, secret, role, ttl_s, label)
    return f"{token_id}.{secret}"


def create_space_token(space: str, ttl_s: float, url: str | None = None, label: str = "") -> str:
    """Make a token for a space of the cache, and return the line for its holders: the address of
    the space, the token, and the key that verifies what comes from there.

    `url`: how holders reach the service; default: where `tuna serve` listens by default.
    """
    address = urlsplit(url or _SERVICE_URL)
    if address.scheme not in ("http", "https") or not address.hostname or address.path.strip("/"):
        raise BadInput(
            f"{(url or '')[:200]!r} is not the URL of a service.",
            hint="as https://tuna.example.org",
        )
    access_tokens.check_space(space)
    engine, token_id, secret = open_database(), secrets.token_hex(6), secrets.token_urlsafe(24)
    with writing(engine) as connection:
        access_tokens.add(connection, token_id, secret, "submit", ttl_s, label, space)
        public = sessions.artifact_keys(connection, get_settings()).public[0]
    base = f"{address.scheme}://{address.netloc}/v1/cache/{space}"
    return f"{base}#{token_id}.{secret}.{public}"


def list_tokens() -> Sequence[AccessToken]:
    """All tokens, newest first."""
    with reading(open_database()) as connection:
        return access_tokens.list_all(connection)


def revoke_token(token_id: str) -> None:
    """Revoke a token: a worker that joined with it stays, a visitor of the service is refused from
    two seconds later on. Raises NotFound."""
    with writing(open_database()) as connection:
        access_tokens.revoke(connection, token_id)


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
