"""Operators of an ONNX model, each built alone and given the reference's values: the first that is
wrong. Imports TVM and onnx."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from onnx import helper, inliner, numpy_helper
from tvm.target import codegen

from tuna.libraries.tvm.model_answers import distance
from tuna.libraries.tvm.whole_models import arrays_of
from tuna_models.compiler import build, program
from tuna_models.compiler.build import TaskKernels
from tuna_models.compiler.segments import OPERATORS as ROUNDING
from tuna_models.names import title
from tuna_models.reading import importer, onnx_reference
from tuna_models.reading.bodies import subgraphs
from tuna_models.reading.torch_importer import TorchModel

#: Seconds after which no other operator is built.
_LONG_S = 60.0


def sentence(model: Any, cases: Sequence[Mapping[str, Any]], near: float) -> str:
    """A sentence on the first operator whose answer to one of these inputs differs from the
    reference's by more than `near` of its largest value, or on how many of them are right; empty
    for a program of PyTorch."""
    if isinstance(model, TorchModel):
        return ""
    if model.functions:
        model = inliner.inline_local_functions(model)
    ends_at, right = time.monotonic() + _LONG_S, set[int]()
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for inputs in cases:
        names = dict.fromkeys(name for node in model.graph.node for name in node.output if name)
        values = dict(zip(names, onnx_reference.run(model, inputs, list(names)), strict=True))
        written = [node.output[0] for node in model.graph.node if node.op_type == "Constant"]
        constants = {**weights, **{name: values[name] for name in written}}
        for number, node in enumerate(model.graph.node):
            if time.monotonic() > ends_at:
                break
            fault = _fault(model, node, constants, {**values, **inputs}, near)
            if fault:
                return f"The first operator that is wrong alone is {title(node)}: {fault}."
            if fault is not None:
                right.add(number)
    count = len(model.graph.node)
    return f"{len(right)} of its {count} operators were built alone as well, and are right."


def _fault(
    model: Any,
    node: Any,
    constants: Mapping[str, Any],
    values: Mapping[str, Any],
    near: float,
) -> str | None:
    """The fault of the operator's answers, empty if they are right; None if it is not built
    alone."""
    names = dict.fromkeys(name for name in node.input if name)
    inputs = {name: np.asarray(values[name]) for name in names if name not in constants}
    outputs = [name for name in node.output if name]
    if not inputs or any(subgraphs(node)) or any(name not in values for name in outputs):
        return None
    answers = None
    # whole numbers may decide a shape; TVM raises whatever it does, the model as a whole is built
    whole = {name: array for name, array in inputs.items() if array.dtype.kind in "iu"}
    for known in ({}, whole):
        rest = {name: array for name, array in inputs.items() if name not in known}
        with contextlib.suppress(Exception):
            answers = _answers(model, node, {**constants, **known}, rest, outputs)
            break
    if answers is None:
        return None
    for name, ours in zip(outputs, answers, strict=False):
        right = np.asarray(values[name])
        if ours.dtype != right.dtype or ours.shape != right.shape:
            return f"{name} is {ours.dtype}{ours.shape}, not {right.dtype}{right.shape}"
        if right.dtype.kind == "f":
            error = distance(ours, right)
            if error > near:
                return f"{name} is off by {error:.2g} of its largest value"
            continue
        off = np.abs(ours.astype(np.float64) - right.astype(np.float64))
        # the division before a tie may be rounded otherwise
        many = int(np.sum(off > (1.0 if node.op_type in ROUNDING else 0.0)))
        if many:
            return f"{many} of {off.size} values of {name} differ"
    return ""


def _answers(
    model: Any,
    node: Any,
    constants: Mapping[str, Any],
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
) -> list[Any]:
    """The operator's answers, with kernels by rule and without LLVM's optimisations, which take
    longer than all else."""
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
    graph = helper.make_graph(
        [node],
        "alone",
        [
            helper.make_tensor_value_info(name, kinds[name], array.shape)
            for name, array in inputs.items()
        ],
        [helper.make_tensor_value_info(name, 0, None) for name in outputs],
        [
            numpy_helper.from_array(constants[name], name)
            for name in dict.fromkeys(node.input)
            if name in constants
        ],
    )
    whole = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    mcpu = str(codegen.llvm_get_system_cpu())
    target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 1, "opt-level": 0})
    planned = build.plan(importer.to_relax(whole, "alone"), TaskKernels(target, {}), target)
    run = program.machine_of(planned, target)["main"]
    return arrays_of(run(*map(tvm.runtime.tensor, inputs.values())))
