"""Commands about who comes from elsewhere: gateway, token, workers, rpc-client."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json, print_table, say
from tuna.errors import BadInput

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.command()
@click.option(
    "--listen", "host", default="127.0.0.1", show_default=True, help="Address to listen on."
)
@click.option("--port", type=click.IntRange(0, 65535), default=api.GATEWAY_PORT, show_default=True)
def gateway(host: str, port: int) -> None:
    """Let workers on other machines join this database over HTTPS, until Ctrl-C.

    Any number of gateways may serve one database.
    """
    api.gateway(host, port, lambda url: say(f"gateway: {url}"))


@click.group()
def token() -> None:
    """Tokens: of workers, each of which lets one join once, and of visitors of the service."""


@token.command()
@click.option(
    "--role",
    type=click.Choice(["compile", "eval", "client", *get_args(api.VisitorRole)]),
    required=True,
    help="compile, eval: a worker; client: both, for one `tuna rpc-client`; the others: a visitor"
    " of `tuna serve`, who asks for layers and models, sees everything, or changes everything.",
)
@click.option("--ttl", help="How long it can be used: 30m, 1h, 2d; default: 1h, of a visitor 30d.")
@click.option(
    "--space",
    metavar="NAME",
    help="With --role submit: instead of requests, the cache of this name, and nothing else.",
)
@click.option(
    "--url",
    help="How workers reach the gateway (default: the one of this TUNA_HOME), or holders of a"
    " space's token the service (default: http://127.0.0.1:8080).",
)
@click.option("--label", default="", help="Whom a visitor's is for, as lists show it.")
@click.option(
    "--count", type=click.IntRange(1, 10_000), default=1, help="How many, for an array of workers."
)
def create(
    role: Literal[api.Role, "client", api.VisitorRole],
    ttl: str | None,
    space: str | None,
    url: str | None,
    label: str,
    count: int,
) -> None:
    """Print a new token: one line for `tuna worker --join`, for `tuna rpc-client`, for requests to
    the service, or for programs that share a cache. Pass it on as you would a password."""
    visits = role in get_args(api.VisitorRole)
    if space is not None and role != "submit":
        raise BadInput("--space is for tokens of the role submit.")
    if (url and visits and space is None) or (label and not visits):
        raise BadInput("--url is for tokens of workers or of a space, --label for visitors.")
    ttl_s = _seconds(ttl or ("30d" if visits else "1h"))
    for _ in range(count):
        if space is not None:
            say(api.create_space_token(space, ttl_s, url, label), wrap=False)
        elif role == "client":
            say(api.create_client_token(ttl_s, url))
        elif role == "compile" or role == "eval":
            say(api.create_token(role, ttl_s, url))
        else:
            say(api.create_visitor_token(role, ttl_s, label))


def _seconds(ttl: str) -> float:
    found = re.fullmatch("([0-9]{1,6})([smhd])", ttl)
    if not found:
        raise BadInput(f"{ttl!r} is no length of time.", hint="examples: 30m, 1h, 2d")
    return int(found[1]) * _UNITS[found[2]]


@token.command("list")
@options.as_json
def list_tokens(as_json: bool) -> None:
    """List tokens, without their secrets."""
    documents = [
        {
            **{name: getattr(one, name) for name in ("id", "role", "space", "label", "state")},
            "expires_at": one.expires_at.isoformat(timespec="seconds"),
        }
        for one in api.list_tokens()
    ]
    if as_json:
        print_json(documents)
    else:
        rows = [tuple(document.values()) for document in documents]
        print_table(("id", "role", "space", "for", "state", "expires"), rows)


@token.command("revoke")
@click.argument("token_id", metavar="ID")
def revoke_token(token_id: str) -> None:
    """Revoke a token; a visitor is refused at once. A worker that joined with it stays: `tuna
    workers revoke` revokes that."""
    api.revoke_token(token_id)
    say(f"token {token_id} revoked")


@click.group(invoke_without_command=True)
@options.as_json
@click.pass_context
def workers(context: click.Context, as_json: bool) -> None:
    """List live workers, and remote ones; cordon, drain or revoke one."""
    if context.invoked_subcommand is not None:
        return
    found = api.list_workers()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one.name,
            one.role,
            one.state,
            one.device,
            one.environment or ", ".join(one.toolchains),
            ", ".join(map(str, one.jobs[:3])) + (" ..." if len(one.jobs) > 3 else ""),
            "-" if one.per_minute is None else f"{one.per_minute:.1f}",
            f"{one.silent_s:.0f}",
        )
        for one in found
    ]
    columns = (
        "worker",
        "role",
        "state",
        "device",
        "environment",
        "current jobs",
        "items/min",
        "silent s",
    )
    print_table(columns, rows, right=(6, 7))
    show.aside({one.name: one.aside for one in found if one.aside})


@workers.command()
@click.argument("name")
def cordon(name: str) -> None:
    """Let a worker finish what it has and take nothing new."""
    say(f"{api.set_worker_state(name, 'cordoned')}: cordoned")


@workers.command()
@click.argument("name")
def uncordon(name: str) -> None:
    """Let a cordoned worker take work again."""
    say(f"{api.set_worker_state(name, 'active')}: active")


@workers.command()
@click.argument("name")
def drain(name: str) -> None:
    """Let a worker finish what it has and leave."""
    say(f"{api.set_worker_state(name, 'draining')}: draining")


@workers.command()
@click.argument("name")
def revoke(name: str) -> None:
    """Revoke a remote worker for good: its credentials end now, and its current jobs are
    repeated."""
    say(f"{api.set_worker_state(name, 'revoked')}: revoked")


def join_line(given: str | None) -> str | None:
    """The token line of `--join` or TUNA_JOIN: itself, or that of the file that it names; of
    several lines the one that a task of an array has, whose number counts from 0."""
    # out of the environment, so that no child process sees it
    line = given or os.environ.pop("TUNA_JOIN", None)
    if line and "#" not in line:
        try:
            line = Path(line).read_text().strip()
        except (OSError, ValueError):
            raise BadInput(
                f"{line[:200]} is neither a line of a token nor a file that holds one.",
                hint="make one where the database is: `tuna token create --role ROLE`",
            ) from None
    lines = line.split() if line else []
    if len(lines) < 2:
        return line
    index = api.array_index()
    if not index.isdecimal() or int(index) >= len(lines):
        task = f"none for task {index}" if index else "this is no task of an array job"
        raise BadInput(
            f"There are {len(lines)} lines of tokens, and {task}.",
            hint="give an array job as many lines as it has tasks (numbers from 0), or others one",
        )
    return lines[int(index)]


@dataclass(frozen=True)
class _Client:
    """A master, and the place to measure for it."""

    server: str = options.option(
        "The master that `tuna tune-rpc` started.", required=True, metavar="HOST:PORT"
    )
    target: str = options.option("The master's target, as text or JSON.", required=True)
    device: str | None = options.option(
        "Measure on a board with this key; default: on this machine.", metavar="KEY"
    )
    runner_port: int | None = options.option(
        "Port of the board's TVM tracker on this machine.",
        type=click.IntRange(1, 65535),
        metavar="PORT",
    )
    line: str | None = options.option(
        "What the master's `tuna token create --role client` printed, or a file of it.",
        "--token",
        metavar="URL#TOKENS",
    )


@click.command()
@options.collected(_Client)
def rpc_client(wanted: _Client) -> int:
    """Join a master and work for it until Ctrl-C: compile, and measure here or on a board.

    The token is that of --token or TUNA_JOIN; a client of the master's own user on its machine
    needs none.
    """
    given = asdict(wanted) | {"line": join_line(wanted.line)}
    return api.rpc_client(**given, say=lambda text: say(f"INFO {text}"))
