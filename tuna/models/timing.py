"""Checks a built model against ONNX's reference and times it in turn with onnxruntime. Imports TVM's runtime and onnx."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from onnx.reference.op_run import OpRun
from tvm import relax

from tuna.errors import BadInput
from tuna.models.build import tensors
from tuna.models.importer import real_inputs

_ROUNDS = 5
#: Added to an output's largest magnitude: a sigmoid far below 0 is exact to fewer digits.
_SMALL = 1e-3
#: A round runs each for about this long.
_ROUND_S = 0.1


def compare(model: Any, library: Path, seed: int, *, rivals: bool) -> dict[str, Any]:
    """Errors by what they are against, milliseconds of CPU time of this thread by contender, milliseconds by function.

    An error is the largest over the largest magnitude of an output. With `rivals`, onnxruntime takes part where it is installed.
    """
    inputs = _random_inputs(model, seed)
    machine, given = _loaded(library, inputs)
    ours = _answer(machine, given)
    errors = {"reference": _error(ours, _reference(model, inputs))}
    contenders: dict[str, Callable[[], object]] = {"tuna": lambda: machine["main"](*given)}
    if rivals and importlib.util.find_spec("onnxruntime"):
        contenders["onnxruntime"] = run = _onnxruntime(model, inputs)
        errors["onnxruntime"] = _error(ours, run())
    return {"errors": errors, "times_ms": _in_turn(contenders), "shares": _shares(machine, given)}


def error_of(model: Any, library: Path, seed: int) -> float:
    """The error against ONNX's reference alone."""
    inputs = _random_inputs(model, seed)
    return _error(_answer(*_loaded(library, inputs)), _reference(model, inputs))


def _loaded(library: Path, inputs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The virtual machine of a built model, and the inputs as it takes them."""
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    return machine, [tvm.runtime.tensor(array) for array in inputs.values()]


def _answer(machine: Any, given: list[Any]) -> list[Any]:
    return [tensor.numpy() for tensor in _outputs(machine["main"](*given))]


def _random_inputs(model: Any, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    found = {}
    for value in tensors(real_inputs(model)):
        kind = np.dtype(value["dtype"])
        if kind.kind != "f":
            raise BadInput(f"The input {value['name']} is of type {kind}; only floating-point inputs can be drawn.")
        found[value["name"]] = generator.standard_normal(value["shape"]).astype(kind)
    return found


def _reference(model: Any, inputs: dict[str, Any]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    return list(ReferenceEvaluator(model, new_ops=[BatchNormalization]).run(None, inputs))


class BatchNormalization(OpRun):
    """As in inference: that of ONNX's reference takes the statistics of the batch for models below opset 14."""

    op_domain = ""

    def _run(self, x: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: Any = None, **_training: Any) -> Any:
        ones = (1,) * (x.ndim - 2)
        scale, bias, mean, var = (part.reshape(-1, *ones) for part in (scale, bias, mean, var))
        return ((scale * (x - mean) / np.sqrt(var + epsilon) + bias).astype(x.dtype),)


def _outputs(answer: Any) -> list[Any]:
    return [answer] if hasattr(answer, "numpy") else list(answer)


def _error(ours: list[Any], expected: list[Any]) -> float:
    if len(ours) != len(expected):
        raise BadInput(f"The built model has {len(ours)} outputs, not {len(expected)}.")
    worst = 0.0
    for found, right in zip(ours, expected, strict=True):
        if found.shape != right.shape or not np.all(np.isfinite(found)):
            return sys.float_info.max
        scale = float(np.max(np.abs(right))) + _SMALL
        worst = max(worst, float(np.max(np.abs(found.astype(np.float64) - right))) / scale)
    return worst


def _onnxruntime(model: Any, inputs: dict[str, Any]) -> Callable[[], list[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda: list(session.run(None, inputs))


def _in_turn(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Rounds in which each runs; the median of a round's runs would hide what a round shares, so their mean is kept."""
    numbers = {}
    for name, run in contenders.items():
        run()
        numbers[name] = max(1, round(_ROUND_S / max(_thread_s(run, 1), 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_ROUNDS):
        for name, run in contenders.items():
            found[name].append(1e3 * _thread_s(run, numbers[name]) / numbers[name])
    return found


def _thread_s(run: Callable[[], object], number: int) -> float:
    started = time.thread_time()
    for _ in range(number):
        run()
    return time.thread_time() - started


def _shares(machine: Any, given: list[Any]) -> dict[str, float]:
    """Milliseconds of each function that the model calls in a run, the runtime's own included; medians of a few runs."""
    spent: Counter[str] = Counter()
    started = 0

    def instrument(_function: Any, name: str, before: bool, _value: Any, *_args: Any) -> int:
        nonlocal started
        if before:
            started = time.thread_time_ns()
        else:
            spent[name] += time.thread_time_ns() - started
        return 0

    machine.set_instrument(instrument)
    runs = []
    for _ in range(_ROUNDS):
        spent.clear()
        machine["main"](*given)
        runs.append(dict(spent))
    names = {name for run in runs for name in run}
    return {name: statistics.median(run.get(name, 0) for run in runs) / 1e6 for name in sorted(names)}
