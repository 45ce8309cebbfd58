"""`tuna doctor`, `tuna db`, `tuna key`: this machine, its services, the database and its keys."""

from __future__ import annotations

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json, print_table, say
from tuna.cli.groups import Group
from tuna.common.messages import counted


@click.command()
@options.as_json
def doctor(as_json: bool) -> int:
    """Check disk, database, Redis, broker, artifact store, cores and libraries; exit 1 if something
    must change.

    A warning is about what costs time, not data.
    """
    found = api.doctor()
    if as_json:
        print_json(found)
    else:
        show.findings(found)
    return 0 if all(finding.ok for finding in found) else 1


@click.group(cls=Group)
def db() -> None:
    """Look after the database."""


@db.command()
def upgrade() -> None:
    """Bring the schema of the database to the one that this version needs."""
    done = api.upgrade_database()
    say(f"{done.url}: schema {done.before or 'none'} -> {done.after}")


@click.group(cls=Group)
def key() -> None:
    """The key that signs compiled artifacts."""


@key.command("show")
@options.as_json
def show_keys(as_json: bool) -> None:
    """Show the key that signs artifacts, and the former one while it is accepted: ids and public
    keys."""
    found = api.list_keys()
    if as_json:
        print_json(found)
        return
    rows = [
        (one.id, "signs" if one.signs else "accepted until the next rotation", one.public)
        for one in found
    ]
    print_table(("key", "state", "public key"), rows)


@key.command()
@click.option(
    "--leaked",
    is_flag=True,
    help="Refuse at once what former keys signed; jobs that need it compile it again.",
)
def rotate(leaked: bool) -> None:
    """Sign artifacts with a new key. Coordinators and workers that run take it up by themselves.

    What jobs still need is signed again, and the former key is accepted until the next rotation.
    """
    done = api.rotate_key(leaked=leaked)
    say(
        f"key {done.key.id} signs from now on; {counted(done.signed, 'artifact')} that jobs need"
        " signed with it"
    )
    if done.refused:
        say(
            f"{counted(done.refused, 'artifact')} without a valid signature: their jobs are"
            " compiled again"
        )
