"""Groups of commands, such as `tuna session`."""

from __future__ import annotations

import click

#: Characters of the first sentence of a command's help, at most.
_SENTENCE = 300


class Group(click.Group):
    """A group of commands whose help has the first sentence of each to its end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, as Click does, but wrapped in the place of cut off."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(_SENTENCE)) for name, one in found if one]
            )
