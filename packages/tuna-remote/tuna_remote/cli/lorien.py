"""The seed's program `python3 -m lorien`: `tune` is `tuna tune-rpc`, `rpc-client` is `tuna
rpc-client`."""

from __future__ import annotations

import click

from tuna.cli.groups import Group
from tuna.cli.seeds import CONTEXT, debug, program
from tuna_remote.cli.joining import rpc_client
from tuna_remote.cli.rpc_master import tune_rpc


@click.group(
    cls=Group, commands={"tune": tune_rpc, "rpc-client": rpc_client}, context_settings=CONTEXT
)
@debug
def lorien() -> None:
    """Tune on workers that join over the network.

    A master loads workloads (`tune`), workers on other machines join it (`rpc-client`).
    """


main = program(lorien, "lorien")
