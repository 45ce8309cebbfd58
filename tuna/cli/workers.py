"""`tuna workers`."""

from __future__ import annotations

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json, print_table, say


@click.group(invoke_without_command=True)
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
    rows = [
        (
            worker.name,
            worker.role,
            worker.state,
            worker.device,
            worker.environment or ", ".join(worker.toolchains),
            ", ".join(map(str, worker.jobs[:3])) + (" ..." if len(worker.jobs) > 3 else ""),
            "-" if worker.per_minute is None else f"{worker.per_minute:.1f}",
            f"{worker.silent_s:.0f}",
        )
        for worker in listed
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
    show.aside({worker.name: worker.aside for worker in listed if worker.aside})


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
