"""The time of a model in turn with those of other runtimes. Imports TVM's runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from tuna.libraries.tvm.large_pages import use_large_pages
from tuna.libraries.tvm.whole_models import arrays_of
from tuna_models.child_answers import Contenders
from tuna_models.judging import runtimes
from tuna_models.judging.inputs import largest_error

#: Characters of a runtime's reason; onnxruntime says its versions at the end of a long sentence.
_REASON_CHARS = 1000
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
    model: Any, library: Path, inputs: Mapping[str, Any], *, threads: int = 1
) -> Contenders:
    """Return the errors of a built model against other runtimes, milliseconds by contender, and
    why others do not take part.

    onnxruntime and PyTorch take part where they are installed. An error is the largest one relative
    to the largest magnitude of an output, on these `inputs`. All use this number of `threads`.
    """
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    use_large_pages()
    tensors = [tvm.runtime.tensor(array) for array in inputs.values()]
    ours = arrays_of(machine["main"](*tensors))
    contenders: dict[str, Callable[[], object]] = {"tuna": lambda: machine["main"](*tensors)}
    errors, absent = dict[str, float](), dict[str, str]()
    for name, prepare in runtimes.ALL.items():
        try:
            run = _best(prepare(model, list(inputs.values()), threads), clock(threads))
            errors[name] = largest_error(ours, run())
            contenders[name] = run
        except runtimes.Absent as error:
            absent[name] = str(error)
        except Exception as error:  # each runtime has its own errors
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:_REASON_CHARS]
            absent[name] = f"it cannot run the model: {reason}"
    times_ms, wall_ms = _in_turn(contenders, threads) if errors else ({}, {})
    return Contenders(errors=errors, times_ms=times_ms, wall_ms=wall_ms, absent=absent)


def _best(
    ways: Sequence[Callable[[], list[Any]]], now: Callable[[], float]
) -> Callable[[], list[Any]]:
    """The fastest of the ways to run a rival."""
    for way in ways:
        way()
    return min(ways, key=lambda way: min(_seconds(way, 1, now)[0] for _ in range(_ROUNDS)))


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
