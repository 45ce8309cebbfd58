"""A Relax function as a list of operators, with constants folded by NumPy. Imports TVM.

TVM's own folding compiles a function for each constant, which takes most of a minute for a ResNet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, Op

from tuna.errors import BadInput

#: Operators that TVM's importer applies to indices.
_OF_INDICES = ("add", "less")
#: Types of real values that NumPy has too.
_REAL = {"float16", "float32", "float64"}
#: Operators that change a tensor's shape and not the order of its values.
RESHAPES = {"reshape", "expand_dims", "squeeze", "flatten"}


#: Attributes of an imported function: numbers and scales by the constants that are their products,
#: and its quantised operators
_WHOLE, _QUANTISATIONS = "whole_numbers", "quantisations"


@dataclass(frozen=True)
class Whole:
    """Whole numbers and scales of which a constant is the product, as the model's file has them."""

    numbers: Any  #: array of integers, less the zero point
    scales: Any  #: fp32 array with as many axes, of extent 1 where the scale is the same

    def moved(self, move: Callable[[Any], Any]) -> Whole:
        """The same after `move` has changed the shape or the order of the values."""
        every = np.broadcast_to(self.scales, self.numbers.shape)
        return Whole(move(self.numbers), _collapsed(move(every)))

    def along(self, axis: int) -> Any:
        """The scale of each extent of an axis; None where it differs along another."""
        others = [extent for at, extent in enumerate(self.scales.shape) if at != axis]
        if any(extent != 1 for extent in others):
            return None
        return np.broadcast_to(self.scales.reshape(-1), (self.numbers.shape[axis],))


def _collapsed(scales: Any) -> Any:
    """The array with an extent of 1 along each axis where its values are the same."""
    for axis in range(scales.ndim):
        first = scales.take([0], axis) if scales.shape[axis] else scales
        if np.array_equal(np.broadcast_to(first, scales.shape), scales):
            scales = first
    return scales


@dataclass(frozen=True)
class Quantisation:
    """A QuantizeLinear or DequantizeLinear of a model's file, which operators in fp32 compute."""

    kind: str  #: type of the whole numbers that are rounded; empty: real values of such are made
    scale: Any  #: constant or variable; None: whole numbers that are rounded without a scale
    zero: Any  #: constant or variable; None: zero
    vars: Sequence[Any]  #: those of its operators, in order

    @property
    def constants(self) -> tuple[Any, Any]:
        """The arrays of zero point and scale; None for what is known when the model runs."""
        zero = np.zeros((), np.float32) if self.zero is None else constant_of(self.zero)
        return zero, constant_of(self.scale)


@dataclass
class Facts:
    """The statements of a model's file on values that are computed in fp32."""

    #: fp32 variables by the variables of the same whole numbers
    floats: dict[Any, Any] = field(default_factory=dict)
    #: numbers and scales by constants that are products
    wholes: dict[Any, Whole] = field(default_factory=dict)
    quantisations: list[Quantisation] = field(default_factory=list)

    def on(self, module: Any) -> Any:
        """The imported module with what `read` reads of them."""
        pairs = {
            leaf: [constant(each.numbers), constant(each.scales)]
            for leaf, each in self.wholes.items()
        }
        rows = [[each.kind, each.scale, each.zero, each.vars] for each in self.quantisations]
        main = module["main"].with_attr(_WHOLE, pairs).with_attr(_QUANTISATIONS, rows)
        module["main"] = main
        return module


@dataclass(frozen=True)
class Node:
    """One binding: `var` is what `value` computes."""

    var: Any
    value: Any

    @property
    def op(self) -> str:
        """Name of the called operator without `relax.`; empty for other values."""
        is_call = isinstance(self.value, Call) and isinstance(self.value.op, Op)
        return str(self.value.op.name).removeprefix("relax.") if is_call else ""

    @property
    def args(self) -> list[Any]:
        """Arguments of the call."""
        return list(self.value.args) if isinstance(self.value, Call) else []

    @property
    def attrs(self) -> Any:
        """Attributes of the operator."""
        return self.value.attrs

    @property
    def label(self) -> str:
        """The operator and the shapes of its first two tensors, such as `matmul of 4x8 and 8x2`."""
        return label(self.op.removeprefix("nn."), [extents(arg) for arg in self.args[:2]])


def label(op: str, shapes: Sequence[Sequence[int] | None]) -> str:
    """An operator on tensors of these shapes, None for one that is not known."""
    sizes = ("x".join(map(str, shape)) for shape in shapes if shape is not None)
    return " of ".join(filter(None, (op, " and ".join(sizes))))


@dataclass
class Graph:
    """The operators of a model in an order in which they can be computed."""

    params: list[Any]
    nodes: list[Node]
    result: Any
    #: called TIR functions by their global variables
    functions: dict[Any, Any] = field(default_factory=dict)
    whole: dict[Any, Whole] = field(default_factory=dict)  #: by constants that are products
    #: quantised operators by the variables of their operators in fp32
    quantisations: dict[Any, Quantisation] = field(default_factory=dict)
    makers: dict[Any, Node] = field(init=False)  #: the operator whose value a variable is
    users: dict[Any, list[Node]] = field(init=False)  #: operators that read a variable

    def __post_init__(self) -> None:
        self.makers, self.users = {node.var: node for node in self.nodes}, {}
        for node in self.nodes:
            for var in dict.fromkeys(variables(node.value)):
                self.users.setdefault(var, []).append(node)

    def sole_user(self, var: Any) -> Node | None:
        """The only operator that reads `var`; None if there are more or it is an answer."""
        users = self.users.get(var, [])
        return users[0] if len(users) == 1 and not self.is_result(var) else None

    def read_alone(self, var: Any) -> Quantisation | None:
        """The operators that make real values of whole numbers, which nothing else reads."""
        user = self.sole_user(var)
        quantisation = None if user is None else self.quantisations.get(user.var)
        if quantisation is None or quantisation.kind or not self.operators(quantisation):
            return None
        return quantisation

    def operators(self, quantisation: Quantisation) -> list[Node]:
        """The operators of one, in order; none where others read the values between them."""
        nodes = [self.makers[var] for var in quantisation.vars if var in self.makers]
        alone = all(self.sole_user(one.var) is other for one, other in pairwise(nodes))
        return nodes if alone else []

    def is_result(self, var: Any) -> bool:
        """Whether `var` is an answer of the model."""
        return any(var.same_as(found) for found in variables(self.result))


def read(module: Any) -> Graph:
    """The function `main`; raises BadInput for one with branches or loops."""
    function = relax.transform.DeadCodeElimination()(module)["main"]
    replaced: dict[Any, Any] = {}
    nodes, whole = [], _whole_of(function)

    def find(leaf: Any) -> Any:
        return replaced.get(leaf, leaf)

    for block in function.body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                raise BadInput(
                    "The model has branches that depend on its input, which cannot be imported."
                )
            value = _static(substitute(binding.value, find))
            if isinstance(value, relax.Var | GenericConst | relax.ShapeExpr | relax.Tuple):
                replaced[binding.var] = value
                continue
            node = Node(binding.var, _named(value))
            folded = _folded(node)
            if folded is None:
                nodes.append(node)
            else:
                replaced[binding.var] = constant(folded)
                if node.args[0] in whole and (move := _move(node)) is not None:
                    whole[replaced[binding.var]] = whole[node.args[0]].moved(move)
    result = substitute(function.body.body, find)
    nodes = needed(nodes, result)
    functions = {
        var: called for var, called in module.functions.items() if isinstance(called, tirx.PrimFunc)
    }
    quantisations = {
        var: Quantisation(str(kind), find(scale), find(zero), list(vars))
        for kind, scale, zero, vars in (function.attrs or {}).get(_QUANTISATIONS, ())
        for var in vars
    }
    return Graph(list(function.params), nodes, result, functions, whole, quantisations)


def _whole_of(function: Any) -> dict[Any, Whole]:
    """The whole numbers of an imported function's constants."""
    pairs = (function.attrs or {}).get(_WHOLE, {})
    return {leaf: Whole(*map(constant_of, pair)) for leaf, pair in pairs.items()}


def variables(expression: Any) -> list[Any]:
    """The variables that an expression reads."""
    if isinstance(expression, relax.Var):
        return [expression]
    if isinstance(expression, Call):
        return [var for arg in expression.args for var in variables(arg)]
    if isinstance(expression, relax.Tuple):
        return [var for part in expression.fields for var in variables(part)]
    return variables(expression.tuple_value) if isinstance(expression, relax.TupleGetItem) else []


def substitute(expression: Any, find: Callable[[Any], Any]) -> Any:
    """Replace variables and constants of an expression by what `find` returns for them."""
    if isinstance(expression, relax.Var | GenericConst):
        return find(expression)
    if isinstance(expression, Call):
        args = [substitute(arg, find) for arg in expression.args]
        return Call(expression.op, args, expression.attrs, expression.ty_args)
    if isinstance(expression, relax.Tuple):
        return relax.Tuple([substitute(part, find) for part in expression.fields])
    if isinstance(expression, relax.TupleGetItem):
        whole, index = substitute(expression.tuple_value, find), int(expression.index)
        if isinstance(whole, relax.Tuple):
            return whole.fields[index]
        return relax.TupleGetItem(whole, index)
    return expression


def constant_of(expression: Any) -> np.ndarray | None:
    """The values of a constant, None for anything else."""
    return np.asarray(expression.value.numpy()) if isinstance(expression, GenericConst) else None


def constant(values: Any) -> Any:
    """The constant of an array with its type, which TVM would halve if it has 64 bits."""
    return relax.const(values, str(values.dtype))


def extents(var: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, None where it is not known when compiling."""
    shape = getattr(var.ty, "shape", None)
    try:
        return tuple(int(extent) for extent in shape.values) if shape is not None else None
    except (TypeError, AttributeError):
        return None


def scale_and_shift(node: Node) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what a batch normalisation multiplies each channel by and then adds, in double
    precision; None where its parameters are no constants, or channels not the second axis."""
    attrs, parts = node.attrs, [constant_of(arg) for arg in node.args[1:]]
    if int(attrs.axis) != 1 or any(part is None for part in parts):
        return None
    gamma, beta, mean, variance = (np.asarray(part, np.float64) for part in parts)
    scale = (gamma if attrs.scale else 1.0) / np.sqrt(variance + float(attrs.epsilon))
    return scale, (beta if attrs.center else 0.0) - mean * scale


def needed(
    nodes: Sequence[Node], result: Any, sources: Mapping[Any, Any] | None = None
) -> list[Node]:
    """The operators whose values the result depends on. Some variables are made of `sources` of
    their own, and not as the graph has it."""
    wanted, found = set(variables(result)), []
    for node in reversed(nodes):
        if node.var in wanted:
            source = (sources or {}).get(node.var)
            wanted.update(variables(node.value if source is None else source))
            found.append(node)
    return found[::-1]


def _named(value: Any) -> Any:
    """Restore an operator that TVM's importer wrote as a function: ONNX's Clip becomes two."""
    if isinstance(value, Call) and isinstance(value.op, Op) and value.op.name == "relax.call_tir":
        name = value.args[0].name_hint.rstrip("0123456789")
        if name in ("maximum", "minimum") and len(value.args[1].fields) == 2:
            return getattr(relax.op, name)(*value.args[1].fields)
    return value


def _static(value: Any) -> Any:
    """Replace a shape that is known, and the tensor of it, by their values."""
    node = Node(None, value)
    if node.op == "shape_of" and (shape := extents(node.args[0])) is not None:
        return relax.ShapeExpr(shape)
    if node.op == "shape_to_tensor" and isinstance(node.args[0], relax.ShapeExpr):
        return relax.const(np.array([int(size) for size in node.args[0].values]), "int64")
    return value


def _move(node: Node) -> Callable[[Any], Any] | None:
    """The change of order or shape that an operator makes; None for other operators."""
    shape = extents(node.var)
    if node.op == "permute_dims":
        given = node.attrs.axes
        axes = None if given is None else [int(axis) for axis in given]
        return lambda values: np.ascontiguousarray(values.transpose(axes))
    if node.op in ("reshape", "expand_dims", "squeeze") and shape is not None:
        return lambda values: values.reshape(shape)
    return None


def _folded(node: Node) -> Any:
    """Compute a cheap operator on constants; None for any other."""
    constants: list[Any] = [constant_of(arg) for arg in node.args]
    if not constants or constants[0] is None:
        return None
    first, move = constants[0], _move(node)
    if move is not None:
        return move(first)
    if node.op == "isnan":
        return np.isnan(first)
    if node.op == "astype" and {str(first.dtype), str(node.attrs.dtype)} <= _REAL:
        return first.astype(str(node.attrs.dtype))
    if any(constant is None for constant in constants):
        return None
    if node.op == "where":
        return np.where(*constants)
    if any(constant.dtype.kind not in "iub" for constant in constants):
        return None
    if node.op == "take" and str(node.attrs.mode) == "wrap":
        return np.asarray(np.take(first, constants[1], node.attrs.axis, mode="wrap"))
    return np.asarray(getattr(np, node.op)(*constants)) if node.op in _OF_INDICES else None
