"""Writes out the conversions of types that operators of PyTorch do by themselves, such as the whole
numbers that it makes of truth values to add them up, and the fp32 in which it sums up fp16. TVM's
importer leaves them out. Imports torch.
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
#: Operators that sum up in fp32 what is fp16, and products, whose sums are conversions themselves.
_SUMS = frozenset(
    {
        *("sum", "mean", "prod", "var", "std", "cumsum", "cumprod", "linalg_vector_norm"),
        *("_softmax", "_log_softmax", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
        *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d"),
        *("mm", "bmm", "addmm", "baddbmm", "convolution"),
    }
)


def written_out(program: Any) -> Any:
    """Insert a conversion before each operator that computes in another type than an argument has;
    change the decomposed program, and return it."""
    import torch

    graph = program.graph
    for node in list(graph.nodes):
        _multiply_by_alpha(graph, node)
        _sum_in_fp32(graph, node)
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


def _multiply_by_alpha(graph: Any, node: Any) -> None:
    """Multiply one operand of a sum or difference by `alpha`, which TVM's importer drops."""
    import torch

    alpha = node.kwargs.get("alpha", 1) if node.op == "call_function" else 1
    place = {"add": 1, "sub": 1, "rsub": 0}.get(_name(node)) if alpha != 1 else None
    if place is None:
        return
    args, answer = list(node.args), node.meta["val"]
    if isinstance(args[place], torch.fx.Node):
        with graph.inserting_before(node):
            operand = _converted(graph, args[place], answer.dtype)
            args[place] = graph.call_function(torch.ops.aten.mul.Scalar, (operand, alpha))
        args[place].meta["val"] = operand.meta["val"].to(answer.dtype)
    else:
        args[place] *= alpha
    node.args = tuple(args)
    node.kwargs = {name: given for name, given in node.kwargs.items() if name != "alpha"}


def _sum_in_fp32(graph: Any, node: Any) -> None:
    import torch

    value = node.meta.get("val")
    if node.op != "call_function" or _name(node) not in _SUMS:
        return
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float16:
        return
    with graph.inserting_before(node):
        node.args = tuple(
            _converted(graph, arg, torch.float32) if _is_half(arg) else arg for arg in node.args
        )
    node.kwargs = {name: given for name, given in node.kwargs.items() if name != "dtype"}
    node.meta["val"] = value.to(torch.float32)
    with graph.inserting_after(node):
        rounded = graph.call_function(
            torch.ops.aten._to_copy.default, (node,), {"dtype": torch.float16}
        )
    rounded.meta["val"] = value
    node.replace_all_uses_with(rounded)
    rounded.args = (node,)


def _is_half(arg: Any) -> bool:
    return str(getattr(getattr(arg, "meta", {}).get("val"), "dtype", "")) == "torch.float16"


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
