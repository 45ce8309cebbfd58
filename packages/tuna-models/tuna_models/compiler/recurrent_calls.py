"""Calls of the steps of recurrent layers. Imports TVM.

The importer writes the function for any CPU; `specialised` makes that of a target out of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ml_dtypes
import numpy as np
from tvm import relax

from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels.instructions import SETS, DotProduct
from tuna.libraries.tvm.kernels.machine import Machine
from tuna_models.compiler import recurrent_loops
from tuna_models.compiler.graph import Node, constant_of
from tuna_models.compiler.recurrent_steps import Steps

_ATTRIBUTE = "tuna.recurrent"


def call(builder: Any, steps: Steps, operands: Sequence[Any]) -> list[Any]:
    """The answers and last states of the layer in a module that is built."""
    generic = Machine(SETS[-1].width, SETS[-1].registers, 1 << 15, 1 << 19)
    function = recurrent_loops.function(steps, generic, _kinds(operands), None)
    function = function.with_attr(_ATTRIBUTE, json.dumps(asdict(steps)))
    types = [relax.TensorType(shape, "float32") for shape in steps.results]
    variable = builder.add_func(function, steps.kind.lower())
    results = builder.emit(relax.call_tir(variable, list(operands), types))
    return [builder.emit(relax.TupleGetItem(results, place)) for place in range(len(types))]


def product_of(node: Node, functions: Mapping[Any, Any]) -> Any:
    """The part of the inputs that an operator reads if it calls a function of steps."""
    if node.op != "call_tir" or _ATTRIBUTE not in (functions[node.args[0]].attrs or {}):
        return None
    return node.args[1].fields[0]


def specialised(
    function: Any, operands: Sequence[Any], machine: Machine, *, in_bf16: bool
) -> tuple[Any, Sequence[Any]]:
    """The function for a machine and its operands, of one that `call` wrote.

    Products of a state that is rounded to bytes are sums of bytes, if the weights are, and the
    machine has an instruction for them; with `in_bf16` others are in bfloat16, if the weights are
    known.
    """
    known: dict[str, Any] = json.loads(str(function.attrs[_ATTRIBUTE]))
    lists = {name: tuple(known[name]) for name in ("reverse", "functions")}
    steps = Steps(**known | lists)
    product, weights, *others = operands
    values, kind = constant_of(weights), None
    if steps.dynamic:
        kind = DataType.INT8 if values is not None and values.dtype == np.int8 else None
    elif in_bf16 and values is not None:
        kind = DataType.BF16
    dot = None if kind is None else machine.dot_of(kind)
    if dot is not None and values is not None:
        weights = relax.const(_words(values, dot))
        if steps.dynamic:
            others = [*others, relax.const(values.sum(axis=2, dtype=np.int32))]
    operands = [product, weights, *others]
    return recurrent_loops.function(steps, machine, _kinds(operands), dot), operands


def _words(weights: np.ndarray, dot: DotProduct) -> np.ndarray:
    """Weights as words of adjacent units."""
    kinds = {"bfloat16": ml_dtypes.bfloat16, "int8": np.int8, "int16": np.int16}
    more = -weights.shape[2] % dot.word
    whole = np.pad(weights, [(0, 0), (0, 0), (0, more), (0, 0)]).astype(kinds[dot.weights])
    ways, blocks, units, columns = whole.shape
    parts = whole.reshape(ways, blocks, units // dot.word, dot.word, columns)
    adjacent = np.ascontiguousarray(parts.transpose(0, 1, 2, 4, 3))
    return adjacent.view(dot.stored).reshape(ways, blocks, -1, columns)


def _kinds(operands: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and types of tensors."""
    shapes = (tuple(int(extent) for extent in each.ty.shape.values) for each in operands)
    return [(shape, str(each.ty.dtype)) for shape, each in zip(shapes, operands, strict=True)]
