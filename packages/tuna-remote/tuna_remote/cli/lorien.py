"""The seed's program `python3 -m lorien`: `tune` is `tuna tune-rpc`, `rpc-client` is `tuna
rpc-client`."""

from __future__ import annotations

import click

from tuna.cli.main import commands, load_command
from tuna.cli.seeds import CONTEXT, debug, program

#: name -> the command of `tuna` that it is.
_NAMES = {"tune": "tune-rpc", "rpc-client": "rpc-client"}


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, same in _NAMES.items() if same in commands()]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return load_command(_NAMES[name]) if name in self.list_commands(ctx) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, commands()[_NAMES[name]][1]) for name in self.list_commands(ctx)]
            )


@click.group(cls=_Group, context_settings=CONTEXT)
@debug
def lorien() -> None:
    """Tune on workers that join over the network.

    A master loads workloads (`tune`), workers on other machines join it (`rpc-client`).
    """


main = program(lorien, "lorien")
