"""The operators between a value of an ONNX model and its outputs or inputs, and what follows for
inputs that are drawn for it. Imports onnx."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from tuna_models.reading.bodies import constants_of

#: Operators that move values.
MOVING = {
    *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand"),
    *("Tile", "Concat", "Split", "DepthToSpace", "SpaceToDepth", "Gather", "GatherElements"),
    *("GatherND", "Where", "Trilu", "Pad"),
}
_SELECTING = {"Where", "Gather", "GatherElements", "GatherND"}
#: Operators that order values, or of which each answer is one of them.
CHOOSING = {"ArgMax", "ArgMin", "TopK", "Hardmax"}
_ORDERING = {
    *("Max", "Min", "Clip", "Relu", "ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool"),
    *("Abs", "Neg", "Sign", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    *("IsInf", "IsNaN", "Not", "And", "Or", "LeakyRelu", "Exp", "Sigmoid", "Tanh"),
    *CHOOSING,
}
#: Operators on whole numbers whose answers are exact, and wrap around.
_WHOLE = {
    *("Add", "Sub", "Mul", "Div", "Mod", "Sum", "ReduceSum", "ReduceProd", "CumSum", "Cast"),
    *("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"),
}
#: Operators that jump where real values pass an edge.
_JUMPING = {
    *("Round", "Floor", "Ceil", "Mod", "Sign", "Equal", "Greater", "GreaterOrEqual"),
    *("Less", "LessOrEqual", *CHOOSING),
}
_SHAPED = {"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"}
_BYTES = (TensorProto.UINT8, TensorProto.INT8)
#: Operators that sum products, and those whose outputs or inputs are quantised tensors
LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
_QUANTISED = {
    *("DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv"),
    *("QLinearMatMul", "ConvInteger", "MatMulInteger"),
}
_INDEXING = {"Gather", "GatherElements", "GatherND", "ScatterElements", "OneHot"}
_REAL = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_NARROW = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16)
#: Operators with a zero point, and its place behind the values.
_ZERO_POINTS = {
    "DequantizeLinear": {0: 2},
    "QLinearConv": {0: 2},
    "QLinearMatMul": {0: 2, 3: 5},
    "ConvInteger": {0: 2},
    "MatMulInteger": {0: 2, 1: 3},
}


class OnnxGraph:
    """A model's graph, read from its values forwards and backwards."""

    def __init__(self, model: Any) -> None:
        self._readers: dict[str, list[Any]] = defaultdict(list)
        self._makers: dict[str, Any] = {}
        self._constants = constants_of(model.graph)
        for node in model.graph.node:
            for name in node.input:
                self._readers[name].append(node)
            self._makers |= dict.fromkeys(filter(None, node.output), node)
        self.nodes = list(model.graph.node)
        self.outputs = [value.name for value in model.graph.output]
        self._inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}

    def behind(self, name: str) -> Iterator[Any]:
        """Yield the operators that read a value or what is made of it."""
        seen, names = set[int](), [name]
        while names:
            for node in self._readers.get(names.pop(), ()):
                if id(node) not in seen:
                    seen.add(id(node))
                    yield node
                    names += [each for each in node.output if each]

    def is_ordered(self, name: str) -> bool:
        """Whether what reads a value may take infinities: it is only ordered and moved."""
        return all(node.op_type in {*MOVING, *_ORDERING} for node in self.behind(name))

    def is_whole(self, name: str) -> bool:
        """Whether what is made of whole numbers are others, by arithmetic."""
        nodes = list(self.behind(name))
        allowed = {*MOVING, *_WHOLE, *_ORDERING} - {"Exp", "Sigmoid", "Tanh"}
        return any(node.op_type in {*_WHOLE, *_ORDERING, "Neg"} for node in nodes) and all(
            node.op_type in allowed and _attribute(node, "to") not in (*_REAL, TensorProto.BOOL)
            for node in nodes
        )

    def is_position(self, name: str) -> bool:
        """Whether whole numbers become real ones, and are no mask."""
        if self._inputs.get(name, 0) not in (TensorProto.INT32, TensorProto.INT64):
            return False
        nodes = list(self.behind(name))
        real = any(node.op_type == "Cast" and _attribute(node, "to") in _REAL for node in nodes)
        return real and not self._hides(name)

    def is_index(self, name: str) -> bool:
        """Whether an input is read by operators alone that count negative indices from the end."""
        return all(node.op_type in _INDEXING for node in self._ends_of(name))

    def mask(self, one: Mapping[str, Any], array: Any) -> str:
        """The way in which an input hides values: `added` to them, or `chosen` by truth; empty: it
        hides none."""
        kind, name = array.dtype, one["name"]
        if one.get("bounds") is not None:
            return ""
        if kind.kind == "b" or (kind.kind in "iu" and kind.itemsize > 1):
            return "" if self.is_position(name) or self.is_whole(name) else "chosen"
        if kind.kind in "iu":
            return "chosen" if self._hides(name) else ""
        ends = list(self._ends_of(name))
        added = ends and all(node.op_type == "Add" and self._is_score(node, name) for node in ends)
        return "added" if added else ""

    def zero_point(self, name: str) -> int:
        """The number that stands for zero in an input; 0 where no operator says so."""
        for node in self._ends_of(name):
            for place, zero in _ZERO_POINTS.get(node.op_type, {}).items():
                if zero < len(node.input) and self._source(node.input[place]) == name:
                    known = self._number(node.input[zero])
                    if known is not None:
                        return int(known)
        return 0

    def step(self, name: str) -> float | None:
        """The distance between the numbers that an input is rounded to at once; None: to none, or
        only after it was changed."""
        for node in self._ends_of(name):
            if node.op_type in ("Round", "Floor", "Ceil"):
                return 1.0
            if node.op_type == "QuantizeLinear":
                return self._number(node.input[1])
        return None

    def is_exact(self, name: str) -> bool:
        """Whether a value is an input's or a constant's, moved or chosen, or whole numbers that are
        computed of such: every right kernel makes the same of it."""
        seen, names = set[str](), [name]
        while names:
            each = names.pop()
            if each in seen or each in self._constants:
                continue
            seen.add(each)
            node = self._makers.get(each)
            if node is None:
                continue
            if node.op_type not in {*MOVING, *_ORDERING} - {"Exp", "Sigmoid", "Tanh", "LeakyRelu"}:
                return False
            names += [given for given in node.input if given]
        return True

    def is_quotient_exact(self, name: str) -> bool:
        """Whether a tensor is quantised from exact values by a power of two, so that ties are."""
        node = self._makers.get(name)
        if node is None or node.op_type != "QuantizeLinear":
            return False
        scale = self._number(node.input[1])
        return bool(scale and math.frexp(scale)[0] == 0.5) and self.is_exact(node.input[0])

    def is_real(self, name: str) -> bool:
        """Whether a quantised tensor is rounded from sums of products of real values, of which not
        both factors are bytes."""
        names, seen = [*self._makers[name].input[:1]] if name in self._makers else [], set[str]()
        while names:
            node = self._makers.get(each := names.pop())
            if node is None or each in seen or node.op_type in _QUANTISED:
                continue
            seen.add(each)
            factors = node.input[:2] if node.op_type in LAYERS else ()
            if not all(map(self._is_of_bytes, factors)):
                return True
            names += [source for source in node.input if source]
        return False

    def _is_of_bytes(self, name: str) -> bool:
        """Whether a value is a dequantised tensor of eight bits in another shape, or weights."""
        while (node := self._makers.get(name)) is not None and node.op_type in _SHAPED:
            name = node.input[0]
        if node is None or node.op_type != "DequantizeLinear" or _attribute(node, "block_size"):
            return False
        source, scale, zero = map(self._constants.get, [*node.input, ""][:3])
        if source is not None:
            return source.data_type in _BYTES
        is_one = scale is not None and math.prod(scale.dims) == 1
        return is_one and (zero is None or zero.data_type in _BYTES)

    def narrows(self) -> bool:
        """Whether real values are cast to whole numbers of 16 bits or fewer, which large ones are
        not."""
        return any(
            node.op_type == "Cast" and _attribute(node, "to") in _NARROW for node in self.nodes
        )

    def jumps(self) -> bool:
        """Whether an operator in the middle jumps by an ulp of what was computed before."""
        # of these `right_answers.py` says what is right besides; of Hardmax it does not
        ends = {id(self._makers.get(name)) for name in self.outputs}
        ends -= {id(node) for node in self.nodes if node.op_type == "Hardmax"}
        return any(
            (node.op_type in _JUMPING or _whole_cast(node))
            and id(node) not in ends
            and not all(self.is_exact(name) for name in node.input if name)
            for node in self.nodes
        )

    def _hides(self, name: str) -> bool:
        """Whether an input is used as truth: compared, cast to it, or subtracted from one."""
        for node in self._ends_of(name, casts=True):
            if node.op_type in ("Equal", "Not", "Where", "And", "Or", "Greater", "Less"):
                return True
            if _attribute(node, "to") == TensorProto.BOOL:
                return True
            if node.op_type == "Sub" and self._number(node.input[0]) == 1:
                return True
        return False

    def _ends_of(self, name: str, *, casts: bool = False) -> Iterator[Any]:
        """Yield the first operators that do more with a value than move it, or cast it."""
        names, seen = [name], set[int]()
        while names:
            current = names.pop()
            for node in self._readers.get(current, ()):
                if id(node) in seen:
                    continue
                seen.add(id(node))
                moves = node.op_type in MOVING - _SELECTING and node.input[0] == current
                real = casts and node.op_type == "Cast"
                if moves or (real and _attribute(node, "to") != TensorProto.BOOL):
                    names += node.output
                else:
                    yield node

    def _source(self, name: str) -> str:
        """The name of a value before it was moved."""
        while (node := self._makers.get(name)) is not None and node.op_type in MOVING - _SELECTING:
            name = node.input[0]
        return name

    def _is_score(self, node: Any, name: str) -> bool:
        """Whether a sum with an input goes to Softmax alone, as a mask's does."""
        place = [self._source(each) for each in node.input].index(name)
        other = self._source(node.input[1 - place])
        if other in self._constants or (other in self._inputs and place == 0):
            return False
        return self._is_normalised(node, 1)

    def _is_normalised(self, node: Any, sums: int) -> bool:
        """Whether an answer goes to Softmax alone, by at most so many other sums."""
        ends = list(self._ends_of(node.output[0]))
        return bool(ends) and all(
            each.op_type in ("Softmax", "LogSoftmax")
            or (sums > 0 and each.op_type == "Add" and self._is_normalised(each, sums - 1))
            for each in ends
        )

    def _number(self, name: str) -> float | None:
        """A single constant; None for others, and of several numbers."""
        tensor = self._constants.get(name)
        if tensor is None or math.prod(tensor.dims) != 1:
            return None
        return float(np.asarray(numpy_helper.to_array(tensor)).reshape(()))


def _attribute(node: Any, name: str) -> int:
    return next((int(each.i) for each in node.attribute if each.name == name), 0)


def _whole_cast(node: Any) -> bool:
    return node.op_type == "Cast" and _attribute(node, "to") not in (*_REAL, TensorProto.BOOL)
