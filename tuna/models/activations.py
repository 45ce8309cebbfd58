"""Recognises activations, however an exporter wrote them, by computing them on sample values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import relax

from tuna.configs.task import ACTIVATIONS
from tuna.libraries.reference import FUNCTIONS
from tuna.models.graph import Graph, Node, constant_of, extents

#: Operators from which exporters make an activation. GELU by tanh has nine.
_MOST = 12
_SAMPLES = np.linspace(-10.0, 10.0, 401)
#: Tolerance for constants in fp32 or with few digits; both forms of GELU differ by 5e-4.
_CLOSE = 2e-5
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "clip": np.clip,
    "negative": np.negative,
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": FUNCTIONS["sigmoid"],
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "nn.relu": FUNCTIONS["relu"],
    "nn.relu6": FUNCTIONS["relu6"],
    "nn.silu": FUNCTIONS["silu"],
    "nn.gelu": FUNCTIONS["gelu"],
    "nn.gelu_tanh": FUNCTIONS["gelu_tanh"],
}


def follows(graph: Graph, var: Any) -> tuple[str, list[Node]] | None:
    """Return the activation that alone reads `var`, with its operators in order; else None."""
    values: dict[Any, Any] = {var: _SAMPLES}
    inside: list[Node] = []
    found = None
    while len(inside) < _MOST:
        node = _next(graph, values, inside)
        if node is None:
            break
        inside.append(node)
        with np.errstate(all="ignore"):
            values[node.var] = _OPERATORS[node.op](*(_value(arg, values) for arg in node.args))
        if _closed(graph, values, inside):
            name = _named(values[node.var])
            found = (name, list(inside)) if name else found
    return found


def _next(graph: Graph, values: Mapping[Any, Any], inside: list[Node]) -> Node | None:
    """The next operator that reads nothing but known values and constants."""
    shape = extents(next(iter(values)))
    for user in (user for var in values for user in graph.users.get(var, [])):
        known = user.op in _OPERATORS and extents(user.var) == shape and user not in inside
        if known and all(_value(arg, values) is not None for arg in user.args):
            return user
    return None


def _value(arg: Any, values: Mapping[Any, Any]) -> Any:
    if isinstance(arg, relax.Var):
        return values.get(arg)
    constant = constant_of(arg)
    if constant is not None:
        return float(constant.reshape(-1)[0]) if constant.size == 1 else None
    return float(getattr(arg, "value", arg))  # a bound of a clip


def _closed(graph: Graph, values: Mapping[Any, Any], inside: list[Node]) -> bool:
    """Whether nothing else reads any of the values but the last."""
    *before, _ = values
    return all(
        all(user in inside for user in graph.users.get(var, [])) and not graph.is_result(var)
        for var in before
    )


def _named(values: Any) -> str | None:
    for name in ACTIVATIONS:
        if np.all(np.abs(values - FUNCTIONS[name](_SAMPLES)) <= _CLOSE):
            return name
    return None
