"""Options, spellings and entry points that the seeds' programs share (tuna-mituna, tuna-remote)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import click

from tuna.cli import options
from tuna.cli.main import guarded
from tuna.common import signals
from tuna.errors import BadInput

_T = TypeVar("_T")
CONTEXT = {"help_option_names": ["-h", "--help"]}

debug = click.option(
    "--debug", is_flag=True, expose_value=False, help="Show a traceback for every error."
)
arch = click.option("-a", "--arch", help="Architecture, such as gfx90a.")
num_cu = click.option("-n", "--num_cu", type=options.COUNT, help="Number of compute units.")
session_id = click.option("--session_id", type=options.ID, help="Tuning session id.")


def required(value: _T | None, flag: str) -> _T:
    """The value of an option that this use of the command cannot do without."""
    if value is None:
        raise BadInput(f"{flag} is missing.")
    return value


#: Options of `tuna` that have another name in the seeds' programs
SPELLING = {
    "--allow-imported": "--allow_imported",
    "--allow-noisy": "--allow_noisy",
    "--base": "--base_golden_v",
    "--miopen-version": "--miopen_v",
    "--num-cu": "--num_cu",
    "--rocm-version": "--rocm_v",
    "--session-id": "--session_id",
}
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?![\w-])")


def respell(text: str) -> str:
    """A sentence with the options of the seeds' programs; what stands in backquotes is a command of
    `tuna` to paste."""
    parts = text.split("`")
    parts[::2] = [
        _OPTION.sub(lambda found: SPELLING.get(found[0], found[0]), part) for part in parts[::2]
    ]
    return "`".join(parts)


def program(command: click.Command, name: str) -> Callable[[], None]:
    """The entry point of a script."""

    def main() -> None:
        signals.run_program(lambda: guarded(command, name=name, respell=respell))

    return main
