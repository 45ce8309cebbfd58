"""Operators on single values, which are the same in blocks of channels: which of them work there,
on what arguments, and how they are written. Imports TVM.

Kernels multiply the values that fill the last block of channels by zero: they have to stay finite,
for which each operator has a bound of its answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna.libraries.tvm.kernels.packing import in_blocks
from tuna.libraries.tvm.problems import packed
from tuna_models.compiler import blocked, slopes
from tuna_models.compiler.graph import Node, constant_of, extents, scale_and_shift

#: Numbers of axes of tensors that can be in blocks.
IMAGES = (3, 4, 5)
#: Largest bound of a value that still counts as finite: kernels may square it once more.
LARGEST = 1e18


def _grown(by: Callable[[float], float], value: float) -> float:
    try:
        return by(value)
    except OverflowError:
        return math.inf


def _largest(*values: float) -> float:
    return max(values)


#: The bound of an answer's magnitude by those of the arguments, for each operator on single values
#: that works in blocks; infinite where the answer to a value within them may be infinite or NaN. A
#: divisor is a constant.
BOUNDS: Mapping[str, Callable[..., float]] = {
    "add": lambda one, other: one + other,
    "subtract": lambda one, other: one + other,
    "multiply": lambda one, other: one * other,
    "divide": lambda one, other: one / other,
    "square": lambda value: value * value,
    "sqrt": lambda value: math.inf if value else 0.0,
    "exp": lambda value: _grown(math.exp, value),
    **dict.fromkeys(("sinh", "cosh"), lambda value: _grown(math.cosh, value)),
    **dict.fromkeys(("erf", "sigmoid", "tanh", "sin", "cos", "sign"), lambda _: 1.0),
    "atan": lambda _: math.pi / 2.0,
    **dict.fromkeys(("ceil", "floor", "round", "nn.softplus"), lambda value: value + 1.0),
    "nn.selu": lambda value: 2.0 * (value + 1.0),
    **dict.fromkeys(
        (
            *("abs", "negative", "trunc", "asinh", "maximum", "minimum", "clip"),
            *("nn.relu", "nn.relu6", "nn.leakyrelu", "nn.silu", "nn.gelu", "nn.gelu_tanh"),
        ),
        _largest,
    ),
    **dict.fromkeys(
        (
            *("acos", "acosh", "asin", "atan2", "atanh", "floor_divide", "floor_mod", "log"),
            *("log_add_exp", "mod", "power", "rsqrt", "tan"),
        ),
        lambda *_: math.inf,
    ),
}
_TRUTH = "its values are no fp32, the one type of operators in blocks"
_SEPARATE = "the importer leaves none"
#: Why operators on single values leave the blocks, where `BOUNDS` has none for them.
OUTSIDE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("equal", "greater", "greater_equal", "isfinite", "isinf", "isnan", "less"),
            *("less_equal", "not_equal", "where", "astype"),
        ),
        _TRUTH,
    ),
    **dict.fromkeys(("collapse_sum_like", "nn.dropout", "ones_like", "zeros_like"), _SEPARATE),
    "nn.prelu": "its slopes have one axis",
    "squeeze": "it changes the axes",
    **dict.fromkeys(("tril", "triu"), "they read the index of a value"),
}

#: Bounds of the values beyond the channels, by variable
Bounds = Mapping[Any, float]


@dataclass(frozen=True)
class Pointwise:
    """An operator in blocks, or what stands for it there."""

    sources: Sequence[Any]  #: one of them must be in blocks
    #: writes it by `emit`, `operand`, which reads an argument in blocks, and the same for a tensor
    #: that is kept in blocks
    write: Callable[[Callable[..., Any], Callable[[Any], Any], Callable[[Any], Any]], Any]
    bound: Callable[[Bounds], float]


def find(node: Node, makers: Mapping[Any, Node], block: int) -> Pointwise | None:
    """Return an operator on single values in blocks; None for one that does not work there."""
    shape = extents(node.var) if str(getattr(node.var.ty, "dtype", "")) == "float32" else None
    if shape is None or len(shape) not in IMAGES:
        return None
    if isinstance(node.value, relax.TupleGetItem):
        return _normalisation(node, makers, len(shape))
    if node.op == "nn.prelu":
        return _rectifier(node, shape, block)
    if not _works(node, shape, block) or not all(_fits(arg, shape, block) for arg in node.args):
        return None

    def write(emit: Any, operand: Any, _: Any) -> Any:
        args = [operand(arg) for arg in node.args]
        return emit(tvm.ir.Call(node.value.op, args, node.value.attrs, node.value.ty_args))

    def bound(bounds: Bounds) -> float:
        if shape[1] % block == 0:
            return 0.0
        return BOUNDS[node.op](*(_bound(arg, bounds) for arg in node.args))

    return Pointwise(node.args, write, bound)


def _normalisation(node: Node, makers: Mapping[Any, Node], axes: int) -> Pointwise | None:
    """A batch normalisation that is part of no convolution: a product and a sum."""
    maker = makers.get(node.value.tuple_value)
    if maker is None or maker.op != "nn.batch_norm" or int(node.value.index) != 0:
        return None
    values = scale_and_shift(maker)
    if values is None:
        return None
    channels = (1, -1, *[1] * (axes - 2))
    scale, shift = (relax.const(each.astype(np.float32).reshape(channels)) for each in values)

    def write(emit: Any, operand: Any, kept: Any) -> Any:
        scaled = emit(relax.op.multiply(kept(maker.args[0]), operand(scale)))
        return emit(relax.op.add(scaled, operand(shift)))

    return Pointwise(maker.args[:1], write, lambda _: 0.0)


def _rectifier(node: Node, shape: tuple[int, ...], block: int) -> Pointwise | None:
    """A product of negative values with one for each channel."""
    values, source = slopes.find(node), node.args[0]
    if values is None or not _fits(relax.const(values), shape, block):
        return None

    def write(emit: Any, operand: Any, kept: Any) -> Any:
        x = kept(source)
        scaled = emit(relax.op.multiply(x, operand(relax.const(values))))
        positive = emit(relax.op.greater(x, relax.const(0.0)))
        return emit(relax.op.where(positive, x, scaled))

    largest = max(1.0, float(np.abs(values).max()))
    return Pointwise([source], write, lambda bounds: _bound(source, bounds) * largest)


def _works(node: Node, shape: tuple[int, ...], block: int) -> bool:
    """Whether an operator works on blocks, where the values that fill the last one stay finite."""
    if node.op != "divide" or shape[1] % block == 0:
        return node.op in BOUNDS
    values = constant_of(node.args[1])
    return values is not None and values.size == 1 and bool(np.all(values))


def _fits(arg: Any, shape: tuple[int, ...], block: int) -> bool:
    """Whether an operator's argument fits blocks: one value, or all channels."""
    values = constant_of(arg)
    if values is not None and not np.all(np.isfinite(values)):
        return False  # zero times infinity is NaN
    if values is not None and values.size == 1:
        return True
    given = (extents(arg) if hasattr(arg, "ty") else None) if values is None else values.shape
    if values is None and not isinstance(arg, relax.Var):
        return given is None  # a bound of a clip
    if given is None or len(given) != len(shape) or given[1] != shape[1]:
        return False
    images = (blocked.blocked_extents(each, block)[0] for each in (given, shape))
    return next(images) in (1, next(images))  # so that frames are those of the same batch


def _bound(arg: Any, bounds: Bounds) -> float:
    """The bound of an argument beyond the channels, where only single constants are not 0."""
    if isinstance(arg, relax.Var):
        return bounds.get(arg, 0.0)
    values = constant_of(arg)
    if values is not None:
        return float(abs(values.reshape(()))) if values.size == 1 else 0.0
    value = abs(float(getattr(arg, "value", 0.0)))  # a bound of a clip
    return value if value < math.inf else 0.0


def constant_in_blocks(values: np.ndarray, block: int) -> Any:
    """An array that `_fits`, as operators on blocks take it."""
    if values.size == 1:
        return relax.const(values.reshape(()))
    extended = blocked.blocked_extents(values.shape, block)
    return relax.const(packed(blocked.images(values), in_blocks(extended)))
