"""`tuna tune kernel.py`: the Triton kernel of a Python file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.tuned import tuned

#: Forms of export that suit a kernel of one's own.
_FORMS = ("triton-json", "json")


@dataclass(frozen=True)
class _Kernel:
    """Options for a kernel."""

    tag: str | None = options.option(
        "Name for these shapes; default: of the function and the file's version.", "-t"
    )
    output: Path | None = options.option(
        "The folder to write tiles and a report into.", "-o", type=options.OUTPUT_FOLDER
    )
    reason: str = options.option(
        "Why: a short text; default: tune TAG.", "-l", "--label", default="", show_default=False
    )


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@options.shapes
@options.collected(_Kernel)
@options.job_choices
@options.log_to
def tune_kernel(
    file: Path,
    shapes_file: Path | None,
    asked: options.JobChoices,
    wanted: _Kernel,
    stored: options.OnStored,
) -> int:
    """Tune the Triton kernel of a Python file."""
    prepared = show.prepared(
        lambda: api.prepare_tuning(
            file,
            wanted.tag,
            api.Tuning("triton", wanted.reason, asked.given()),
            shapes=shapes_file,
        ),
        "triton",
    )
    return tuned(prepared, _FORMS, wanted.output, stored)
