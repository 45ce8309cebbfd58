"""`tuna key`: shows and rotates the key that signs artifacts."""

from __future__ import annotations

from dataclasses import asdict

import click

from tuna import api
from tuna.cli import options
from tuna.cli.console import print_json, print_table, say
from tuna.messages import counted


@click.group()
def key() -> None:
    """The key that signs compiled artifacts."""


@key.command()
@options.as_json
def show(as_json: bool) -> None:
    """Show the key that signs artifacts, and the former one while it is accepted: ids and public
    keys."""
    found = api.list_keys()
    if as_json:
        print_json([asdict(one) for one in found])
        return
    rows = [
        (one.id, "signs" if one.signs else "accepted until the next rotation", one.public)
        for one in found
    ]
    print_table("", ("key", "state", "public key"), rows)


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
