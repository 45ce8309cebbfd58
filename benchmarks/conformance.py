"""ONNX's own node tests: how many of them Tuna imports, builds and answers right.

Each case is imported as a user's model is, planned with predicted kernels, compiled and run in a
process of its own. It is *right* if outputs agree in type, shape and value, *wrong* if they do not,
*refused* if the import says so in a sentence with the operator, and *raw* if it ends otherwise. An
input that the refusal asks for (`--value NAME=...`) is given, as a user would. The cases that are
not right go to stderr. onnxruntime is judged by the same rule where `--runtime` names a Python that
has it. `--data` reads the cases of an older wheel of onnx from its folder
`onnx/backend/test/data/node`.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks import forked
from benchmarks.harness import Outcome, command_line
from tuna.errors import BadInput

#: Seconds for a case, and cases of a process.
_TIMEOUT_S, _PART = 120.0, 40
#: Error of a sum relative to the largest value of its output.
_CANCELLED = 1e-6
_VERDICTS = ("right", "wrong", "refused", "raw")
#: Inputs that a refusal asks for.
_ASKED = re.compile(r"--value ([^\s=]+)=")
#: Runs the cases in the folders below the working folder.
_RUNTIME = """
import pathlib
import numpy, onnxruntime
onnxruntime.set_default_logger_severity(4)
for folder in pathlib.Path().iterdir():
    try:
        with numpy.load(folder / "inputs.npz") as arrays:
            feeds = dict(arrays)
        session = onnxruntime.InferenceSession(
            folder / "model.onnx", providers=["CPUExecutionProvider"]
        )
        outputs = session.run(None, feeds)
        numpy.savez(folder / "outputs.npz", *(numpy.asarray(output) for output in outputs))
    except Exception as error:
        (folder / "refused").write_text(str(error))
"""


@dataclass(frozen=True)
class Case:
    """A model with inputs by name and the right outputs in order."""

    name: str
    model: Any  #: onnx.ModelProto
    inputs: dict[str, Any]
    outputs: list[Any]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    word: str  #: one of right, wrong, refused, raw
    text: str = ""  #: the refusal, the error, or what differs


def current_cases(every: int = 1) -> Iterator[Case]:
    """Yield the cases that the installed package `onnx` generates, those of one operator in
    `every`."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflow, which some cases want
        for module in sorted(one.name for one in pkgutil.iter_modules(node.__path__))[::every]:
            importlib.import_module(f"{node.__name__}.{module}")  # which generates its cases
    for case in node._NodeTestCases:
        for given, right in case.data_sets or ():
            yield _case(case.name, case.model, given, right, case.rtol, case.atol)


def stored_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases in a folder of an older wheel: `NAME/model.onnx`, `NAME/test_data_set_N`."""
    for path in sorted(folder.glob("*/model.onnx")):
        model = onnx.load(path)
        for data in sorted(path.parent.glob("test_data_set_*")):
            given = _stored(data, "input", model.graph.input)
            right = _stored(data, "output", model.graph.output)
            yield _case(path.parent.name, model, given, right, 1e-3, 1e-7)


def _stored(folder: Path, kind: str, values: Sequence[Any]) -> list[Any]:
    """The arrays of inputs or outputs, `KIND_N.pb`; None for what is no tensor."""
    paths = [folder / f"{kind}_{number}.pb" for number in range(len(values))]
    return [_read(path, value) for path, value in zip(paths, values, strict=True) if path.exists()]


def _read(path: Path, value: Any) -> Any:
    if value.type.WhichOneof("value") != "tensor_type":
        return None
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def _case(name: str, model: Any, given: Any, right: Any, rtol: float, atol: float) -> Case:
    """Make a case; the names of inputs are those of the graph, without initializers."""
    weights = {tensor.name for tensor in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in weights]
    inputs = dict(zip(names, map(_array, given), strict=False))
    return Case(name, model, inputs, [_array(one) for one in right], rtol, atol)


def _array(value: Any) -> Any:
    """The array of a tensor; a sequence as it is."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    return value if value is None or isinstance(value, list) else np.asarray(value)


def difference(case: Case, found: Sequence[Any]) -> str:
    """Return in what the outputs differ from the right ones, empty where they agree.

    Types, shapes, infinities and NaN have to be equal, numbers within the case's tolerances; in
    fp16, whose steps are as wide as ONNX's tolerance of 1e-3, within two units in the last place.
    A value that is small beside the output's largest may be off by 1e-6 of that: so much is lost
    in sums that cancel, for which ONNX's tolerance of 1e-7 has no room.
    """
    if len(found) != len(case.outputs):
        return f"{len(found)} outputs, not {len(case.outputs)}"
    for number, (ours, right) in enumerate(zip(found, case.outputs, strict=True)):
        right = np.asarray(right)
        if ours.dtype != right.dtype or ours.shape != right.shape:
            return f"output {number} is {ours.dtype}{ours.shape}, not {right.dtype}{right.shape}"
        rtol = max(case.rtol, 2.0**-9 if right.dtype == np.float16 else 0.0)
        if right.dtype.kind in "fV":
            ours, right = (np.asarray(one, np.float64) for one in (ours, right))
            largest = np.max(np.abs(right[np.isfinite(right)]), initial=0.0)
            atol = max(case.atol, _CANCELLED * float(largest))
            if not np.allclose(ours, right, rtol=rtol, atol=atol, equal_nan=True):
                with np.errstate(all="ignore"):
                    worst = np.nanmax(np.abs(ours - right), initial=0)
                return f"output {number} is off by {worst:.3g}"
        elif not np.array_equal(ours, right):
            return f"output {number}: {np.sum(ours != right)} of {right.size} values differ"
    return ""


def judge(case: Case) -> Verdict:
    """Import, build and run a case in this process."""
    values: dict[str, Sequence[float]] = {}
    while True:
        try:
            found = _answers(case, values)
        except BadInput as error:
            asked = {*_ASKED.findall(error.hint)} & (case.inputs.keys() - values.keys())
            if not asked:
                return _refusal(case, error)
            values |= {name: case.inputs[name].reshape(-1).tolist() for name in asked}
            continue
        except Exception as error:  # what is not refused in a sentence is what we look for
            return Verdict("raw", f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}")
        text = difference(case, found)
        return Verdict("wrong" if text else "right", text)


def _refusal(case: Case, error: BadInput) -> Verdict:
    """A refusal names an operator of the model, or the type of an input."""
    text = f"{error} {error.hint}".strip()
    operators = {node.op_type for node in case.model.graph.node}
    said = any(re.search(rf"\b{operator}\b", text) for operator in operators) or " of type " in text
    raw = isinstance(error.__cause__, Exception) and not said
    return Verdict("raw" if raw or not said else "refused", text)


def _answers(case: Case, values: Mapping[str, Sequence[float]]) -> list[Any]:
    import tvm
    from tvm.target import codegen

    from tuna.libraries.tvm.whole_models import arrays_of
    from tuna_models.compiler import build, program
    from tuna_models.compiler.build import TaskKernels
    from tuna_models.reading import importer

    target = tvm.target.Target(
        {"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu()), "num-cores": 1}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        onnx.save(case.model, path)
        shapes = {
            name: np.shape(case.inputs[name])
            for name in (value.name for value in case.model.graph.input)
            if isinstance(case.inputs.get(name), np.ndarray)
        }
        model = importer.read(path, shapes, None, values)
    module = importer.to_relax(model, path.name)
    planned = build.plan(module, TaskKernels(target, {}), target)
    given = [np.asarray(one) for name, one in case.inputs.items() if name not in values]
    run = program.machine_of(planned, target)["main"]
    return arrays_of(run(*map(tvm.runtime.tensor, given)))


def judged(cases: Sequence[Case]) -> list[Verdict]:
    """Judge cases in a forked process; a case that ends it, or takes too long, is raw."""
    return forked.judged(judge, cases, functools.partial(Verdict, "raw"), _TIMEOUT_S)


def runtime_verdicts(python: str, cases: Sequence[Case]) -> list[Verdict]:
    """Return the verdicts on onnxruntime, which another Python has."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, str(number)) for number in range(len(cases))]
        for folder, case in zip(folders, cases, strict=True):
            folder.mkdir()
            onnx.save(case.model, folder / "model.onnx")
            arrays = {
                key: one.astype(str) if one.dtype == object else one
                for key, one in case.inputs.items()
                if isinstance(one, np.ndarray)
            }
            np.savez(folder / "inputs.npz", allow_pickle=False, **arrays)
        subprocess.run([python, "-c", _RUNTIME], cwd=name, check=False)
        return [_runtime_verdict(folder, case) for folder, case in zip(folders, cases, strict=True)]


def _runtime_verdict(folder: Path, case: Case) -> Verdict:
    refused, answered = folder / "refused", folder / "outputs.npz"
    if refused.exists():
        return Verdict("refused", " ".join(refused.read_text().split())[:300])
    if not answered.exists():
        return Verdict("raw", "no answer")
    with np.load(answered, allow_pickle=False) as arrays:
        try:
            text = difference(case, [arrays[key] for key in arrays.files])
        except ValueError as error:  # text, of which NumPy has no array without pickles
            return Verdict("refused", str(error))
    return Verdict("wrong" if text else "right", text)


def main() -> int:
    """Run it."""
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of an older wheel's cases")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--runtime", metavar="PYTHON", help="a Python that has onnxruntime, too")
    parser.add_argument("--log", type=Path, help="write the verdict of each case there")
    options = parser.parse_args()
    import tvm.relax.frontend.onnx  # noqa: F401  before the forks

    cases = stored_cases(options.data) if options.data else current_cases()
    chosen = [case for case in cases if options.only in case.name]
    # small parts, so that neither process waits for the other at the end
    parts = [chosen[start : start + _PART] for start in range(0, len(chosen), _PART)]
    with ThreadPoolExecutor(2) as pool:
        verdicts = [verdict for part in pool.map(judged, parts) for verdict in part]
    for case, verdict in zip(chosen, verdicts, strict=True):
        if verdict.word != "right":
            print(f"{verdict.word:8} {case.name}: {verdict.text}", file=sys.stderr)
    baseline = runtime_verdicts(options.runtime, chosen) if options.runtime else []
    if options.log:
        rows = zip(chosen, verdicts, baseline or [Verdict("")] * len(chosen), strict=True)
        options.log.write_text(
            "".join(
                json.dumps([case.name, ours.word, ours.text, theirs.word, theirs.text]) + "\n"
                for case, ours, theirs in rows
            )
        )
    counts = Counter(verdict.word for verdict in verdicts)
    others = Counter(verdict.word for verdict in baseline)
    return Outcome(
        "conformance",
        {"cases": len(chosen), **{word: counts[word] for word in _VERDICTS}},
        baseline={f"onnxruntime_{word}": others[word] for word in _VERDICTS} if baseline else {},
        limits={"wrong": 0, "raw": 0},
    ).print()


if __name__ == "__main__":
    sys.exit(main())
