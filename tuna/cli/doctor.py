"""`tuna doctor`, `tuna db`, `tuna key`: this machine, its services, the database and its keys."""

from __future__ import annotations

from dataclasses import asdict

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json, print_table, say
from tuna.cli.groups import Group
from tuna.common.cpu import load
from tuna.common.messages import counted
from tuna.settings import get_settings

#: Number of pairs after which a line tells the progress
_EVERY = 5


@click.command()
@click.option(
    "--noise",
    is_flag=True,
    help=(
        "Measure for a minute instead what builds do to measurements here, and keep it for"
        " TUNA_QUIET=auto."
    ),
)
@click.option(
    "--pairs",
    type=click.IntRange(3, 1000),
    default=15,
    show_default=True,
    help="With --noise: number of measurements with and without builds.",
)
@options.as_json
def doctor(noise: bool, pairs: int, as_json: bool) -> int:
    """Check disk, database, Redis, broker, artifact store, cores and libraries; exit 1 if something
    must change.

    A warning is about what costs time, not data.

    With --noise fixed kernels are timed in turn beside builds on the other cores and without them.
    Where the median difference is above 3 %, this user's workers on this machine stop building
    while it measures (TUNA_QUIET=auto).
    """
    if noise:
        _noise(pairs, as_json=as_json)
        return 0
    found = api.doctor()
    if as_json:
        print_json(found)
    else:
        show.findings(found)
    return 0 if all(finding.ok for finding in found) else 1


def _noise(pairs: int, *, as_json: bool) -> None:
    if advice := load().advice:
        say(f"Warning: {advice}", err=True)

    def progress(number: int) -> None:
        if number % _EVERY == 0 or number == pairs:
            say(f"noise: {number}/{counted(pairs, 'measurement')}", err=True)

    found = api.measure_noise(pairs, on_pair=progress)
    quiet = api.quiet_needed(get_settings())
    if as_json:
        print_json({**asdict(found), "noisy": found.noisy, "quiet": quiet})
    else:
        show.noise(found, quiet)


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
