"""Tokens on the command line: `tuna token`, and the lines that workers join with."""

from __future__ import annotations

import os
import re
from operator import itemgetter
from pathlib import Path
from typing import Literal, get_args

import click

from tuna import api
from tuna.cli import options
from tuna.cli.console import Column, print_json, print_list, say
from tuna.cli.groups import Group
from tuna.common.files import open_plain
from tuna.errors import BadInput

#: Bytes that are read of a file with a line for each task of an array
_MAX_BYTES = 16 << 20
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group(cls=Group)
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
@click.option("--ttl", help="Time until it expires: 30m, 1h, 2d; default: 1h, of a visitor 30d.")
@click.option(
    "--space",
    metavar="NAME",
    help="With --role submit: instead of requests, the cache of this name, and nothing else.",
)
@click.option(
    "--url",
    help="How workers reach the gateway, or holders of a space's token the service; default: the"
    " one of this TUNA_HOME that runs.",
)
@click.option("--label", default="", help="Name of the visitor, as lists show it.")
@click.option(
    "--count", type=click.IntRange(1, 10_000), default=1, help="Number of tokens, one per worker."
)
def create(
    role: Literal[api.Role, "client", api.VisitorRole],
    ttl: str | None,
    space: str | None,
    url: str | None,
    label: str,
    count: int,
) -> None:
    """Print a new token: a line for a worker that joins (`tuna worker --join`, `tuna rpc-client`),
    for requests to the service, or for programs that share a cache.

    Pass it on as you would a password.
    """
    visits = role in get_args(api.VisitorRole)
    if space is not None and role != "submit":
        raise BadInput("--space is for tokens of the role submit.")
    if (url and visits and space is None) or (label and not visits):
        raise BadInput("--url is for tokens of workers or of a space, --label for visitors.")
    ttl_s = _seconds(ttl or ("30d" if visits else "1h"))
    if space is not None and not url:
        address, runs = api.service_url()
        if not runs:
            text = f"no `tuna serve` of this TUNA_HOME runs: {address} is its default address;"
            say(f"{text} --url gives another one", err=True)
    for _ in range(count):
        if space is not None:
            say(api.create_space_token(space, ttl_s, url, label), wrap=False)
        elif role == "client" or role == "compile" or role == "eval":
            say(api.joining().create_token(role, ttl_s, url))
        else:
            say(api.create_visitor_token(role, ttl_s, label))


def _seconds(ttl: str) -> float:
    found = re.fullmatch("([0-9]{1,6})([smhd])", ttl)
    if not found:
        raise BadInput(f"{ttl!r} is not a length of time.", hint="examples: 30m, 1h, 2d")
    return int(found[1]) * _UNITS[found[2]]


@token.command("list")
@options.as_json
def list_tokens(as_json: bool) -> None:
    """List tokens, without their secrets."""
    documents = [
        {
            **{name: getattr(token, name) for name in ("id", "role", "space", "label", "state")},
            "expires_at": token.expires_at.isoformat(timespec="seconds"),
        }
        for token in api.list_tokens()
    ]
    if as_json:
        print_json(documents)
    else:
        columns: list[Column[dict[str, str]]] = [
            Column(title, itemgetter(name), optional)
            for title, name, optional in (
                ("id", "id", 0),
                ("role", "role", 0),
                ("space", "space", 2),
                ("for", "label", 3),
                ("state", "state", 0),
                ("expires", "expires_at", 1),
            )
        ]
        print_list(columns, documents, "No token yet. Make one: `tuna token create --role ROLE`")


@token.command("revoke")
@click.argument("token_id", metavar="ID")
def revoke_token(token_id: str) -> None:
    """Revoke a token; a visitor is refused at once. A worker that joined with it stays: `tuna
    workers revoke` revokes that."""
    api.revoke_token(token_id)
    say(f"token {token_id} revoked")


def join_line(given: str | None) -> str | None:
    """The token line of `--join` or TUNA_JOIN: itself, or that of the file that it names; of
    several lines the one that a task of an array has, whose number counts from 0."""
    # out of the environment, so that no child process sees it
    line = given or os.environ.pop("TUNA_JOIN", None)
    if line and "#" not in line:
        try:
            with open_plain(Path(line), pipes=True) as file:
                line = file.read(_MAX_BYTES).decode().strip()
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
        task = f"none for task {index}" if index else "this is not a task of an array job"
        raise BadInput(
            f"There are {len(lines)} lines of tokens, and {task}.",
            hint="give an array job as many lines as it has tasks (numbers from 0), or others one",
        )
    return lines[int(index)]
