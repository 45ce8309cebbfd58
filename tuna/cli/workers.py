"""`tuna workers`."""

from __future__ import annotations

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import Column, print_json, print_list, say
from tuna.cli.groups import Group


@click.group(cls=Group, invoke_without_command=True)
@options.as_json
@click.pass_context
def workers(context: click.Context, as_json: bool) -> None:
    """List live workers, and remote ones; cordon, drain or revoke one."""
    if context.invoked_subcommand is not None:
        return
    listed = api.list_workers()
    if as_json:
        print_json(listed)
        return
    columns: list[Column[api.Worker]] = [
        Column("worker", lambda one: one.name),
        Column("role", lambda one: one.role),
        Column("state", lambda one: one.state),
        Column("device", lambda one: one.device, 4),
        Column("environment", lambda one: one.environment or ", ".join(one.toolchains), 5),
        Column("current jobs", _current_jobs, 1),
        Column("items/min", _rate, 2, right=True),
        Column("silent s", lambda one: f"{one.silent_s:.0f}", 3, right=True),
    ]
    none = "No worker is live. `tuna run` starts some, `tuna worker ROLE` one."
    print_list(columns, listed, none)
    show.aside({worker.name: worker.aside for worker in listed if worker.aside})


def _current_jobs(one: api.Worker) -> str:
    return ", ".join(map(str, one.jobs[:3])) + (" ..." if len(one.jobs) > 3 else "")


def _rate(one: api.Worker) -> str:
    return "-" if one.per_minute is None else f"{one.per_minute:.1f}"


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
