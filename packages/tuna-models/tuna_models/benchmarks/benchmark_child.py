"""Child process that runs and times models on a board behind TVM RPC, or here. Imports TVM.

It has one session, which is the lease: no other client has the board meanwhile. Local models run
through the same calls, in TVM's session of this process. It loads no code of a board, but parses
the board's answers in a sandbox all the same.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, rpc

from tuna.errors import BadInput, ServiceError, TunaError
from tuna.libraries.tvm.board_session import connect, facts, last_line
from tuna.libraries.tvm.boards import Tracker
from tuna.libraries.tvm.large_pages import use_large_pages
from tuna.libraries.tvm.model_answers import Difference, RightOutput
from tuna.sandbox import seccomp, self_limits
from tuna_models.arguments import FAULT_CHARS, SHAPE
from tuna_models.benchmarks.remote_values import RemoteValues
from tuna_models.judging import inputs
from tuna_models.process import refusing

#: A virtual machine's message for an argument that its function does not take.
_CONTEXT = re.compile(r"param\[\d+\], param=(\w+), annotation=(.*?)\)\s{2,}(.*)", re.DOTALL)
_FOREIGN = (
    "it must be a model that TVM's Relax compiled for that CPU, as `tuna model build` writes it"
)
#: Copies of the inputs on this machine: as drawn, ordered, and serialised by TVM.
_COPIES = 3


@dataclass
class _Board:
    """The session, and the objects on the board."""

    session: Any
    device: Any
    values: RemoteValues
    function: str
    remote: bool  #: True for a board, False for this process
    machines: dict[str, Any] = field(default_factory=dict)  #: virtual machines by label


_board: _Board | None = None


def _open_board() -> _Board:
    assert _board is not None, "open comes first"
    return _board


@refusing
def open_session(
    tracker: Sequence[Any] | None,
    key: str,
    wait_s: float,
    lease_s: float,
    function: str,
    memory_bytes: int | None,
) -> dict[str, Any]:
    """Take a board, or this machine without `tracker`; return the board's emulator, if any.

    Raises ServiceError.
    """
    global _board
    seccomp.forbid_processes()
    self_limits.bound_memory()
    session = rpc.LocalSession()
    if tracker is not None:
        session = connect(Tracker(*tracker), key, timeout_s=wait_s, lease_s=lease_s)
    device = session.cpu(0)
    values = RemoteValues(session, device, memory_bytes)
    _board = _Board(session, device, values, function, remote=tracker is not None)
    with _translated_errors("the board does not describe itself"):
        return {"emulator": facts(session)["emulator"] if tracker is not None else ""}


@refusing
def load(path: str, label: str) -> dict[str, Any]:
    """Send a library and load it; return its function's parameter names."""
    board = _open_board()
    file = f"model_{len(board.machines)}.so"
    data = bytearray(Path(path).read_bytes())
    board.values.check(len(data), label)
    with _translated_errors(f"{label} cannot be loaded there", hint=_FOREIGN):
        board.session.upload(data, file)
        machine = relax.VirtualMachine(board.session.load_module(file), board.device)
    if not board.remote:
        use_large_pages()
    with _translated_errors(f"{label} has no function {board.function}"):
        count = machine._get_function_arity(board.function)
        names = [
            str(machine._get_function_param_name(board.function, number)) for number in range(count)
        ]
    board.machines[label] = machine
    return {"parameters": names}


@refusing
def check(arguments: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Refuse inputs that need more memory than there is, before any is made.

    `arguments` and `order` are those of `run`.
    """
    needed = 0
    for name in order:
        needed += _bytes(arguments[name])
        _open_board().values.check(needed, f"The input {name}")
        if needed * _COPIES > _available_bytes():
            raise BadInput(
                f"The input {name} needs more memory than this machine has left to make it."
            )
    return {}


@refusing
def run(
    arguments: Mapping[str, Any], order: Sequence[str], seed: int, recorded: str, tolerance: float
) -> dict[str, Any]:
    """Run each model once on the same inputs; return errors against the first, by label what is
    wrong with its outputs, and output shapes.

    `arguments` is as `arguments.tree` makes it, `order` the names of the parameters. The inputs are
    random, or those of the npz file `recorded`. `tolerance` is of floating-point outputs.
    """
    board = _open_board()
    board.values.release()
    if recorded:
        tensors = [_tensor(name, arguments[name]) for name in order]
        made = list(inputs.read(tensors, Path(recorded)).values())
    else:
        generator = np.random.default_rng(seed)
        made = [_drawn(arguments[name], generator) for name in order]
    with _translated_errors("the inputs cannot be sent"):
        sent = board.values.send(*made, names=order)
    answers = {label: _answer(board, label, sent) for label in board.machines}
    first = next(iter(answers.values()))
    comparisons = {label: _compared(answer, first, tolerance) for label, answer in answers.items()}
    return {
        "errors": {
            label: min(max((each.error for each in of), default=0.0), sys.float_info.max)
            for label, of in comparisons.items()
        },
        "faults": {
            label: f"output {place} {each.why}"[:FAULT_CHARS]
            for label, of in comparisons.items()
            for place, each in reversed(list(enumerate(of)))
            if each.why
        },
        "outputs": [list(array.shape) for array in first],
    }


def _compared(found: Sequence[Any], first: Sequence[Any], tolerance: float) -> list[Difference]:
    """Compare outputs by the rules of the check."""
    if len(found) != len(first):
        raise BadInput(f"The models have {len(first)} and {len(found)} outputs.")
    pairs = zip(first, found, strict=True)
    return [RightOutput(right).compare(array, tolerance) for right, array in pairs]


@refusing
def time_round(numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return each model's mean milliseconds over a number of runs, after one uncounted run."""
    board, found = _open_board(), {}
    for label, number in numbers.items():
        with _translated_errors(f"{label} failed while it was timed"):
            evaluator = board.machines[label].time_evaluator(
                "invoke_stateful", board.device, number=number, repeat=1
            )
            (seconds,) = evaluator(board.function).results
        found[label] = 1e3 * float(seconds)
    return {"times_ms": found}


def _answer(board: _Board, label: str, sent: Sequence[Any]) -> list[Any]:
    machine = board.machines[label]
    with _translated_errors(f"{label} failed"):
        machine.set_input(board.function, *sent)
        machine.invoke_stateful(board.function)
        return [_array(one) for one in _flat(machine.get_outputs(board.function))]


@contextlib.contextmanager
def _translated_errors(failed: str, hint: str = "") -> Iterator[None]:
    """Turn TVM's errors into a ServiceError if the board is gone, else a BadInput.

    The message of the latter begins with `failed`.
    """
    try:
        yield
    except TunaError:
        raise
    except Exception as error:  # TVM raises whatever its C++ does
        if _open_board().remote and not isinstance(error, tvm.error.RPCError):
            raise ServiceError(
                f"The board does not answer any more: {last_line(error)}."
            ) from error
        found = _CONTEXT.search(str(error))
        if found is None:
            raise BadInput(f"{failed}: {last_line(error)}.", hint=hint) from error
        name, wanted, why = (" ".join(part.split()) for part in found.groups())
        text = f"The model does not take this input {name}: {why.rstrip('. ')}."
        raise BadInput(text, hint=f"{name}: {wanted}") from error


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [one for part in value for one in _flat(part)]
    return [value]


def _array(value: Any) -> Any:
    """An output as an array; objects other than tensors and numbers are not compared."""
    if hasattr(value, "numpy"):
        return value.numpy()
    return np.array(value if isinstance(value, bool | int | float) else 0.0)


def _bytes(node: Any) -> int:
    """Return the size of an argument before it is made."""
    if isinstance(node, Mapping):
        return sum(map(_bytes, node["tuple"]))
    kind, shape, *_ = node
    size = 8 if kind == SHAPE else np.dtype(kind).itemsize
    return size * (len(shape) if kind == SHAPE else int(np.prod(shape, dtype=object)))


def _drawn(node: Any, generator: np.random.Generator) -> Any:
    if isinstance(node, Mapping):
        return tuple(_drawn(part, generator) for part in node["tuple"])
    kind, shape, bounds, _ = node
    return tvm_ffi.Shape(shape) if kind == SHAPE else inputs.draw(kind, shape, bounds, generator)


def _tensor(name: str, node: Any) -> dict[str, Any]:
    if isinstance(node, Mapping) or node[0] == SHAPE:
        raise BadInput(f"The input {name} is a tuple or a shape, which no file of arrays has.")
    return {"name": node[3], "dtype": node[0], "shape": node[1]}


def _available_bytes() -> int:
    """Return this machine's free memory without swapping: MemAvailable of proc(5)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


HANDLERS = {"open": open_session, "load": load, "check": check, "run": run, "time": time_round}
