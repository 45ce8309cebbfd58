"""Commands of who joins over the network, and of where: gateway, rpc-client."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass

import click

from tuna.cli import options
from tuna.cli.console import say
from tuna.cli.tokens import join_line
from tuna.common.signals import INTERRUPTS
from tuna_remote import joining
from tuna_remote.gateway.ports import GATEWAY_PORT


@click.command()
@click.option(
    "--listen", "host", default="127.0.0.1", show_default=True, help="Address to listen on."
)
@click.option("--port", type=click.IntRange(0, 65535), default=GATEWAY_PORT, show_default=True)
def gateway(host: str, port: int) -> None:
    """Let workers on other machines join this database over HTTPS, until Ctrl-C.

    Any number of gateways may serve one database.
    """
    with contextlib.suppress(*INTERRUPTS):
        joining.gateway(host, port, lambda url: say(f"gateway: {url}"))
    say("Ended; workers wait ten minutes for a gateway.", err=True)


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
    return joining.rpc_client(**given, say=lambda text: say(f"INFO {text}"))
