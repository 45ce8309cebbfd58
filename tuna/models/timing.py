"""Checks a built model against ONNX's reference, or PyTorch, and times it in turn with others. Imports TVM's runtime and onnx."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tuna.errors import BadInput
from tuna.models import onnx_reference, others
from tuna.models.differences import largest_error
from tuna.models.importer import inputs_of
from tuna.models.torch_importer import TorchModel

_ROUNDS = 5
#: A round runs each for about this long.
_ROUND_S = 0.1


def compare(
    model: Any, library: Path, seed: int, *, rivals: bool, recorded: str = "", untuned: str = ""
) -> dict[str, Any]:
    """Errors by what they are against, milliseconds by contender, milliseconds by function.

    An error is the largest over the largest magnitude of an output, on random inputs and on those of the file `recorded`. With
    `rivals`, onnxruntime and PyTorch take part where they are installed; `untuned` is a library built without Tuna's kernels.
    """
    inputs = _random_inputs(model, seed)
    machine, given = _loaded(library, inputs)
    ours = _answer(machine, given)
    errors = {"reference": _error(ours, _reference(model, inputs))}
    if recorded:
        values = _recorded(model, recorded)
        errors["reference on recorded inputs"] = _error(_answer(*_loaded(library, values)), _reference(model, values))
    contenders: dict[str, Callable[[], object]] = {"tuna": lambda: machine["main"](*given)}
    absent: dict[str, str] = {}
    for name, prepare in others.ALL.items() if rivals else ():
        try:
            ways = prepare(model, list(inputs.values()))
        except others.Absent as error:
            absent[name] = str(error)
            continue
        run = _best(ways)
        errors[name] = _error(ours, run())
        contenders[name] = run
    if untuned:
        plain, plain_given = _loaded(Path(untuned), inputs)
        contenders["untuned"] = lambda: plain["main"](*plain_given)
    cpu_ms, wall_ms = _in_turn(contenders)
    return {
        "errors": errors,
        "times_ms": cpu_ms,
        "wall_ms": wall_ms,
        "absent": absent,
        "shares": _shares(machine, given),
    }


def error_of(model: Any, library: Path, seed: int) -> float:
    """The error against ONNX's reference on random inputs alone."""
    inputs = _random_inputs(model, seed)
    return _error(_answer(*_loaded(library, inputs)), _reference(model, inputs))


def _best(ways: Sequence[Callable[[], list[Any]]]) -> Callable[[], list[Any]]:
    """The fastest of the ways to run a rival, by CPU time."""
    for way in ways:
        way()
    return min(ways, key=lambda way: min(_seconds(way, 1)[0] for _ in range(_ROUNDS)))


def _loaded(library: Path, inputs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The virtual machine of a built model, and the inputs as it takes them."""
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    return machine, [tvm.runtime.tensor(array) for array in inputs.values()]


def _answer(machine: Any, given: list[Any]) -> list[Any]:
    return [tensor.numpy() for tensor in _outputs(machine["main"](*given))]


def _random_inputs(model: Any, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    found = {}
    for value in inputs_of(model):
        kind = np.dtype(value["dtype"])
        if kind.kind != "f":
            raise BadInput(f"The input {value['name']} is of type {kind}; only floating-point inputs can be drawn.")
        found[value["name"]] = generator.standard_normal(value["shape"]).astype(kind)
    return found


def _reference(model: Any, inputs: dict[str, Any]) -> list[Any]:
    if isinstance(model, TorchModel):
        return model.reference(inputs)
    return onnx_reference.run(model, inputs)


def _outputs(answer: Any) -> list[Any]:
    return [answer] if hasattr(answer, "numpy") else list(answer)


def _error(ours: list[Any], expected: list[Any]) -> float:
    if len(ours) != len(expected):
        raise BadInput(f"The built model has {len(ours)} outputs, not {len(expected)}.")
    return largest_error(ours, expected)


def _in_turn(contenders: dict[str, Callable[[], object]]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU times of this thread and wall times of rounds in which each runs.

    The mean of a round's runs is kept: their median would hide what a round shares.
    """
    numbers = {}
    for name, run in contenders.items():
        run()
        numbers[name] = max(1, round(_ROUND_S / max(_seconds(run, 1)[0], 1e-6)))
    cpu_ms: dict[str, list[float]] = {name: [] for name in contenders}
    wall_ms: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_ROUNDS):
        for name, run in contenders.items():
            cpu_s, wall_s = _seconds(run, numbers[name])
            cpu_ms[name].append(1e3 * cpu_s / numbers[name])
            wall_ms[name].append(1e3 * wall_s / numbers[name])
    return cpu_ms, wall_ms


def _seconds(run: Callable[[], object], number: int) -> tuple[float, float]:
    """CPU time of this thread and wall time of so many runs."""
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    for _ in range(number):
        run()
    return time.thread_time() - cpu_s, time.perf_counter() - wall_s


def _recorded(model: Any, path: str) -> dict[str, Any]:
    """Inputs from an npz file with an array for each input, by name; nothing in it is executed."""
    found = {}
    with np.load(path, allow_pickle=False) as arrays:
        for value in inputs_of(model):
            name, shape, kind = value["name"], tuple(value["shape"]), np.dtype(value["dtype"])
            if name not in arrays or arrays[name].shape != shape or arrays[name].dtype != kind:
                raise BadInput(f"{Path(path).name} has no array {name} of shape {shape} and type {kind}.")
            found[name] = np.ascontiguousarray(arrays[name])
    return found


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
