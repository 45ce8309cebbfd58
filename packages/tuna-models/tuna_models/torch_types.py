"""Writes out the conversions of types that operators of PyTorch do by themselves, such as the whole
numbers that it makes of truth values to add them up. TVM's importer leaves them out. Imports torch.
"""

from __future__ import annotations

from typing import Any

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
#: Those that PyTorch also has for truth values, as other functions of them.
_OF_TRUTH_VALUES = frozenset({"add", "mul", "maximum", "minimum"})
#: Operators that are not of single values, but convert as those do.
_OTHERS = frozenset({"cat", "cumsum", "cumprod"})
#: Operators whose first argument keeps its type.
_CONDITIONAL = frozenset({"where"})


def written_out(program: Any) -> Any:
    """Insert a conversion before each operator that computes in another type than an argument has;
    change the decomposed program, and return it."""
    import torch

    graph = program.graph
    for node in list(graph.nodes):
        kind = _computed(node)
        if kind is None:
            continue
        name = _name(node)
        first = 1 if name in _CONDITIONAL else 0
        with graph.inserting_before(node):
            node.args = tuple(
                arg if place < first else _converted(graph, arg, kind)
                for place, arg in enumerate(node.args)
            )
            if node.target is torch.ops.aten.div.Tensor_mode and isinstance(node.args[1], int):
                divisor = graph.call_function(
                    torch.ops.aten.scalar_tensor.default, node.args[1:2], {"dtype": kind}
                )
                node.args = (node.args[0], divisor, *node.args[2:])
        if name in _OF_TRUTH_VALUES and node.meta["val"].dtype is torch.bool:
            with graph.inserting_after(node):
                comparison = graph.call_function(torch.ops.aten.ne.Scalar, (node, 0))
            comparison.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(comparison)
            comparison.args = (node, 0)
            node.meta["val"] = node.meta["val"].to(kind)
    return program


def _computed(node: Any) -> Any:
    """Return the type in which an operator computes; None for one that takes its arguments as they
    are."""
    import torch

    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    name, answer = _name(node), node.meta["val"].dtype
    if name not in _OTHERS and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    if answer is not torch.bool:
        return answer
    if name not in _COMPARISONS | _OF_TRUTH_VALUES:
        return None
    one, other = (getattr(arg, "meta", {}).get("val", arg) for arg in node.args[:2])
    kind = torch.result_type(one, other)
    return torch.int32 if kind is torch.bool else kind


def _converted(graph: Any, arg: Any, kind: Any) -> Any:
    """The argument in another type, if it is a tensor or a list of them."""
    import torch

    if isinstance(arg, list | tuple):
        return [_converted(graph, one, kind) for one in arg]
    value = getattr(arg, "meta", {}).get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is kind:
        return arg
    found = graph.call_function(torch.ops.aten._to_copy.default, (arg,), {"dtype": kind})
    found.meta["val"] = value.to(kind)
    return found


def _name(node: Any) -> str:
    return str(node.target.__name__).split(".")[0]
