"""Bodies for operators of ONNX that it defines in words only, after their definitions there."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import FunctionProto, helper, numpy_helper


def bodies(node: Any, rank: int, version: int) -> list[Any]:
    """Return the function of a node whose first input has this rank; none for others than `has`."""
    if not has(node) or not rank:
        return []
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    function = _BODIES[node.op_type](values, rank, version)
    function.domain, function.name = node.domain, node.op_type
    function.opset_import.append(helper.make_opsetid(node.domain, version))
    return [function]


def has(node: Any) -> bool:
    """Whether a body is here, which TVM's importer lacks or gets wrong."""
    training = any(one.name == "training_mode" and one.i for one in node.attribute)
    return node.op_type == "LpNormalization" or (node.op_type == "BatchNormalization" and training)


def _constant(name: str, values: Any, dtype: Any = np.int64) -> Any:
    tensor = numpy_helper.from_array(np.asarray(values, dtype))
    return helper.make_node("Constant", [], [name], value=tensor)


def _reduced(operator: str, given: str, name: str, axes: list[int], version: int, keep: int) -> Any:
    """Return the operators of a reduction, whose axes were attributes until opset 17."""
    if version < 18 and operator != "ReduceSum":
        return [helper.make_node(operator, [given], [name], axes=axes, keepdims=keep)]
    return [
        _constant(f"{name}_axes", axes),
        helper.make_node(operator, [given, f"{name}_axes"], [name], keepdims=keep),
    ]


def _normalized_by_p(values: dict[str, Any], rank: int, version: int) -> Any:
    """Divide by the norm along an axis; what has the norm 0 stays 0."""
    operator = "ReduceL1" if values.get("p", 2) == 1 else "ReduceL2"
    nodes = [
        *_reduced(operator, "x", "norm", [values.get("axis", -1) % rank], version, 1),
        _constant("zero32", 0.0, np.float32),
        helper.make_node("CastLike", ["zero32", "x"], ["zero"]),
        _constant("one32", 1.0, np.float32),
        helper.make_node("CastLike", ["one32", "x"], ["one"]),
        helper.make_node("Equal", ["norm", "zero"], ["is_zero"]),
        helper.make_node("Where", ["is_zero", "one", "norm"], ["divisor"]),
        helper.make_node("Div", ["x", "divisor"], ["y"]),
    ]
    return FunctionProto(input=["x"], output=["y"], node=nodes)


def _normalized_by_batch(values: dict[str, Any], rank: int, version: int) -> Any:
    """Normalise by the batch's own mean and variance, and let the running ones follow them."""
    axes = [axis for axis in range(rank) if axis != 1]
    shape = [1, -1, *[1] * (rank - 2)]
    nodes = [
        *_reduced("ReduceMean", "x", "mean", axes, version, 1),
        helper.make_node("Sub", ["x", "mean"], ["centered"]),
        helper.make_node("Mul", ["centered", "centered"], ["squares"]),
        *_reduced("ReduceMean", "squares", "var", axes, version, 1),
        _constant("eps32", values.get("epsilon", 1e-5), np.float32),
        helper.make_node("CastLike", ["eps32", "x"], ["eps"]),
        helper.make_node("Add", ["var", "eps"], ["above"]),
        helper.make_node("Sqrt", ["above"], ["deviation"]),
        helper.make_node("Div", ["centered", "deviation"], ["normalized"]),
        _constant("shape", shape),
        helper.make_node("Reshape", ["scale", "shape"], ["scales"]),
        helper.make_node("Reshape", ["bias", "shape"], ["biases"]),
        helper.make_node("Mul", ["normalized", "scales"], ["scaled"]),
        helper.make_node("Add", ["scaled", "biases"], ["y"]),
    ]
    momentum = values.get("momentum", 0.9)
    for name in ("mean", "var"):
        nodes += [
            _constant(f"old32_{name}", momentum, np.float32),
            helper.make_node("CastLike", [f"old32_{name}", f"input_{name}"], [f"old_{name}"]),
            _constant(f"new32_{name}", 1.0 - momentum, np.float32),
            helper.make_node("CastLike", [f"new32_{name}", f"input_{name}"], [f"new_{name}"]),
            _constant(f"flat_{name}", [-1]),
            helper.make_node("Reshape", [name, f"flat_{name}"], [f"own_{name}"]),
            helper.make_node("CastLike", [f"own_{name}", f"input_{name}"], [f"like_{name}"]),
            helper.make_node("Mul", [f"input_{name}", f"old_{name}"], [f"kept_{name}"]),
            helper.make_node("Mul", [f"like_{name}", f"new_{name}"], [f"added_{name}"]),
            helper.make_node("Add", [f"kept_{name}", f"added_{name}"], [f"running_{name}"]),
        ]
    return FunctionProto(
        input=["x", "scale", "bias", "input_mean", "input_var"],
        output=["y", "running_mean", "running_var"],
        node=nodes,
    )


_BODIES = {"LpNormalization": _normalized_by_p, "BatchNormalization": _normalized_by_batch}
OPERATORS = frozenset(_BODIES)
