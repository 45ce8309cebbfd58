"""The quantised tensors of a model, at which it is cut into segments that are checked one by one.
Imports TVM.

Rounding makes an ulp into a step, and the steps of one layer into other steps of the next: whole
quantised models differ between any two runtimes. From equal integers to the next rounding they do
not, except by one step where the real value lies next to a tie. So a model that is to be checked
returns its quantised tensors, and computes each segment from those that it is given.

They are kept as fp32 (`quantised.py`). Where only the real values of a tensor are read, the cut is
at these. What is shipped is not cut, but the product that makes the real values stays one of its
own (`small_functions.fence`): the shipped model computes the same, bit by bit, as the one in
segments.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler.graph import Graph, needed

#: Operators of ONNX that round, with the number of their outputs that are whole numbers; the other
#: outputs are scales.
OPERATORS: Mapping[str, tuple[int, ...]] = {
    "QuantizeLinear": (0,),
    "DynamicQuantizeLinear": (0, 2),
    "QLinearConv": (0,),
    "QLinearMatMul": (0,),
}
#: Attribute of an imported function: the names of the quantised tensors, its last results.
_ATTRIBUTE = "quantised"


class Form(enum.Enum):
    """A way to write a quantised model."""

    MODEL = enum.auto()  #: the model that is shipped
    TENSORS = enum.auto()  #: the same, and its quantised tensors are results after the others
    #: besides, it has quantised tensors as inputs after the others, from which segments begin
    SEGMENTS = enum.auto()


@dataclass(frozen=True)
class Cut:
    """A quantised tensor where the model is cut."""

    name: str  #: Name in the ONNX graph
    var: Any  #: fp32: whole numbers, or their real values
    zero: Any = None  #: an array, where `var` is (whole number - zero) * scale
    scale: Any = None

    def to_json(self) -> dict[str, Any]:
        """The name, and the numbers by which a worker finds whole numbers in `var`."""
        numbers = {
            name: None if value is None else np.asarray(value, np.float32).tolist()
            for name, value in {"zero": self.zero, "scale": self.scale}.items()
        }
        return {"name": self.name, **numbers}


def returning(model: Any) -> Any:
    """A copy of an ONNX model that also returns its quantised tensors; the model itself where it
    has none."""
    found = names(model.graph)
    if not found:
        return model
    copy = type(model)()
    copy.CopyFrom(model)
    for name in found:
        copy.graph.output.add().name = name
    return copy


def marked(module: Any, model: Any) -> Any:
    """The Relax module of a model that `returning` made."""
    return named(module, names(model.graph))


def named(module: Any, tensors: Sequence[str]) -> Any:
    """The module with the names of its last results, which are quantised tensors."""
    module["main"] = module["main"].with_attr(_ATTRIBUTE, list(tensors))
    return module


def names(graph: Any) -> list[str]:
    """The names of an ONNX graph's quantised tensors."""
    return [
        node.output[place]
        for node in graph.node
        for place in OPERATORS.get(node.op_type, ())
        if place < len(node.output) and node.output[place]
    ]


def split(graph: Graph, module: Any) -> tuple[Graph, list[Cut]]:
    """The graph of an imported module without its quantised tensors as results, and where to cut
    it."""
    quantised = [str(name) for name in (module["main"].attrs or {}).get(_ATTRIBUTE, ())]
    if not quantised:
        return graph, []
    fields = list(graph.result.fields)
    results, ends = fields[: -len(quantised)], fields[-len(quantised) :]
    result = results[0] if len(results) == 1 else relax.Tuple(results)
    whole = {
        name: graph.makers[end].args[0] if graph.makers[end].op == "astype" else end
        for name, end in zip(quantised, ends, strict=True)
        if end in graph.makers  # not a constant
    }
    nodes = needed(graph.nodes, relax.Tuple([result, *whole.values()]))
    graph = replace(graph, nodes=nodes, result=result)
    return graph, [_cut(graph, name, var) for name, var in whole.items()]


def _cut(graph: Graph, name: str, var: Any) -> Cut:
    """The cut at whole numbers, or at their real values if nothing else reads them."""
    real = graph.read_alone(var)
    zero, scale = (None, None) if real is None else real.constants
    if real is None or zero is None or scale is None or not np.all(scale > 0):
        return Cut(name, var)
    return Cut(name, real.vars[-1], zero, scale)
