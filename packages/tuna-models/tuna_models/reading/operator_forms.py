"""Numbers of inputs and outputs, and attributes, that ONNX defines of an operator. Imports onnx."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import AttributeProto, defs

from tuna.common.messages import counted
from tuna_models.names import OWN_DOMAINS, quoted
from tuna_models.refusals import DAMAGED, Refusal

#: A term of an Einsum's equation
_TERM = re.compile(r"[A-Za-z ]*(?:\.\.\.[A-Za-z ]*)?")
#: More axes than a tensor has: NumPy does not end for some far larger numbers
_MAX_AXES = 64
#: A number of inputs or outputs that stands for any number
_ANY = 1 << 30
#: Values of attributes that ONNX's definitions list in words, by name, and those of one operator
_CHOICES: Mapping[str, tuple[int | str, ...]] = {
    **dict.fromkeys(("layout", "linear_before_reset", "ceil_mode", "storage_order"), (0, 1)),
    **dict.fromkeys(("keepdims", "select_last_index", "largest", "count_include_pad"), (0, 1)),
    "auto_pad": ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"),
    **dict.fromkeys(
        ("GRU direction", "LSTM direction", "RNN direction"),
        ("forward", "reverse", "bidirectional"),
    ),
    "GridSample mode": ("linear", "bilinear", "nearest", "cubic", "bicubic"),
    "LpNormalization p": (1, 2),
    "Pad mode": ("constant", "reflect", "edge", "wrap"),
}


@dataclass(frozen=True)
class OperatorForm:
    """The inputs, outputs and attributes of an operator in an opset."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    needed: tuple[tuple[int, str], ...]  #: places and names of the inputs that cannot be absent
    #: place and name of the first of any number of inputs, none of which can be absent
    variadic: tuple[int, str] | None
    attributes: Mapping[str, int]  #: numbers of types, as nodes have them, by name
    required: frozenset[str]


@cache
def schema_of(operator: str, opset: int, domain: str = "") -> Any:
    """Return onnx's definition of an operator; None where the opset of the domain has it not."""
    try:
        return defs.get_schema(operator, opset, "" if domain in OWN_DOMAINS else domain)
    except defs.SchemaError:
        return None


@cache
def _form_of(operator: str, opset: int) -> OperatorForm | None:
    """The form of one of ONNX's own operators; None where the opset has it not."""
    if (schema := schema_of(operator, opset)) is None:
        return None
    options = defs.OpSchema.FormalParameterOption
    places = [(given.option, (place, given.name)) for place, given in enumerate(schema.inputs)]
    # onnxruntime's tools write DequantizeLinear with an axis in opsets before those that have it
    attributes = {**defs.get_schema(operator).attributes, **schema.attributes}
    return OperatorForm(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(place for kind, place in places[: schema.min_input] if kind == options.Single),
        next((place for kind, place in places if kind == options.Variadic), None),
        {name: int(each.type.value) for name, each in attributes.items()},
        frozenset(name for name, each in schema.attributes.items() if each.required),
    )


def check(node: Any, opset: int) -> None:
    """Raise Refusal for one of ONNX's operators that is not as the opset defines it."""
    if (form := _form_of(node.op_type, opset)) is None:
        return
    parts = _PARTS.get(node.op_type)
    faults = (  # in this order: each check may rely on those before
        check_counts(node, form.inputs, form.outputs),
        *(one(node, form) for one in (_absent, _attributes, _choices)),
        *([] if parts is None else [parts(node)]),
    )
    for why in itertools.chain.from_iterable(faults):
        raise Refusal.of(node, why, DAMAGED)


def check_counts(node: Any, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[str]:
    """Yield why a node has another number of inputs or outputs than at least and at most these."""
    for noun, given, (least, most) in (
        ("input", len(node.input), inputs),
        ("output", len(node.output), outputs),
    ):
        if not least <= given <= most:
            words = str(least) if least == most else f"{least} to {most}"
            words = f"{least} or more" if most > _ANY else words
            yield f"it has {counted(given, noun)}, and this operator {words}"


def _absent(node: Any, form: OperatorForm) -> Iterator[str]:
    for place, name in form.needed:
        if not node.input[place]:
            yield f"its input {name} is absent"
    if form.variadic and "" in node.input[form.variadic[0] :]:
        yield f"one of its inputs {form.variadic[1]} is absent"


def _attributes(node: Any, form: OperatorForm) -> Iterator[str]:
    for attribute in node.attribute:
        name, kind = attribute.name, form.attributes.get(attribute.name)
        if kind is None and not name.startswith("__"):  # those are for tools
            yield f"it has the attribute {quoted(name)}, which this operator has not"
        if kind is not None and attribute.type not in (0, kind):
            words = AttributeProto.AttributeType.Name
            yield f"its attribute {name} is of type {words(attribute.type)}, not {words(kind)}"
        if name in ("axis", "axes") and any(
            abs(axis) > _MAX_AXES for axis in (attribute.i, *attribute.ints)
        ):
            yield f"its {name} is no axis that a tensor has"
    if missing := form.required - {each.name for each in node.attribute}:
        yield f"it lacks the attribute {min(missing)}"
    if node.op_type == "Constant" and len(node.attribute) != 1:
        yield f"it has {counted(len(node.attribute), 'value')}, and a constant has one"


def _choices(node: Any, _: OperatorForm) -> Iterator[str]:
    for each in node.attribute:
        choices = _CHOICES.get(each.name) or _CHOICES.get(f"{node.op_type} {each.name}")
        value = each.s.decode(errors="replace") if each.s else each.i
        if choices and not each.ref_attr_name and value not in choices:
            yield f"its {each.name} is {quoted(value) if isinstance(value, str) else value}"


def _branches(node: Any) -> Iterator[str]:
    for name in ("then_branch", "else_branch"):
        given = len(_attribute(node, name).g.output)
        if given != len(node.output):
            yield f"its {name} returns {counted(given, 'value')}, and it has {len(node.output)}"


def _loop(node: Any) -> Iterator[str]:
    body, states = _attribute(node, "body").g, max(len(node.input) - 2, 0)
    yield from _body(node, body, 2 + states, 1 + len(node.output), states <= len(node.output))


def _scan(node: Any) -> Iterator[str]:
    body, scanned = _attribute(node, "body").g, _attribute(node, "num_scan_inputs").i
    # before opset 9 the first input are lengths of sequences
    inputs = len(node.input) - (len(node.input) == len(body.input) + 1)
    yield from _body(node, body, inputs, len(node.output), 0 < scanned <= len(node.input))


def _body(node: Any, body: Any, inputs: int, outputs: int, fits: bool) -> Iterator[str]:
    if not fits or (len(body.input), len(body.output)) != (inputs, outputs):
        yield (
            f"its body takes {counted(len(body.input), 'value')} and returns {len(body.output)},"
            f" which do not fit its {counted(len(node.input), 'input')} and"
            f" {counted(len(node.output), 'output')}"
        )


def _equation(node: Any) -> Iterator[str]:
    text = _attribute(node, "equation").s.decode(errors="replace")
    left, _, right = text.partition("->")
    terms = left.split(",")
    if not all(_TERM.fullmatch(term) for term in (*terms, right)):
        yield (
            f"its equation {quoted(text)} has more than letters, commas, one -> and dots in threes"
        )
    yield from check_counts(node, [len(terms)] * 2, (1, 1))


def _attribute(node: Any, name: str) -> Any:
    return next(each for each in node.attribute if each.name == name)


_PARTS: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "Einsum": _equation,
    "If": _branches,
    "Loop": _loop,
    "Scan": _scan,
}
