"""rpc-client: this machine as a client of a master, in the words of Lorien."""

from __future__ import annotations

import click

from tuna import api
from tuna.cli import remote_workers
from tuna.cli.console import say


@click.command("rpc-client")
@click.option(
    "--server", required=True, metavar="HOST:PORT", help="The master that `tuna tune-rpc` started."
)
@click.option("--target", required=True, help="The master's target, as text or JSON.")
@click.option(
    "--device", metavar="KEY", help="Measure on a board with this key; default: on this machine."
)
@click.option(
    "--runner-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Port of the board's TVM tracker on this machine.",
)
@click.option(
    "--token",
    "line",
    metavar="URL#TOKENS",
    help="What the master's `tuna token create --role client` printed, or a file of it.",
)
def rpc_client(
    server: str, target: str, device: str | None, runner_port: int | None, line: str | None
) -> int:
    """Join a master and work for it until Ctrl-C: compile, and measure here or on a board.

    The token is that of --token or TUNA_JOIN; a client of the master's own user on its machine
    needs none.
    """
    line = remote_workers.join_line(line)
    return api.rpc_client(
        server, target, device, runner_port, line, say=lambda text: say(f"INFO {text}")
    )
