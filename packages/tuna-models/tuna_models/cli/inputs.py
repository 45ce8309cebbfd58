"""Options that say which inputs a model has, and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from tuna.cli import options
from tuna.errors import BadInput
from tuna_models.manifest import Precision


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model's file, and the precision that it is imported in."""

    shapes: tuple[str, ...] = options.option(
        "Shape of an input, or size of an open extent.", "--shape", metavar="INPUT=N,C,H,W"
    )
    values: tuple[str, ...] = options.option(
        "Value of an input, which becomes a constant; may be repeated.",
        "--value",
        metavar="INPUT=N[,N...]",
    )
    precision: str = options.option(
        "bf16: convolutions and products in bfloat16, with sums in fp32, but for those that stay in"
        " fp32 to keep an error of 1e-2, on a CPU that has avx512_bf16; default: the types of the"
        " file.",
        type=click.Choice([str(each) for each in Precision]),
        default="fp32",
        show_default=False,
    )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `api.import_model` and `api.check_file`."""
        shapes, values = dict(map(shape_of, self.shapes)), dict(map(value_of, self.values))
        return {"shapes": shapes, "values": values, "precision": self.precision}


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
