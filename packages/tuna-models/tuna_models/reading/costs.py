"""The costs of an ONNX model, for which it is refused before they are paid.

A small file can say much: a Range of constants, a Concat of a tensor with itself 42 times,
functions that call the one before twice. Functions are counted before they are written out, and
`fold` asks its budget before it makes a value or repeats a body. What follows from values that are
not known costs nothing here: the limits of the process are the second wall. Imports onnx.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Any

from onnx import TensorProto

from tuna.common import control_groups
from tuna.common.formats import size
from tuna_models.names import title
from tuna_models.reading.bodies import all_nodes, subgraphs
from tuna_models.reading.known import Value
from tuna_models.refusals import Refusal

#: Most operators of a model, with those of its functions, branches and loops written out.
MAX_OPERATORS = 1 << 15
#: Bytes up to which a computed constant is kept, unless its inputs have as many.
KEPT_BYTES = 16 << 20
#: Most functions and bodies in each other.
_MAX_DEPTH = 64
#: Parts of the memory of the process: that one tensor may have, and all constants together.
_TENSOR_PART, _CONSTANTS_PART = 4, 2


def memory_bytes() -> int:
    """Memory that this process may take: its own limit, else half of the machine's."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return control_groups.memory_bytes() // 2 if limit == resource.RLIM_INFINITY else limit


def check(model: Any) -> None:
    """Raise Refusal for a model with too many operators once its functions are written out, and for
    constants that take too much memory, also those in other files."""
    nodes = model.graph.node
    counter = _Counter(model)
    counts = [counter.count([node]) for node in nodes]
    if sum(counts) > MAX_OPERATORS:
        raise Refusal(
            f"with its functions written out it has {_number(sum(counts))} operators, and"
            f" {MAX_OPERATORS:,} are the most ({_number(max(counts))} of the operator"
            f" {title(nodes[counts.index(max(counts))])})",
            "export it in parts, or with smaller functions",
        )
    budget = ImportBudget()
    for tensor in _constants(model):
        value = Value.of_tensor(tensor)
        budget.check_size(value, f"its constant {tensor.name} is")
        budget.add_constant(value.size_bytes, tensor.name)


def _constants(model: Any) -> Iterable[Any]:
    """Yield the tensors of a model with numbers."""
    for scope in (model.graph, *model.functions):
        tensors = list(getattr(scope, "initializer", ()))
        for node in all_nodes(scope):
            tensors += [each.t for each in node.attribute if each.HasField("t")]
            for body in subgraphs(node):
                tensors += body.initializer
        yield from (tensor for tensor in tensors if tensor.data_type != TensorProto.STRING)


class _Counter:
    """The numbers of operators with functions and bodies written out, each loop once."""

    def __init__(self, model: Any) -> None:
        self._functions = {(each.domain, each.name): each for each in model.functions}
        self._counts: dict[tuple[str, str], int] = {}

    def count(self, nodes: Iterable[Any], depth: int = 0) -> int:
        """The number of operators of these nodes."""
        total = 0
        for node in nodes:
            if depth > _MAX_DEPTH:
                raise Refusal(
                    f"its functions call themselves, or more than {_MAX_DEPTH} others in each"
                    f" other (the operator {title(node)})",
                    "export it with simpler functions",
                )
            key = (node.domain, node.op_type)
            if key in self._functions:
                if key not in self._counts:
                    self._counts[key] = self.count(self._functions[key].node, depth + 1)
                total += self._counts[key]
                continue
            total += 1
            for body in subgraphs(node):
                total += self.count(body.node, depth + 1) + len(body.initializer)
        return total


def size_of(body: Any) -> int:
    """The number of operators of a body, and of its constants, which are copied as well."""
    inner = sum(size_of(each) for node in body.node for each in subgraphs(node))
    return len(body.node) + len(body.initializer) + inner


class ImportBudget:
    """The memory and the number of operators that an import may still take."""

    def __init__(self) -> None:
        memory = memory_bytes()
        self._tensor_bytes = memory // _TENSOR_PART
        self._constants_bytes = memory // _CONSTANTS_PART
        self._constant_bytes = 0  #: bytes of all constants, those that are computed too
        self.operators = 0  #: operators that were written

    def check_iterations(self, node: Any, each: int, count: int) -> None:
        """Raise Refusal where so many more iterations of `each` operators are too many."""
        if self.operators + count * each > MAX_OPERATORS:
            raise Refusal.said_of(
                node,
                f"has {_number(count)} more iterations of {_number(each)} operators each, and"
                f" {MAX_OPERATORS:,} operators are the most",
                "export it with fewer iterations",
            )

    def check_size(self, value: Value, what: Any) -> None:
        """Raise Refusal for too large a tensor, of a node or of what a phrase says."""
        if value.kind and value.size_bytes > self._tensor_bytes:
            much = f"a tensor of {size(value.size_bytes)}, and {size(self._tensor_bytes)} are the"
            hint = _hint(_TENSOR_PART)
            if isinstance(what, str):
                raise Refusal(f"{what} {much} most", hint)
            raise Refusal.said_of(what, f"makes {much} most", hint)

    def add_constant(self, made_bytes: int, what: Any) -> None:
        """Raise Refusal for the constant, of a node or of this name, that is one too much."""
        self._constant_bytes += made_bytes
        if self._constant_bytes > self._constants_bytes:
            last = (
                f"the constant {what}" if isinstance(what, str) else f"the operator {title(what)}"
            )
            raise Refusal(
                f"its constants with those that are computed, up to {last}, have"
                f" {size(self._constant_bytes)}, and {size(self._constants_bytes)} are the most",
                _hint(_CONSTANTS_PART),
            )


def _hint(part: int) -> str:
    return (
        f"that is 1/{part} of the memory of an import, which TUNA_MODEL_MEMORY_MIB sets, and"
        " TUNA_REQUEST_MEMORY_MIB in a service"
    )


def _number(count: int) -> str:
    return f"{count:,}" if count < 10**15 else "more than 10^15"
