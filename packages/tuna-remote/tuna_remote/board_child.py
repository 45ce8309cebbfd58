"""The child that measures on a board behind TVM's RPC: it has one session there, and loads no
candidate itself. Imports TVM.

What connects and calls has no limit in TVM: the parent kills this process.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm.runtime
from tvm import relax, rpc

from tuna.libraries import measuring
from tuna.libraries.kernels import Kernel, KernelJob
from tuna.libraries.reference import Problem
from tuna.libraries.results import is_time
from tuna.libraries.tvm import function_texts, functions, whole_models
from tuna.libraries.tvm.board_session import facts, last_line
from tuna.libraries.tvm.built_models import Runtime
from tuna.libraries.tvm.kernel_child import Answer, TvmLoader
from tuna.libraries.tvm.whole_models import ModelKernel

#: Bytes that are read on the board between cold runs: more than the last-level cache of any board.
_FLUSH_BYTES = 64 << 20


class BoardLost(Exception):
    """The board is missing or does not answer."""


class _Session:
    """A session on one board, which serves no other while it is open."""

    def __init__(self, remote: Any, board: str) -> None:
        self.remote, self.board = remote, board
        self._loaded: dict[str, Any] = {}

    def module(self, path: Path) -> Any:
        """The library at `path`, sent once."""
        if path.name not in self._loaded:
            self.remote.upload(str(path))
            self._loaded[path.name] = self.remote.load_module(path.name)
        return self._loaded[path.name]

    def program(self, path: Path) -> Any:
        """A new copy of the virtual machine's program in the file `path`, which is sent once."""
        if path.name not in self._loaded:
            self.remote.upload(str(path))
            place = self.remote.get_function("tvm.rpc.server.workpath")(path.name)
            self._loaded[path.name] = str(place)
        load = self.remote.get_function("relax.ExecutableLoadFromFile")
        return load(self._loaded[path.name])


_session: _Session | None = None


def open_session(host: str, port: int, match_key: str, session_s: float) -> dict[str, Any]:
    """Open a session on a board that a tracker gave, which its server ends after `session_s`.

    Returns the board's address, as `board`, and what it says of itself. Raises BoardLost.
    """
    global _session
    close_session()
    board = f"{host}:{port}"
    try:
        _session = _Session(rpc.connect(host, port, match_key, session_s), board)
        return {"board": board, **facts(_session.remote)}
    except Exception as error:  # TVM raises whatever a broken answer leads to
        _session = None
        raise BoardLost(
            f"the board {board} does not answer as TVM does: {last_line(error)}"
        ) from error


def close_session() -> dict[str, Any]:
    """Give the board to others."""
    global _session
    _session = None
    gc.collect()  # the connection ends with the last object that is there
    return {}


def ping() -> dict[str, Any]:
    """Call the board; raises BoardLost if it does not answer."""
    try:
        return {"threads": int(_current().remote.get_function("runtime.NumThreads")())}
    except Exception as error:
        raise BoardLost(f"the board does not answer: {last_line(error)}") from error


def probe(loader: str) -> dict[str, Any]:
    """Return no probe: the speed of this machine says nothing about the board."""
    return {}


class BoardKernel(Kernel):
    """A compiled module on the board, timed by the board's clock."""

    empties_caches = True

    def __init__(
        self, module: Any, arrays: Sequence[np.ndarray], cold: bool, answer: Answer
    ) -> None:
        device = _current().remote.cpu(0)
        self._module, self._device, self._cold, self._to_answer = module, device, cold, answer
        self._tensors = [
            tvm.runtime.tensor(np.asarray(array, order="C"), device=device) for array in arrays
        ]
        super().__init__(functools.partial(module["main"], *self._tensors), arrays)

    def answer(self) -> Any:
        """The output, copied from the board, in the config's shape and layout."""
        return self._to_answer(self._tensors[-1].numpy())

    def times_ms(self, number: int, repeats: int) -> list[float]:
        """Measure by `time_evaluator` on the board."""
        flush = {"cache_flush_bytes": _FLUSH_BYTES} if self._cold else {}
        timed = self._module.time_evaluator(
            "main", self._device, number=number, repeat=repeats, **flush
        )
        return _times_ms(timed(*self._tensors), repeats)


class BoardModelKernel(ModelKernel):
    """A model on the board, timed by the board's clock. Its virtual machine loads the program from
    a file, so that nothing is linked for it."""

    empties_caches = True  # they are not asked to: see `TvmLibrary._job`

    def __init__(self, job: KernelJob, built: Path, arrays: Sequence[Any]) -> None:
        session = _current()
        program = session.program(Path(job.files["program"]))
        program.import_module(session.module(whole_models.extract_library(built)))
        self._device = session.remote.cpu(0)
        self._machine = relax.VirtualMachine(program, self._device)
        super().__init__(job, arrays)

    def sent(self, array: Any) -> Any:
        """A tensor on the board."""
        return tvm.runtime.tensor(np.asarray(array, order="C"), device=self._device)

    def call(self, function: str, inputs: Sequence[Any] | None = None) -> None:
        """Run a function of the program."""
        self._machine.set_input(function, *(self._inputs if inputs is None else inputs))
        self._machine.invoke_stateful(function)

    def outputs(self, function: str) -> list[Any]:
        """The arrays that the last run returned, copied from the board."""
        return whole_models.arrays_of(self._machine.get_outputs(function))

    def times_ms(self, number: int, repeats: int) -> list[float]:
        """Measure by `time_evaluator` on the board."""
        # the check has set others
        self._machine.set_input(whole_models.MAIN, *self._inputs)
        timed = self._machine.time_evaluator(
            "invoke_stateful", self._device, number=number, repeat=repeats
        )
        return _times_ms(timed(whole_models.MAIN), repeats)


def _times_ms(found: Any, repeats: int) -> list[float]:
    """The results of TVM's evaluator in milliseconds; raises BoardLost for what no clock says."""
    times_ms = [float(seconds) * 1e3 for seconds in found.results]
    if len(times_ms) != repeats or not all(map(is_time, times_ms)):
        raise BoardLost(f"the board's clock says {times_ms[:4]}")
    return times_ms


class BoardLoader(TvmLoader):
    """Loads candidates on the board."""

    def _kernel(self, job: KernelJob, path: Path, arrays: Sequence[Any], answer: Answer) -> Kernel:
        cold = job.conditions.get("caches") == "cold"
        return BoardKernel(_current().module(path), arrays, cold, answer)

    def _model(self, job: KernelJob, path: Path, arrays: Sequence[Any]) -> Kernel:
        return BoardModelKernel(job, path, arrays)

    def _runtime(self) -> Runtime:
        return Runtime(_current().remote, _current().module)

    def reference(self, job: KernelJob) -> Problem | None:
        """Return the problem of a task without a core, computed on this machine, whatever the board
        is; and of a model."""
        if not job.body or job.files:
            return super().reference(job)
        return functions.problem(function_texts.read(job.body), tvm.target.Target("llvm"))


def _current() -> _Session:
    if _session is None:
        raise BoardLost("no session is open")
    return _session


HANDLERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    **measuring.HANDLERS,
    "probe": probe,
    "open": open_session,
    "close": close_session,
    "ping": ping,
}
