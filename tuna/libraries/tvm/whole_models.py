"""Whole models as candidates: their functions compiled, their answers checked, the model and each
of its functions timed. Imports TVM.

`compiler/program.py` of tuna-models plans a model where its weights are, and writes three things.
The *body* has the functions that are to be compiled, as TVM's JSON. The *program*, for TVM's
virtual machine, has what calls them, with the weights. The *answers* are inputs and the right
answers to them. What is built of the body are the functions alone, without weights.

Beside `main` the program has functions that compute the same and say when each of the model's
functions began and ended: `timed_0` calls those of `main`, `timed_1` and so on call other kernels
in the places of some of them, `untuned` is what TVM makes of the model without Tuna. Of a quantised
model `tensors` calls those of `main` and returns the quantised tensors as well, and `segments`
takes quantised tensors and computes each segment from them.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
import zipfile
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm.runtime
from tvm import relax
from tvm.support.cc import create_shared

from tuna.common.files import gunzip
from tuna.errors import BadInput
from tuna.libraries.kernels import Kernel, KernelJob
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.function_texts import from_json
from tuna.libraries.tvm.large_pages import use_large_pages
from tuna.libraries.tvm.model_answers import Case, Quantised, Run, problem
from tuna.libraries.tvm.object_files import compile_all

MAIN, UNTUNED, TENSORS, SEGMENTS = "main", "untuned", "tensors", "segments"
#: Names in what is built: the file with everything for the device, and the folder of the functions
#: of `main` alone, of which a library for users is linked
_LIBRARY, _OBJECTS = "functions.so", "main"
#: Maximum and minimum of runs with each of the program's functions, and seconds after which the
#: minimum suffices.
_MAX_ROUNDS, _MIN_ROUNDS, _BUDGET_S = 15, 5, 20.0


@dataclass(frozen=True)
class ModelBody:
    """Functions of a model that are to be compiled."""

    choices: str  #: origin of its kernels, in words
    #: functions that each timed function of the program calls, in order
    timed: Mapping[str, Sequence[str]]
    functions: str  #: functions of `main`, as TVM's JSON of the module
    others: str  #: functions that the program's other functions call beside them
    cuts: Sequence[Mapping[str, Any]] = ()  #: quantised tensors, as arguments of `Quantised`

    def to_bytes(self) -> bytes:
        """The JSON form."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def read(cls, path: Path) -> ModelBody:
        """The body in a file; raises BadInput."""
        try:
            return cls(**json.loads(gunzip(path.read_bytes())))
        except (TypeError, ValueError) as error:
            raise BadInput(f"The body of a model cannot be read: {error}") from None


def build(job: KernelJob, path: Path) -> None:
    """Compile the functions for the job's target into an archive for `load`."""
    body, target = ModelBody.read(Path(job.body)), json.loads(job.target)
    code = tvm.target.Target(toolchain.for_code(target))
    with tempfile.TemporaryDirectory() as folder:
        functions = {
            Path(folder, part, f"{number:04}.o"): function
            for part, text in {_OBJECTS: body.functions, "others": body.others}.items()
            for number, function in enumerate(_functions(text))
        }
        for part in {file.parent for file in functions}:
            part.mkdir()
        compile_all(functions, code)
        linker = toolchain.linker(target, os.environ.get("TUNA_CC", ""))
        library = Path(folder, _LIBRARY)
        objects = [str(file) for file in functions]
        create_shared(str(library), objects, **({"cc": linker} if linker else {}))
        with zipfile.ZipFile(path, "w") as archive:
            for file in (library, *(file for file in functions if file.parent.name == _OBJECTS)):
                # always the same bytes
                entry = zipfile.ZipInfo(str(file.relative_to(folder)))
                archive.writestr(entry, file.read_bytes())


def _functions(text: str) -> list[tuple[Any, Any]]:
    """The functions of a module in TVM's JSON, each with its variable, by name."""
    functions = from_json(text).functions
    return sorted(functions.items(), key=lambda entry: str(entry[0].name_hint))


def extract_objects(built: Path, folder: Path) -> list[Path]:
    """The object files with the functions of `main`, from what `build` made."""
    with zipfile.ZipFile(built) as archive:
        names = [name for name in archive.namelist() if name != _LIBRARY]
        return [
            _extracted(archive, name, folder / f"main-{number:04}.o")
            for number, name in enumerate(names)
        ]


def _extracted(archive: zipfile.ZipFile, name: str, path: Path) -> Path:
    """Write a member to `path`, whatever its name says."""
    path.write_bytes(archive.read(name))
    return path


def extract_library(built: Path) -> Path:
    """The shared library with all functions, in a new folder within the working folder; named as
    what was built."""
    path = Path(tempfile.mkdtemp(dir=Path.cwd()), f"{built.stem}.so")
    with zipfile.ZipFile(built) as archive:
        path.write_bytes(archive.read(_LIBRARY))
    return path


class ModelKernel(Kernel):
    """A model that was built, with its inputs in place."""

    def __init__(self, job: KernelJob, arrays: Sequence[Any]) -> None:
        """`arrays` are the inputs, then the answer's place, which is not used."""
        self._cases = problem(job.files["answers"]).answers.cases
        self._body = ModelBody.read(Path(job.body))
        self._inputs = [self.sent(array) for array in arrays[:-1]]
        super().__init__(functools.partial(self.call, MAIN), arrays)

    @abstractmethod
    def sent(self, array: Any) -> Any:
        """A copy of an array on the device."""

    @abstractmethod
    def call(self, function: str, inputs: Sequence[Any] | None = None) -> None:
        """Run a function of the program on these inputs, by default the problem's, and wait for
        the end."""

    @abstractmethod
    def outputs(self, function: str) -> list[Any]:
        """The arrays that the last run of this function returned, in order."""

    def answer(self) -> Any:
        """A `Run` for each case, as `ModelProblem` compares them."""
        return [self._run_case(case) for case in self._cases]

    def _run_case(self, case: Case) -> Run:
        inputs = [self.sent(array) for array in case.inputs]

        def returned(function: str, given: Sequence[Any] = ()) -> list[Any]:
            self.call(function, [*inputs, *map(self.sent, given)])
            return self.outputs(function)

        outputs = returned(MAIN)
        cuts = [Quantised(**cut) for cut in self._body.cuts]
        if not (cuts and case.cuts):
            return Run(outputs)
        whole = returned(TENSORS)
        again = returned(SEGMENTS, whole[len(outputs) :])
        right = {answer.name: answer.values for answer in case.cuts}
        segments = returned(SEGMENTS, [cut.to_floats(right[cut.name]) for cut in cuts])
        tensors = zip(cuts, segments[len(outputs) :], strict=True)
        return Run(
            segments[: len(outputs)],
            {cut.name: cut.to_whole(array, right[cut.name].dtype) for cut, array in tensors},
            _equal(whole, again) and _equal(whole[: len(outputs)], outputs),
        )

    def parts_ms(self) -> Mapping[str, float]:
        """The lower quartile of each function's time in a run, all its calls together, because
        other programs only ever make a call slower; and of runs as a whole, by the program's
        function.

        The program's functions run in turn, in an order that is drawn anew for each round.
        """
        spent: dict[str, list[float]] = defaultdict(list)
        order, started, names = np.random.default_rng(0), time.perf_counter(), [*self._body.timed]
        for done in range(_MAX_ROUNDS):
            if done >= _MIN_ROUNDS and time.perf_counter() - started > _BUDGET_S:
                break
            for name in order.permutation(names):
                for part, ms in self._run_timed(str(name)).items():
                    spent[part].append(ms)
        return {part: _lower(times) for part, times in spent.items()}

    def _run_timed(self, name: str) -> dict[str, float]:
        """Milliseconds of each function, and of the whole, in a run of a timed function."""
        called, found = self._body.timed[name], dict[str, float]()
        self.call(name)
        stamps = self.outputs(name)[-2 * len(called) :] if called else []
        moments = [float(stamp[0]) * 1e3 + float(stamp[1]) * 1e-6 for stamp in stamps]
        for function, began, ended in zip(called, moments[::2], moments[1::2], strict=True):
            found[function] = found.get(function, 0.0) + max(0.0, ended - began)
        return {**found, name: max(0.0, moments[-1] - moments[0]) if moments else 0.0}


def _equal(arrays: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all bits are equal."""
    pairs = zip(arrays, others, strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)


def _lower(times_ms: Sequence[float]) -> float:
    return statistics.quantiles(times_ms, n=4)[0] if len(times_ms) > 1 else times_ms[0]


class LocalModelKernel(ModelKernel):
    """A model in this process."""

    def __init__(self, job: KernelJob, built: Path, arrays: Sequence[Any]) -> None:
        super().__init__(job, arrays)
        program = tvm.get_global_func("relax.ExecutableLoadFromFile")(job.files["program"])
        program.import_module(tvm.runtime.load_module(str(extract_library(built))))
        self._machine = relax.VirtualMachine(program, tvm.cpu())
        use_large_pages()
        self._found: Any = ()

    def sent(self, array: Any) -> Any:
        """A tensor of TVM's."""
        return tvm.runtime.tensor(np.asarray(array, order="C"))

    def call(self, function: str, inputs: Sequence[Any] | None = None) -> None:
        """Run a function of the program."""
        self._found = self._machine[function](*(self._inputs if inputs is None else inputs))

    def outputs(self, function: str) -> list[Any]:
        """The arrays that the last run returned."""
        return arrays_of(self._found)


def arrays_of(answer: Any) -> list[Any]:
    """The arrays in what a function of a virtual machine returned; numbers are arrays too."""
    if hasattr(answer, "numpy"):
        return [answer.numpy()]
    if isinstance(answer, int | float):
        return [np.asarray(answer)]
    return [array for part in answer for array in arrays_of(part)]
