"""Commands about who may work: token, workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuna.cli import options
from tuna.cli.console import print_json, print_table
from tuna.errors import BadInput, NotFound, ServiceError

if TYPE_CHECKING:
    from tuna.membership.gate import Gate

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group()
def token() -> None:
    """Tokens, each of which lets one worker join once."""


@token.command()
@click.option("--role", type=click.Choice(["compile", "eval"]), required=True)
@click.option("--ttl", default="1h", show_default=True, help="How long it can be used: 30m, 1h, 2d.")
@click.option("--url", help="How workers reach this Redis; default: as this machine does.")
def create(role: Any, ttl: str, url: str | None) -> None:
    """Print a new token: one line for `tuna worker --join`. Pass it on as you would a password."""
    import redis

    from tuna.membership.join import without_secrets
    from tuna.pipeline.connection import redis_url, uses_embedded
    from tuna.settings import get_settings

    found = re.fullmatch(r"(\d+)([smhd])", ttl)
    if not found:
        raise BadInput(f"{ttl!r} is no length of time.", hint="examples: 30m, 1h, 2d")
    settings = get_settings()
    if uses_embedded(settings):
        raise BadInput(
            "Workers join over the network, and the embedded Redis is on this machine only.", hint="set TUNA_BROKER_URL"
        )
    reached = without_secrets(url or redis_url(settings))
    if not reached.startswith(("redis://", "rediss://")) or not redis_url(settings).startswith(("redis:", "rediss:")):
        raise BadInput("Workers join over redis:// or rediss://.", hint="give their URL with --url")
    try:
        made = _gate().create_token(role, int(found[1]) * _UNITS[found[2]], reached)
    except redis.exceptions.NoPermissionError:
        raise ServiceError("This Redis user may not administer users.", hint="see docs/usage.md, Membership") from None
    click.echo(made.full())


@token.command("list")
@options.as_json
def list_tokens(as_json: bool) -> None:
    """List tokens, without their secrets."""
    from tuna.cli.database import open_database
    from tuna.db.engine import reading
    from tuna.db.types import utc_now
    from tuna.membership import members

    with reading(open_database()) as connection:
        rows = members.tokens(connection)

    def state(row: Any) -> str:
        if row.used_at or row.revoked_at:
            return "used" if row.used_at else "revoked"
        return "open" if row.expires_at > utc_now() else "expired"

    documents = [
        {
            "id": row.id,
            "role": row.role,
            "state": state(row),
            "expires_at": row.expires_at.isoformat(timespec="seconds"),
        }
        for row in rows
    ]
    if as_json:
        print_json(documents)
    else:
        print_table("", ("id", "role", "state", "expires"), [tuple(document.values()) for document in documents])


@token.command("revoke")
@click.argument("token_id", metavar="ID")
def revoke_token(token_id: str) -> None:
    """Make a token useless. A worker that joined with it stays: `tuna workers revoke` puts it out."""
    from tuna.cli.database import open_database
    from tuna.db.engine import writing
    from tuna.membership import members

    with writing(open_database()) as connection:
        members.revoke_token(connection, token_id)
    _gate().reconcile()
    click.echo(f"token {token_id} revoked")


@click.group(invoke_without_command=True)
@options.as_json
@click.pass_context
def workers(context: click.Context, as_json: bool) -> None:
    """List the workers that are there now and those that joined; cordon, drain or revoke one."""
    if context.invoked_subcommand is not None:
        return
    documents = _workers()
    if as_json:
        print_json(documents)
        return
    rows = [
        (
            document["name"],
            document["role"],
            document["state"],
            document["device"],
            document["environment"] or ", ".join(document["toolchains"]),
            ", ".join(map(str, document["jobs"][:3])) + (" ..." if len(document["jobs"]) > 3 else ""),
            "-" if document["per_minute"] is None else f"{document['per_minute']:.1f}",
            "-" if document["silent_s"] is None else f"{document['silent_s']:.0f}",
        )
        for document in documents
    ]
    columns = ("worker", "role", "state", "device", "environment", "jobs in hand", "items/min", "silent s")
    print_table("", columns, rows, right=(6, 7))


def _workers() -> list[dict[str, Any]]:
    """Live processes, and members that none of them belongs to."""
    import time

    from tuna.cli.database import open_database
    from tuna.db import sessions
    from tuna.db.engine import reading
    from tuna.membership import members
    from tuna.membership.gate import control_key
    from tuna.membership.heartbeat import HeartbeatBoard
    from tuna.pipeline.connection import connect, ensure_services
    from tuna.settings import get_settings

    settings = get_settings()
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
        joined = {member.name: member for member in members.members(connection, everybody=True)}
    ensure_services(settings)
    client = connect(settings)
    documents = []
    now = time.time()
    there = set()
    for status in HeartbeatBoard(client, namespace, settings.lease_s).live():
        worker = status.name.rpartition(":")[0]
        there.add(worker)
        order = client.get(control_key(namespace, worker))
        documents.append(
            {
                "name": status.name,
                "worker": worker,
                "joined": worker in joined,
                "state": order.decode() if isinstance(order, bytes) else "busy" if status.job_ids else "idle",
                "role": status.role,
                "host": status.host,
                "device": status.device,
                "environment": status.environment,
                "toolchains": list(status.toolchains),
                "jobs": list(status.job_ids),
                "done": status.done,
                "per_minute": 60 * status.done / max(1.0, now - status.started_at),
                "silent_s": max(0.0, now - status.seen_at),
            }
        )
    for member in joined.values():
        if member.name not in there:
            state = "away" if member.state == "active" else member.state
            documents.append(
                {
                    "name": member.name,
                    "worker": member.name,
                    "joined": True,
                    "state": state,
                    "role": member.role,
                    "host": member.host,
                    "device": member.device,
                    "environment": ", ".join(member.environments),
                    "toolchains": list(member.toolchains),
                    "jobs": [],
                    "done": None,
                    "per_minute": None,
                    "silent_s": max(0.0, now - member.seen_at.timestamp()),
                }
            )
    return documents


def _gate() -> Gate:
    from tuna.cli.database import open_database
    from tuna.db import sessions
    from tuna.db.engine import reading
    from tuna.membership.gate import Gate
    from tuna.pipeline.connection import connect, connect_admin, ensure_services
    from tuna.pipeline.leases import Leases
    from tuna.settings import get_settings

    settings, engine = get_settings(), open_database()
    ensure_services(settings)
    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
    client = connect(settings)
    evict = Leases(client, namespace, settings.lease_s).evict
    return Gate(engine, client, namespace, settings.lease_s, evict, admin=connect_admin(settings))


def _set_state(name: str, state: str) -> None:
    """Change what a worker shall do, of a member in SQL too."""
    from tuna.cli.database import open_database
    from tuna.db.engine import writing
    from tuna.membership import members

    known = [document for document in _workers() if name in (document["name"], document["worker"])]
    if not known:
        raise NotFound(f"There is no worker {name}.", hint="see: tuna workers")
    worker = known[0]["worker"]
    with writing(open_database()) as connection:
        changed = members.set_state(connection, worker, state)
    if known[0]["joined"] and not changed:
        raise BadInput(f"{worker} is {known[0]['state']} already.")
    if state == "revoked":
        if not changed:
            raise BadInput(
                f"{worker} did not join with a token: it uses this installation's own credentials.",
                hint="change those of Redis to put it out",
            )
        _gate().reconcile()
    else:
        _gate().control(worker, state)
    click.echo(f"{worker}: {state}")


@workers.command()
@click.argument("name")
def cordon(name: str) -> None:
    """Let a worker finish what it has and take nothing new."""
    _set_state(name, "cordoned")


@workers.command()
@click.argument("name")
def uncordon(name: str) -> None:
    """Let a cordoned worker take work again."""
    _set_state(name, "active")


@workers.command()
@click.argument("name")
def drain(name: str) -> None:
    """Let a worker finish what it has and leave."""
    _set_state(name, "draining")


@workers.command()
@click.argument("name")
def revoke(name: str) -> None:
    """Put a worker out for good: its credentials end now, and what it had in hand is done again."""
    _set_state(name, "revoked")


def join_line(given: str | None) -> str | None:
    """The token line of `--join`: itself, or the first line of the file that it names, or TUNA_JOIN."""
    from tuna.membership.join import token_from_environment

    line = given or token_from_environment()
    if line and "#" not in line:
        line = Path(line).read_text().strip()
    return line


def join(role: Any, line: str) -> None:
    """Become a member; the credentials go into this process's environment, for its workers."""
    import os
    import socket

    from tuna.membership.join import Facts
    from tuna.membership.join import join as ask
    from tuna.pipeline.tasks import device_of, served_queues
    from tuna.settings import get_settings

    queues = [queue for queue in served_queues(role).values() if isinstance(queue, str)]
    names = tuple(queue.partition(".")[2] for queue in queues)
    facts = Facts(
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device_of(queues),
        environments=names if role == "eval" else (),
        toolchains=names if role == "compile" else (),
    )
    os.environ.update(ask(line, role, facts))
    get_settings.cache_clear()
