"""Arguments of a model as `NAME=SHAPE:TYPE`, and values of open extents, of a built model and of
one that is imported. Imports no TVM."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuna.errors import BadInput
from tuna_models.child_answers import Obstacle

#: The type of an argument that is a shape itself, not a tensor.
SHAPE = "shape"
#: Types of tensors, by NumPy's names.
TYPES = (
    *("float16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_NAME = re.compile(r"[A-Za-z_][\w/:-]*(?:\.\d{1,4}){0,16}")
_OPEN = re.compile(r"[A-Za-z_]\w*")
_MAX_EXTENTS = 16
#: Points of a sweep.
_MAX_POINTS = 1000
#: Most nodes of an operator that a message names.
_NAMED = 6


@dataclass(frozen=True)
class Argument:
    """A tensor or shape that a model takes: an argument, or a part of one that is a tuple."""

    name: str  #: Name of the model's parameter
    place: tuple[int, ...]  #: Places in tuples, the outermost first; empty: the argument itself
    extents: tuple[int | str, ...]  #: a text is the name of an open extent
    type: str
    bounds: tuple[int, int] | None = None  #: smallest and largest value to draw; None: any
    label: str = ""  #: name in a file of inputs; empty: `name`

    def __str__(self) -> str:
        name = ".".join((self.name, *map(str, self.place)))
        return f"{name}={','.join(map(str, self.extents))}:{self.type}"

    def shape(self, values: Mapping[str, int]) -> list[int]:
        """The extents with these values of the open ones."""
        return [values[extent] if isinstance(extent, str) else extent for extent in self.extents]


def parse(text: str) -> Argument:
    """Parse `x=1,3,224,224:float32`, `x=n,128:int64` or `s=n,4:shape`; raises BadInput.

    `p.0=2,3:float32` is the first part of the tuple p.
    """
    left, mark, kind = text.rpartition(":")
    name, equals, extents = left.partition("=")
    if not mark or not equals or not _NAME.fullmatch(name):
        raise BadInput(
            f"{text!r} is not of the form NAME=SHAPE:TYPE, such as x=1,3,224,224:float32."
        )
    if kind not in (*TYPES, SHAPE):
        raise BadInput(
            f"The input {name} has the unknown type {kind!r}.",
            hint=f"types: {', '.join((*TYPES, SHAPE))}",
        )
    first, *numbers = name.split(".")
    return Argument(first, tuple(map(int, numbers)), tuple(_extents(name, extents)), kind)


def _extents(name: str, text: str) -> Iterator[int | str]:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if len(words) > _MAX_EXTENTS:
        raise BadInput(f"The input {name} has more than {_MAX_EXTENTS} extents.")
    for word in words:
        if word.isdecimal() and len(word) < 16:
            yield int(word)
        elif _OPEN.fullmatch(word):
            yield word
        else:
            raise BadInput(
                f"The input {name} has the extent {word!r}; it is a number, or the name of an open"
                " extent."
            )


def sweep(arguments: Sequence[Argument], texts: Sequence[str]) -> list[dict[str, int]]:
    """Return every combination of values in texts such as `n=1,4,8`; without texts an empty one.

    Texts for the same extent add up.

    Raises BadInput for an open extent without values, and for values of an extent that no argument
    has.
    """
    sizes: dict[str, list[int]] = {}
    for text in texts:
        name, mark, numbers = text.partition("=")
        words = numbers.split(",")
        if not mark or not all(
            re.fullmatch("[0-9]{1,10}", word) and 0 < int(word) < 1 << 31 for word in words
        ):
            raise BadInput(f"{text!r} is not of the form n=1,4,8.")
        sizes.setdefault(name, []).extend(map(int, words))
    named = {
        extent for argument in arguments for extent in argument.extents if isinstance(extent, str)
    }
    if missing := sorted(named - sizes.keys()):
        raise BadInput(
            f"The extent {missing[0]} has no value.", hint=f"give it some: --shape {missing[0]}=1,8"
        )
    if unused := sorted(sizes.keys() - named):
        raise BadInput(
            f"No input has the open extent {unused[0]}.",
            hint=f"open extents: {', '.join(named) or 'none'}",
        )
    count = math.prod(map(len, sizes.values()))
    if count > _MAX_POINTS:
        raise BadInput(
            f"These are {count} combinations; at most {_MAX_POINTS} can be timed at once."
        )
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values())]


def tree(arguments: Sequence[Argument], make: Callable[[Argument], Any]) -> dict[str, Any]:
    """Return what `make` returns of an argument by its parameter, or `{"tuple": [...]}` of such.

    Raises BadInput for a gap in a tuple.
    """
    by_name: dict[str, list[Argument]] = {}
    for argument in arguments:
        by_name.setdefault(argument.name, []).append(argument)
    return {name: _node(name, parts, 0, make) for name, parts in by_name.items()}


def _node(name: str, parts: Sequence[Argument], depth: int, make: Callable[[Argument], Any]) -> Any:
    if len(parts) == 1 and len(parts[0].place) == depth:
        return make(parts[0])
    numbers = sorted({part.place[depth] for part in parts if len(part.place) > depth})
    if len(parts) != sum(len(part.place) > depth for part in parts) or numbers != list(
        range(len(numbers))
    ):
        raise BadInput(
            f"The input {name} is not one tensor, nor a tuple with all of its parts {name}.0,"
            f" {name}.1 ...."
        )
    inner = [[part for part in parts if part.place[depth] == number] for number in numbers]
    return {
        "tuple": [
            _node(f"{name}.{number}", within, depth + 1, make)
            for number, within in enumerate(inner)
        ]
    }


def chosen_extents(
    name: str,
    exported: Mapping[str, Sequence[int | str]],
    shapes: Mapping[str, Sequence[int]],
    batch: int | None,
    *,
    fixed: bool,
) -> tuple[dict[str, int], dict[str, list[int | str]]]:
    """Return the values of open extents by their names, and the shapes of all inputs with them.

    `exported` are shapes with a name, or ? for one without, for each open extent; `shapes` the
    wanted ones, and values for names of extents; `batch` is the first extent of other inputs.
    With `fixed` no other extent can be chosen. Raises BadInput.
    """
    named = {e for extents in exported.values() for e in extents if isinstance(e, str)} - {"?"}
    sizes = {
        extent: values[0]
        for extent, values in shapes.items()
        if extent in named and len(values) == 1
    }
    if unknown := sorted(set(shapes) - set(exported) - set(sizes)):
        known = f"inputs: {', '.join(exported)}" + (
            f"; open extents: {', '.join(sorted(named))}" if named else ""
        )
        raise BadInput(f"{name} has no input {', '.join(unknown)}.", hint=known)
    chosen: dict[str, list[int | str]] = {}
    for label, extents in exported.items():
        wanted = shapes.get(label) if label not in sizes else None
        if wanted is not None and len(wanted) != len(extents):
            raise BadInput(f"The input {label} has {len(extents)} dimensions, not {len(wanted)}.")
        if wanted is None:
            wanted = [batch] if batch is not None and extents else []
        for extent, value in zip(extents, wanted, strict=False):
            if fixed and isinstance(extent, int) and extent != value:
                raise BadInput(
                    f"The input {label} was exported with an extent of {extent}, not {value}.",
                    hint="export it again: torch.export.export(model, inputs, dynamic_shapes=...)",
                )
            if isinstance(extent, str) and extent != "?":
                said = sizes.setdefault(extent, value)
                if said != value:
                    raise BadInput(
                        f"The input {label} has the extent {extent}, which is {said}, not {value}."
                    )
        chosen[label] = [*wanted, *extents[len(wanted) :]]
    return sizes, {
        label: [
            sizes.get(extent, extent) if isinstance(extent, str) else extent for extent in extents
        ]
        for label, extents in chosen.items()
    }


class Obstacles(BadInput):
    """A model has parts that cannot be imported."""

    def __init__(
        self,
        message: str,
        obstacles: Sequence[Obstacle],
        *,
        hint: str = "",
        shapes: Mapping[str, Sequence[int | str]] | None = None,
    ) -> None:
        """`hint` is for all together; `shapes` are those of inputs with open extents."""
        super().__init__(message, hint=hint)
        self.obstacles, self.shapes = obstacles, shapes or {}


def refuse_obstacles(
    name: str,
    operators: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int | str]],
) -> None:
    """Raise BadInput with all obstacles to the import of a model in one message, if there are any.

    `operators` are unsupported ones with the names of their nodes; `shapes` are those of inputs
    with the names of the extents that are still open, or ? for one without a name.
    """
    parts, hints = [], []
    if operators:
        listed = ", ".join(
            f"{operator} ({_nodes(nodes)})" for operator, nodes in sorted(operators.items())
        )
        parts.append(f"operators that cannot be imported: {listed}")
    still_open = {
        label: extents
        for label, extents in shapes.items()
        if any(isinstance(extent, str) for extent in extents)
    }
    if still_open:
        shown = (f"{label}={','.join(map(str, extents))}" for label, extents in still_open.items())
        parts.append(
            "open extents in the shape of its"
            f" input{'s' if len(still_open) > 1 else ''} {' and '.join(shown)}"
        )
        named = dict.fromkeys(
            extent
            for extents in still_open.values()
            for extent in extents
            if isinstance(extent, str)
        )
        hints += [f"--shape {shlex.quote(f'{extent}=N')}" for extent in named if extent != "?"]
        for label, extents in still_open.items():
            if "?" in extents:
                wanted = ",".join("N" if extent == "?" else str(extent) for extent in extents)
                hints.append(f"--shape {shlex.quote(f'{label}={wanted}')}")
    hint = f"give them: {' '.join(hints)}" if hints else ""
    if any(isinstance(extents[0], str) for extents in still_open.values()):
        hint += "; --batch N is the first of every input"
    if parts:
        obstacles = [
            Obstacle(
                operator=operator,
                node=node,
                reason="it cannot be imported",
                hint=_without([operator]),
            )
            for operator, nodes in sorted(operators.items())
            for node in nodes
        ]
        for label, extents in still_open.items():
            shape = ",".join(map(str, extents))
            obstacles.append(Obstacle(node=label, reason=f"open extents: {shape}", hint=hint))
        message = f"{name} has {'; and '.join(parts)}."
        hints = [hint, _without(operators) if operators else ""]
        raise Obstacles(message, obstacles, hint="; ".join(filter(None, hints)), shapes=still_open)


def _without(operators: Collection[str]) -> str:
    """Return advice on operators that cannot be imported."""
    if any(operator.startswith("com.microsoft.") for operator in operators):
        return "export the model without onnxruntime's optimiser, whose own operators these are"
    if all(operator.startswith("ai.onnx.ml.") for operator in operators):
        return "export the network alone, and run these steps before or after it"
    if all(operator in ("If", "Loop", "Scan") for operator in operators):
        return "export the model with a constant in the place of what decides them"
    return "write that part of the network with other operators, and export it again"


def _nodes(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return f"{len(names)}: {', '.join(names[:_NAMED])}{f' and {more} more' if more > 0 else ''}"
