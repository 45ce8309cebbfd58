"""Libraries that TVM's Relax compiled, Tuna's or others, called and timed in turn with the same
arguments, on a board or in this process. Imports TVM.

`Answers.call` says which function is called with which arguments: `arguments` has by name the place
of a tensor among the inputs, `{"shape": PLACE}`, or `{"tuple": [...]}` of such. The answers of the
first library are right for the others.

TVM's RPC carries tensors that lie on the board, and handles. A shape is made there by its
constructor. A tuple of tensors is made by the tensor cache of the virtual machine: TVM 0.27 would
store bare pointers to them in an array, which are read after they are freed.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm.runtime
from tvm import relax, rpc

from tuna.errors import BadInput
from tuna.libraries.kernels import Kernel, KernelJob
from tuna.libraries.results import is_time
from tuna.libraries.tvm.board_session import last_line
from tuna.libraries.tvm.large_pages import use_large_pages
from tuna.libraries.tvm.model_answers import Run, problem
from tuna.libraries.tvm.whole_models import arrays_of

#: Seconds for which a library runs until the next one's turn.
_TURN_S = 0.05
#: A virtual machine's message for an argument that its function does not take.
_CONTEXT = re.compile(r"param\[\d+\], param=(\w+), annotation=(.*?)\)\s{2,}(.*)", re.DOTALL)
_FOREIGN = (
    "it must be a model that TVM's Relax compiled for that CPU, as `tuna model build` writes it"
)


@dataclass(frozen=True)
class Runtime:
    """A TVM runtime, here or on a board."""

    session: Any  #: `tvm.rpc.RPCSession`
    load: Callable[[Path], Any]  #: loads a library there
    is_board: bool = True


@functools.cache
def here() -> Runtime:
    """The runtime of this process, called as a board's is. It lasts: what is freed after its
    session ends the process."""
    session = rpc.LocalSession()

    @functools.cache
    def load(path: Path) -> Any:
        session.upload(str(path))
        return session.load_module(path.name)

    return Runtime(session, load, is_board=False)


class BuiltModels(Kernel):
    """A library, and another one that is timed in turn with it if the job has one."""

    empties_caches = True  # they are not asked to: see `TvmLibrary._job`

    def __init__(
        self, job: KernelJob, built: Path, arrays: Sequence[Any], runtime: Runtime
    ) -> None:
        """`arrays` are the inputs, then the answer's place, which is not used.

        Raises BadInput for a library or argument that does not fit.
        """
        call = problem(job.files["answers"]).answers.call
        assert call is not None, "the job is one of libraries"
        self._function, self._runtime = str(call["function"]), runtime
        self._device = runtime.session.cpu(0)
        files = {"library": built, "against": Path(job.files["program"])}
        labels: Mapping[str, str] = call["labels"]
        self._machines = [self._loaded(files[role], label) for role, label in labels.items()]
        if not runtime.is_board:
            use_large_pages()
        loaded = list(zip(self._machines, labels.values(), strict=True))
        names = [self._names(machine, label) for machine, label in loaded]
        order, given = names[0], call["arguments"]
        if unknown := sorted(given.keys() - set(order)):
            raise BadInput(f"The model has no input {unknown[0]}: it takes {_listed(order)}.")
        if missing := [name for name in order if name not in given]:
            example = f"name its shape and type, --input {missing[0]}=1,3,224,224:float32"
            raise BadInput(f"The input {missing[0]} is missing: {example}.")
        for label, other in zip(labels.values(), names, strict=True):
            if other != order:
                raise BadInput(f"{label} takes {_listed(other)}, not {_listed(order)}.")
        self._check_memory(arrays)
        with _words("the inputs cannot be sent"):
            sent = [self._sent(given[name], name, arrays) for name in order]
        for machine, label in loaded:
            with _words(f"{label} failed"):
                machine.set_input(self._function, *sent)
                machine.invoke_stateful(self._function)
        self._sent_arguments = sent  # a board frees what has no handle here
        self._turns_ms: list[list[float]] = []  #: times of each library, by turn
        super().__init__(lambda: self._machines[0].invoke_stateful(self._function), arrays)

    def _loaded(self, file: Path, label: str) -> Any:
        with _words(f"{label} cannot be loaded there: {_FOREIGN}"):
            if file.suffix != ".so":  # TVM knows a library by the end of its name
                folder = tempfile.mkdtemp(dir=Path.cwd())
                file = Path(shutil.copyfile(file, Path(folder, f"{file.stem}.so")))
            return relax.VirtualMachine(self._runtime.load(file), self._device)

    def _names(self, machine: Any, label: str) -> list[str]:
        """The names of the function's parameters."""
        with _words(f"{label} has no function {self._function}"):
            count = machine._get_function_arity(self._function)
            name = machine._get_function_param_name
            return [str(name(self._function, number)) for number in range(count)]

    def _check_memory(self, arrays: Sequence[Any]) -> None:
        """Raise BadInput if the inputs need more memory than the device says is free."""
        device, needed = self._device, sum(array.nbytes for array in arrays)
        free = device.available_global_memory or device.total_global_memory
        if free is not None and needed > free:
            raise BadInput(f"The inputs need {needed >> 20} MiB, and {free >> 20} MiB are there.")

    def _sent(self, value: Any, place: str, arrays: Sequence[Any]) -> Any:
        """An argument on the device; raises BadInput, which names its place, for one that TVM
        cannot make there."""
        function = self._runtime.session.get_function
        if isinstance(value, int):
            return tvm.runtime.tensor(np.asarray(arrays[value], order="C"), self._device)
        if "shape" in value:
            return function("ffi.Shape")(*map(int, arrays[value["shape"]]))
        parts = value["tuple"]
        tensors = [isinstance(part, int) for part in parts]
        sent = [self._sent(part, f"{place}.{number}", arrays) for number, part in enumerate(parts)]
        if not any(tensors):
            return function("ffi.Array")(*sent)
        if not all(tensors):
            why = "TVM can make a tuple of arrays alone, or one without any, on a board"
            raise BadInput(f"{place} cannot be sent to a board: {why}.")
        for number, tensor in enumerate(sent):
            function("vm.builtin.tensor_cache.update")(f"{place}_{number}", tensor, True)
        made = function("vm.builtin.param_array_from_cache")(place, len(sent))
        for number in range(len(sent)):
            function("vm.builtin.tensor_cache.remove")(f"{place}_{number}")
        return made

    def answer(self) -> Any:
        """A `Run` of each library."""
        runs = []
        for machine in self._machines:
            machine.invoke_stateful(self._function)
            runs.append(Run(arrays_of(machine.get_outputs(self._function))))
        return runs

    def times_ms(self, number: int, repeats: int) -> list[float]:
        """Measure the libraries in turn by TVM's own clock; `number` is not used: a turn takes
        the same time for each."""
        times = []
        for _ in range(repeats):
            known = self._turns_ms[0] if self._turns_ms else [1e3 * _TURN_S] * len(self._machines)
            turn = [
                self._mean_ms(machine, max(1, round(1e3 * _TURN_S / ms)))
                for machine, ms in zip(self._machines, known, strict=True)
            ]
            self._turns_ms.append(turn)
            times.append(turn[0])
        return times

    def _mean_ms(self, machine: Any, number: int) -> float:
        """Milliseconds of a run, the mean of `number` after one that does not count."""
        timed = machine.time_evaluator("invoke_stateful", self._device, number=number, repeat=1)
        (seconds,) = timed(self._function).results
        if not is_time(float(seconds) * 1e3):
            raise ValueError(f"the clock says {seconds} s")
        return float(seconds) * 1e3

    def parts_ms(self) -> Mapping[str, float]:
        """The times of the second library, by the number of the turn; the first two turns are
        short ones."""
        turns = [turn[1] for turn in self._turns_ms[2:] if len(turn) > 1]
        return {str(number): ms for number, ms in enumerate(turns)}


@contextlib.contextmanager
def _words(failed: str) -> Iterator[None]:
    """Turn TVM's errors into a BadInput that begins with `failed`, or names an argument that does
    not fit with what the model takes."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # TVM raises whatever its C++ does
        context = _CONTEXT.search(str(error))
        if context is None:
            raise BadInput(f"{failed}: {last_line(error)}.") from error
        name, taken, why = (" ".join(part.split()) for part in context.groups())
        said = f"The model does not take this input {name}: {why.rstrip('. ')}; it takes {taken}."
        raise BadInput(said) from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
