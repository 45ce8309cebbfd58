"""`tuna serve`: the service, for people and programs that have no shell here."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path

import click

from tuna.api import require_packages_of_server
from tuna.cli.console import say
from tuna.common.signals import INTERRUPTS

PEM = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to listen on.",
)
@click.option("--tls-cert", type=PEM, help="Certificate (PEM).")
@click.option("--tls-key", type=PEM, help="Its key (PEM).")
@click.option(
    "--behind-proxy",
    "behind",
    multiple=True,
    metavar="NAME[:PORT]",
    help="Name under which a proxy that has TLS passes requests on.",
)
@click.option("--demo", is_flag=True, help="Show a recorded session, in a throwaway TUNA_HOME.")
def serve(
    listen: str, tls_cert: Path | None, tls_key: Path | None, behind: tuple[str, ...], demo: bool
) -> None:
    """Serve what this database knows, and work on what is asked for, until Ctrl-C; prints a link
    with the owner's token.

    Others get tokens of their own: `tuna token create --role submit`, or read.
    """
    require_packages_of_server()
    from tuna_serve.web import serving
    from tuna_serve.web.demo import demo_home

    address = serving.Address.parse(listen, tls_cert, tls_key, behind)
    with suppress(*INTERRUPTS), demo_home() if demo else nullcontext():
        serving.serve(address, lambda url: say(url, wrap=False))
    say("Ended; what is asked for goes on when it is started again.", err=True)
