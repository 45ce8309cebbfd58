"""Folds the parts of an ONNX graph that depend on shapes and constants alone.

Exporters write `Shape`, `Slice`, `Concat` and arithmetic before a `Reshape` or `Resize`, of which
TVM's importer needs the result. Branches and loops that they decide are unrolled. The shapes of the
inputs are fixed before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tuna.common.messages import counted
from tuna_models.arguments import TYPES
from tuna_models.names import quoted
from tuna_models.reading import costs, loops, wellformed
from tuna_models.reading.answers import answer_bytes
from tuna_models.reading.bodies import Inside, names_read, subgraphs, version_of
from tuna_models.reading.inference import inferred
from tuna_models.reading.onnx_reference import evaluator
from tuna_models.reading.whole_constants import MOVING, Product, is_final, product_of, write
from tuna_models.refusals import DAMAGED, Refusal

#: The first version of ONNX's operators whose Unsqueeze takes its axes as an input.
_AXES_ARE_INPUTS = 13


def fold(model: Any) -> Any:
    """Replace those operators by constants; the model itself where nothing can be computed.

    Each round finds shapes that depend on those of the round before, or an inner branch.
    """
    constants: dict[str, Any] = {}
    while True:
        products = dict[str, Product]()
        known, found, shapes = _computed(model, constants, products)
        if not found and not any(any(subgraphs(node)) for node in model.graph.node):
            return model
        before, model = model, _replaced(model, found, products)
        written = _write_out(model, known, shapes)
        if not written and _size(model) == _size(before):
            return model


def _size(model: Any) -> tuple[int, int]:
    """The numbers of operators and of constants."""
    return len(model.graph.node), len(model.graph.initializer)


def _computed(
    model: Any, read: dict[str, Any], products: dict[str, Product]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return all known values by name, of them the outputs of operators, and known shapes.

    `read` caches the values of initializers; `products` gets what is whole numbers times scales.
    """
    shapes, empty, types = _shapes(model)
    inputs = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name not in read:
            try:
                read[tensor.name] = numpy_helper.to_array(tensor)
            except (ValueError, TypeError, KeyError):
                fault = wellformed.tensor_fault(tensor, counted_bytes=math.inf)
                fault = fault or "has strings that are not UTF-8"
                raise Refusal(f"the constant {quoted(tensor.name)} {fault}", DAMAGED) from None
    known, constants = read | empty, {*read, *inputs}
    opset = version_of(model, "")
    constants |= {node.output[0] for node in model.graph.node if is_final(node)}
    for node in model.graph.node:
        if node.op_type == "Shape" and node.input[0] in shapes:
            part = {attribute.name: attribute.i for attribute in node.attribute}
            extents = shapes[node.input[0]][part.get("start") : part.get("end")]
            known[node.output[0]] = np.array(extents, np.int64)
        elif node.op_type == "CastLike" and node.input[0] in known and node.output[0] in types:
            known[node.output[0]] = np.asarray(known[node.input[0]]).astype(types[node.output[0]])
        elif node.op_type == "Constant" or _is_decided(node, known):
            given = [np.asarray(known[name]) for name in node.input if name]
            most = max(costs.KEPT_BYTES, sum(array.nbytes for array in given))
            # a type such as int4, which only constants have, is decoded whatever that takes
            if node.op_type == "Constant" or any(str(array.dtype) not in TYPES for array in given):
                most = costs.memory_bytes()
            if answer_bytes(node, known, opset) > most:
                continue
            values = _run(model, node, known)
            if any(np.asarray(value).nbytes > most for value in values):
                continue
            known.update(zip(node.output, values, strict=False))
            product = _product(model, node, known, products)
            if product is not None:
                products[node.output[0]] = product
    computed = {name: value for name, value in known.items() if name not in constants}
    return known, computed, shapes


def _product(
    model: Any, node: Any, known: Mapping[str, Any], products: Mapping[str, Product]
) -> Product | None:
    """The whole numbers and scales of an operator's answer, None for anything else."""
    if node.op_type in MOVING and node.input[0] in products:

        def move(values: Any) -> Any:
            (found,) = _run(model, node, {**known, node.input[0]: values})
            return found

        return products[node.input[0]].moved(move)
    return product_of(node, known)


def _shapes(
    model: Any,
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any], dict[str, np.dtype[Any]]]:
    """Fully known shapes, the tensors among them that have no values, and types of numbers.

    What is computed of these alone is a constant. TVM's sum of no values is what was in memory.
    """
    known = inferred(model).graph
    shapes, empty, types = {}, {}, {}
    for value in [*known.value_info, *known.input, *known.output]:
        tensor = value.type.tensor_type
        if tensor.elem_type not in (0, onnx.TensorProto.STRING):
            types[value.name] = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if tensor.HasField("shape"):
            extents = [
                extent.dim_value if extent.HasField("dim_value") else -1
                for extent in tensor.shape.dim
            ]
            if min(extents, default=0) >= 0:
                shapes[value.name] = tuple(extents)
                if 0 in extents and value.name in types:
                    empty[value.name] = np.zeros(extents, types[value.name])
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in known.initializer}
    return shapes, empty, types


def _is_decided(node: Any, known: dict[str, Any]) -> bool:
    if node.op_type in costs.RANDOM or any(subgraphs(node)):
        return False
    return bool(node.input) and all(name in known for name in node.input if name)


def _run(model: Any, node: Any, known: dict[str, Any]) -> list[Any]:
    """The outputs of one operator; none where the reference cannot compute it, or at random."""
    if node.op_type in costs.RANDOM:
        return []
    names = [name for name in dict.fromkeys(node.input) if name]
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(np.asarray(known[name]).dtype),
            np.shape(known[name]),
        )
        for name in names
    ]
    outputs = [helper.make_tensor_value_info(name, 0, None) for name in node.output]
    graph = helper.make_graph([node], "one", inputs, outputs)
    single = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        return list(evaluator(single).run(None, {name: np.asarray(known[name]) for name in names}))
    except Exception:  # its operators raise whatever they do; the operator stays
        return []


def _replaced(model: Any, found: dict[str, Any], products: Mapping[str, Product]) -> Any:
    """Copy the model with constants for fully computed operators, and without inferred shapes.
    `products` stay operators on two constants."""
    copy = type(model)()
    copy.CopyFrom(model)
    left = [node for node in copy.graph.node if not all(name in found for name in node.output)]
    used = {name for node in left for name in names_read(node)} | {
        value.name for value in copy.graph.output
    }
    written = [
        write(copy.graph, name, products[name]) for name in found if name in used & products.keys()
    ]
    del copy.graph.node[:]
    copy.graph.node.extend([*written, *left])
    del copy.graph.value_info[:]
    copy.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name)
        for name, value in found.items()
        if name in used and name not in products
    )
    return copy


def _write_out(model: Any, known: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Replace each branch and loop that `known` values and shapes decide; return whether there was
    any."""
    graph, nodes, changed = model.graph, list[Any](), False
    by_input = version_of(model, "") >= _AXES_ARE_INPUTS
    around = _Around(graph, known, shapes, by_input, partial(_run, model))
    for node in graph.node:
        writer = _WRITERS.get(node.op_type)
        found = None if writer is None else writer(around, node)
        nodes += [node] if found is None else found
        changed = changed or found is not None
        if len(nodes) > costs.MAX_OPERATORS:
            why = f"written out it makes more than {costs.MAX_OPERATORS:,} operators of the model"
            raise Refusal.of(node, why, "export it with fewer iterations")
    if changed:
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return changed


@dataclass(frozen=True)
class _Around:
    """The graph round a branch or loop, and what is known of its values."""

    graph: Any
    known: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    by_input: bool  #: True if axes are inputs of operators, not attributes
    run: Callable[[Any, dict[str, Any]], list[Any]]  #: outputs of an operator of known values

    def constant(self, name: str, value: Any) -> str:
        """Add a constant; returns its name."""
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def expanded(self, value: str, axis: int, name: str) -> Any:
        """An operator that adds an axis."""
        if not self.by_input:
            return helper.make_node("Unsqueeze", [value], [name], axes=[axis])
        axes = self.constant(f"{name}/axes", np.array([axis], np.int64))
        return helper.make_node("Unsqueeze", [value, axes], [name])


def _branch(around: _Around, node: Any) -> list[Any] | None:
    known = around.known
    if node.input[0] not in known:
        return None
    if np.size(known[node.input[0]]) != 1:
        why = f"its condition has {counted(np.size(known[node.input[0]]), 'value')}"
        raise Refusal.of(node, why, "a condition is one value: correct it, and export it again")
    taken = "then_branch" if np.asarray(known[node.input[0]]).item() else "else_branch"
    body = next(attribute.g for attribute in node.attribute if attribute.name == taken)
    inside = Inside(around.graph, body, f"{node.output[0]}/", {})
    return inside.nodes + _named(inside.outputs, node.output)


def _loop(around: _Around, node: Any) -> list[Any] | None:
    """Unroll a loop; None if values that are not known may end it, or if it has no iteration and so
    no values to stack."""
    body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
    _, _, *carried = [*node.input, "", ""][: max(len(node.input), 2)]
    most = costs.MAX_OPERATORS // max(len(body.node), 1)
    count = loops.iterations(node, body, around.known, around.run, most)
    states = len(body.input) - 2
    kept: list[list[str]] = [[] for _ in body.output[1 + states :]]
    if count is None or (count < 1 and kept):
        return None
    nodes: list[Any] = []
    for number in range(count):
        prefix = f"{node.output[0]}/{number}/"
        for name, value in {"number": np.int64(number), "going": np.bool_(True)}.items():
            around.constant(prefix + name, value)
        names = [prefix + "number", prefix + "going", *carried]
        bound = dict(zip((value.name for value in body.input), names, strict=True))
        inside = Inside(around.graph, body, prefix, bound)
        nodes += inside.nodes
        carried = inside.outputs[1 : 1 + states]
        for values_of, name in zip(kept, inside.outputs[1 + states :], strict=True):
            values_of.append(name)
    nodes += _named(carried, node.output[:states])
    for name, values_of in zip(node.output[states:], kept, strict=False):
        nodes += _stacked(around, values_of, name)
    return nodes


def _scan(around: _Around, node: Any) -> list[Any] | None:
    """Unroll a scan; None if its length is not known, or it has no iteration."""
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    body, scanned = attributes["body"], attributes["num_scan_inputs"]
    states, sources = len(body.input) - scanned, node.input[-scanned:]
    results = len(body.output) - states
    axes, ways = attributes.get("scan_input_axes"), attributes.get("scan_input_directions")
    if len(node.input) != len(body.input) or sources[0] not in around.shapes:
        return None  # before opset 9 the first input are lengths of sequences
    axes, ways = axes or [0] * scanned, ways or [0] * scanned
    count = around.shapes[sources[0]][axes[0]]
    if count * len(body.node) > costs.MAX_OPERATORS or count < 1:
        return None
    carried, nodes = list(node.input[:states]), list[Any]()
    kept: list[list[str]] = [[] for _ in range(results)]
    for number in range(count):
        prefix, parts = f"{node.output[0]}/{number}/", list[str]()
        for place, (source, axis, back) in enumerate(zip(sources, axes, ways, strict=True)):
            index = np.int64(count - 1 - number if back else number)
            at = around.constant(f"{prefix}at/{place}", index)
            parts.append(f"{prefix}part/{place}")
            nodes.append(helper.make_node("Gather", [source, at], [parts[-1]], axis=axis))
        names = [value.name for value in body.input]
        inside = Inside(
            around.graph, body, prefix, dict(zip(names, [*carried, *parts], strict=True))
        )
        nodes += inside.nodes
        carried = inside.outputs[:states]
        for values_of, name in zip(kept, inside.outputs[states:], strict=True):
            values_of.append(name)
    nodes += _named(carried, node.output[:states])
    out_axes = attributes.get("scan_output_axes") or [0] * results
    out_ways = attributes.get("scan_output_directions") or [0] * results
    for name, values_of, axis, back in zip(
        node.output[states:], kept, out_axes, out_ways, strict=True
    ):
        nodes += _stacked(around, values_of[::-1] if back else values_of, name, axis)
    return nodes


_WRITERS: Mapping[str, Callable[[_Around, Any], list[Any] | None]] = {
    "If": _branch,
    "Loop": _loop,
    "Scan": _scan,
}
OPERATORS = frozenset(_WRITERS)


def _named(values: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Give values the names that the graph has for them."""
    return [
        helper.make_node("Identity", [value], [name])
        for value, name in zip(values, names, strict=False)
        if name
    ]


def _stacked(around: _Around, values: Sequence[str], name: str, axis: int = 0) -> list[Any]:
    """Stack the values of all iterations along a new axis."""
    if not name:
        return []
    parts = [f"{name}/{number}" for number in range(len(values))]
    nodes = [around.expanded(value, axis, part) for value, part in zip(values, parts, strict=True)]
    return [*nodes, helper.make_node("Concat", parts, [name], axis=axis)]
