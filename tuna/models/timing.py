"""Checks a built model against a reference, and times it interleaved with other runtimes.

Imports TVM's runtime and onnx.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from tuna.models import onnx_reference, runtimes
from tuna.models.inputs import largest_error
from tuna.models.process import TOLERANCE
from tuna.models.torch_importer import TorchModel

_ROUNDS = 5
#: Seconds for which a round runs each contender.
_ROUND_S = 0.1
#: Seconds after a run until the threads of TVM's, OpenMP's and onnxruntime's pools have stopped to
#: spin on the cores of the next contender, which took up to three times as long beside them.
_SPINNING_S = 0.5


def clock(threads: int) -> Callable[[], float]:
    """Return the clock in seconds: this thread's CPU time, or wall time for several threads."""
    return time.perf_counter if threads > 1 else time.thread_time


def compare(
    model: Any,
    library: Path,
    inputs: Mapping[str, Any],
    *,
    rivals: bool,
    threads: int = 1,
    untuned: str = "",
) -> dict[str, Any]:
    """Return errors against each reference, milliseconds by contender, milliseconds by function.

    `unanswered` is the reason why the reference could not compute the model. Then, or if its answer
    differs, onnxruntime is run without `rivals` too, and `doubts` are the errors of other runtimes
    against the reference.

    An error is the largest one relative to the largest magnitude of an output, on these `inputs`.
    With `rivals`, onnxruntime and PyTorch take part where they are installed; `untuned` is a
    library built without Tuna's kernels. All use this number of `threads`.
    """
    machine, given = _loaded(library, inputs)
    ours = _answer(machine, given)
    expected, unanswered, errors, doubts = None, "", dict[str, float](), dict[str, float]()
    try:
        expected = _reference(model, inputs)
        errors["reference"] = largest_error(ours, expected)
    except Exception as error:  # its operators raise whatever they do
        unanswered = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
    judged = errors.get("reference", TOLERANCE + 1) <= TOLERANCE
    asked = runtimes.ALL if rivals else {} if judged else {"onnxruntime": runtimes.onnxruntime}
    contenders: dict[str, Callable[[], object]] = {"tuna": lambda: machine["main"](*given)}
    absent: dict[str, str] = {}
    for name, prepare in asked.items():
        try:
            run = _best(prepare(model, list(inputs.values()), threads), clock(threads))
            errors[name] = largest_error(ours, answer := run())
            if expected is not None:
                doubts[name] = largest_error(answer, expected)
        except runtimes.Absent as error:
            absent[name] = str(error)
        except Exception as error:  # each runtime has its own errors
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            absent[name] = f"it cannot run the model: {reason}"
        else:
            contenders |= {name: run} if rivals else {}
    if untuned:
        plain, plain_given = _loaded(Path(untuned), inputs)
        contenders["untuned"] = lambda: plain["main"](*plain_given)
    times_ms, wall_ms = _in_turn(contenders, threads)
    return {
        "errors": errors,
        "unanswered": unanswered,
        "doubts": doubts,
        "times_ms": times_ms,
        "wall_ms": wall_ms,
        "absent": absent,
        "shares": _shares(machine, given, clock(threads)),
    }


def _best(
    ways: Sequence[Callable[[], list[Any]]], now: Callable[[], float]
) -> Callable[[], list[Any]]:
    """The fastest of the ways to run a rival."""
    for way in ways:
        way()
    return min(ways, key=lambda way: min(_seconds(way, 1, now)[0] for _ in range(_ROUNDS)))


def _loaded(library: Path, inputs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The virtual machine of a built model, and the inputs as it takes them."""
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    return machine, [tvm.runtime.tensor(array) for array in inputs.values()]


def _answer(machine: Any, given: list[Any]) -> list[Any]:
    answer = machine["main"](*given)
    tensors = [answer] if hasattr(answer, "numpy") else answer
    return [tensor.numpy() for tensor in tensors]


def _reference(model: Any, inputs: Mapping[str, Any]) -> list[Any]:
    if isinstance(model, TorchModel):
        return model.reference(inputs)
    return onnx_reference.run(model, inputs)


def _in_turn(
    contenders: dict[str, Callable[[], object]], threads: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return times by `clock` and wall times of interleaved rounds.

    The mean of a round's runs counts: their median would hide costs that the runs share.
    """
    numbers, now = {}, clock(threads)
    for name, run in contenders.items():
        run()
        numbers[name] = max(1, round(_ROUND_S / max(_seconds(run, 1, now)[0], 1e-6)))
    times_ms: dict[str, list[float]] = {name: [] for name in contenders}
    wall_ms: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_ROUNDS):
        for name, run in contenders.items():
            if threads > 1:
                time.sleep(_SPINNING_S)
                run()
            taken_s, wall_s = _seconds(run, numbers[name], now)
            times_ms[name].append(1e3 * taken_s / numbers[name])
            wall_ms[name].append(1e3 * wall_s / numbers[name])
    return times_ms, wall_ms


def _seconds(
    run: Callable[[], object], number: int, now: Callable[[], float]
) -> tuple[float, float]:
    """Time by this clock and wall time of `number` runs."""
    wall_s, started = time.perf_counter(), now()
    for _ in range(number):
        run()
    return now() - started, time.perf_counter() - wall_s


def _shares(machine: Any, given: list[Any], now: Callable[[], float]) -> dict[str, float]:
    """Return median milliseconds of each function in a run, with the runtime's own functions."""
    spent: dict[str, float] = defaultdict(float)
    started = 0.0

    def instrument(_function: Any, name: str, before: bool, _value: Any, *_args: Any) -> int:
        nonlocal started
        if before:
            started = now()
        else:
            spent[name] += now() - started
        return 0

    machine.set_instrument(instrument)
    runs = []
    for _ in range(_ROUNDS):
        spent.clear()
        machine["main"](*given)
        runs.append(dict(spent))
    names = {name for run in runs for name in run}
    return {
        name: statistics.median(run.get(name, 0.0) for run in runs) * 1e3 for name in sorted(names)
    }
