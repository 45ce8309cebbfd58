"""Options that say which inputs a model has, and their values."""

from __future__ import annotations

import click

from tuna.errors import BadInput
from tuna_models.manifest import Precision

PRECISION_HELP = (
    "bf16: convolutions and products in bfloat16, with sums in fp32, an error of 1e-2 at most, and"
    " a CPU that has avx512_bf16; default: the types of the file."
)
precision_option = click.option(
    "--precision",
    type=click.Choice([str(each) for each in Precision]),
    default=str(Precision.FP32),
    help=PRECISION_HELP,
)

shape_option = click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="INPUT=N,C,H,W",
    help="Shape of an input, or size of an open extent.",
)
value_option = click.option(
    "--value",
    "values",
    multiple=True,
    metavar="INPUT=N[,N...]",
    help="Value of an input, which becomes a constant; may be repeated.",
)


def batches_of(text: str | None) -> list[int | None]:
    """The batches that are asked for; one of None where none is."""
    if text is None:
        return [None]
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) < 1 << 31 for part in parts):
        raise BadInput(f"{text!r} is not of the form 1,8.")
    return [int(part) for part in parts]


def shape_of(text: str) -> tuple[str, list[int]]:
    name, mark, extents = text.rpartition("=")
    try:
        found = [int(extent) for extent in extents.split(",")]
    except ValueError:
        found = []
    if not mark or not name or not found or min(found) < 1:
        raise BadInput(f"{text!r} is not of the form input=1,3,224,224.")
    return name, found


def value_of(text: str) -> tuple[str, list[float]]:
    name, mark, numbers = text.rpartition("=")
    words = {"true": 1.0, "false": 0.0}
    try:
        found = [
            words[word] if word in words else float(word) for word in numbers.lower().split(",")
        ]
    except ValueError:
        found = []
    if not mark or not name or not found:
        raise BadInput(f"{text!r} is not of the form sr=16000 or axes=1,2.")
    return name, found
