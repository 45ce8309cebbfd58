"""Quantised networks, each tensor of a built one beside exact arithmetic on those before it.

`scripts/bench quantised --python PYTHON` makes small networks of timm and transformers, quantised
by onnxruntime (`quantised_networks.py`, which says what PYTHON needs), or reads MODEL.onnx files.
Each is planned with predicted kernels, compiled, and run on dense, sparse, constant and extreme
inputs; whole numbers and float64 (`exact.py`) say what each quantised tensor is to be, from those
that the built model returned before it.

A value is *equal*, or one step off where its exact value lies within 1e-5 of a half (*ties*), or
where it lies within what fp32 arithmetic of this step may be off (*near*: four times what the step
is off when NumPy computes it in fp32, at most 0.02), or else *wrong*. Real answers may be off by
as much, and 1e-5 of their largest value. `main`, as it is shipped, has to answer what the program
with the quantised tensors answers, bit by bit. Lines of the networks go to stderr.
"""

from __future__ import annotations

import functools
import multiprocessing
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx

from benchmarks.exact import Evaluation, Step
from benchmarks.harness import Outcome, command_line
from tuna.errors import BadInput

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")
#: Largest distance from a tie, in steps, at which a value may be the next one, whatever the step.
_TIE = 1e-5
#: Most values of 100,000 that may be one step off next to a tie.
MAX_TIES = 1.0
#: Largest distance that the fp32 arithmetic of a step may be given.
_MOST = 0.02
KINDS = ("dense", "sparse", "constant", "extreme")


#: Token ids where an input is no byte.
_IDS = (0, 199)
#: Faults of a network that are told.
_MAX_FAULTS = 6


@dataclass(frozen=True)
class Run:
    """What a built model returned for some inputs."""

    answers: Sequence[Any]  #: The answers of `main`
    again: Sequence[Any]  #: Those of the program that returns quantised tensors as well
    tensors: Mapping[str, Callable[[Any], Any]]  #: These, by name, each a function of its type


@dataclass
class Verdict:
    """What became of a network."""

    name: str
    refused: str = ""
    broken: str = ""  #: The error that the build, the run or the judge ended with
    tensors: int = 0  #: Quantised tensors that the built model returns
    counts: Counter[str] = field(default_factory=Counter)  #: Values: all, ties, near, wrong
    largest: float = 0.0  #: Largest distance from a half of a value that is not equal, in steps
    faults: list[str] = field(default_factory=list)
    more: int = 0  #: Faults, told or not

    def fault(self, text: str) -> None:
        """Note a fault."""
        self.more += 1
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(text)

    def __str__(self) -> str:
        if self.refused:
            return f"{self.name}: refused: {self.refused}"
        if self.broken:
            return f"{self.name}: broken: {self.broken}"
        numbers = ", ".join(f"{self.counts[key]} {key}" for key in ("ties", "near", "wrong"))
        text = f"{self.name}: {self.tensors} tensors, {self.counts['all']} values: {numbers}"
        if self.counts["ties"] + self.counts["near"]:
            text += f"; up to {self.largest:.1e} from a half"
        return "\n    ".join([text, *self.faults])


def judge(
    path: Path,
    shapes: Mapping[str, Sequence[int]] | None = None,
    cases: Mapping[str, Mapping[str, Any]] | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
) -> Verdict:
    """Build a quantised model and compare each of its tensors, on drawn inputs, or on those of
    `cases`, by title and name."""
    verdict = Verdict(path.stem)
    try:
        entries, run = built(path, shapes or {}, values)
    except BadInput as error:
        verdict.refused = f"{error} {error.hint}"
        return verdict
    model = onnx.load(path)
    for title, inputs in (cases or {kind: drawn(entries, kind) for kind in KINDS}).items():
        compare(verdict, title, model, inputs, run)
    return verdict


def built(
    path: Path, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Sequence[float]] | None
) -> tuple[Sequence[Mapping[str, Any]], Callable[[Mapping[str, Any]], Run]]:
    """The model's inputs as in a manifest, and a function of their values that returns a `Run`."""
    import tvm
    from tvm import relax
    from tvm.target import codegen

    from tuna.configs.model import WholeModelConfig
    from tuna.libraries.kernels import KernelJob
    from tuna.libraries.tvm import whole_models
    from tuna.libraries.tvm.model_answers import Quantised
    from tuna_models.child_answers import BODY, PROGRAM
    from tuna_models.compiler import build
    from tuna_models.compiler.build import TaskKernels
    from tuna_models.compiler.program import Program
    from tuna_models.compiler.segments import Form
    from tuna_models.reading import importer

    model = importer.read(path, shapes, None, values)
    module = importer.to_relax(model, path.name)
    text = f'{{"kind": "llvm", "mcpu": "{codegen.llvm_get_system_cpu()}", "num-cores": 1}}'
    target = tvm.target.Target(text)
    kernels = TaskKernels(target, {})
    planned = build.plan(module, kernels, target)
    apart = build.plan(module, kernels, target, Form.TENSORS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = Program.of([planned], None, target, [apart])
        program.write(folder, "predicted")
        job = KernelJob(
            WholeModelConfig("net", text, "0" * 64, "1" * 64, "2" * 64),
            *("TvmModel", text, {}, 0, 1, {}, str(folder / BODY), {}),
        )
        whole_models.build(job, folder / "built.zip")
        code = tvm.get_global_func("relax.ExecutableLoadFromFile")(str(folder / PROGRAM))
        library = folder / "functions.so"
        library.write_bytes(_library(folder / "built.zip"))
        code.import_module(tvm.runtime.load_module(str(library)))
    machine = relax.VirtualMachine(code, tvm.cpu())
    forms = [Quantised(**cut.to_json()) for cut in apart.cuts]

    entries = importer.inputs_of(model)

    def run(inputs: Mapping[str, Any]) -> Run:
        arrays = [np.ascontiguousarray(inputs[entry["name"]]) for entry in entries]
        given = [tvm.runtime.tensor(array) for array in arrays]
        answers = whole_models.arrays_of(machine["main"](*given))
        again = whole_models.arrays_of(machine["tensors"](*given))
        tensors = {
            form.name: functools.partial(form.to_whole, array)
            for form, array in zip(forms, again[len(answers) :], strict=True)
        }
        return Run(answers, again[: len(answers)], tensors)

    return entries, run


def _library(archive: Path) -> bytes:
    with zipfile.ZipFile(archive) as built:
        return built.read("functions.so")


def drawn(entries: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Inputs of a kind by name; whole numbers are token ids or bytes."""
    random = np.random.default_rng(11)
    return {entry["name"]: _values(entry, kind, random) for entry in entries}


def _values(entry: Mapping[str, Any], kind: str, random: Any) -> Any:
    shape, dtype = entry["shape"], np.dtype(entry["dtype"])
    whole = dtype.kind != "f"
    low, high = (0.0, 1.0) if not whole else _IDS
    if dtype.itemsize == 1:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if kind == "sparse":
        values = random.random(shape) < 1 / max(shape[-1:], default=1)
    elif kind == "constant":
        values = np.full(shape, low if whole else 0.37)
    elif kind == "extreme":
        values = np.full(shape, high) if whole else random.uniform(-1e4, 1e4, shape)
    elif whole:
        values = random.integers(low, high, shape, endpoint=True)
    else:
        values = random.standard_normal(shape)
    return np.asarray(values).astype(dtype)


def compare(verdict: Verdict, title: str, model: Any, inputs: Mapping[str, Any], run: Any) -> None:
    """Add what a run on these inputs shows."""
    own_run: Run = run(inputs)
    if any(
        one.tobytes() != other.tobytes()
        for one, other in zip(own_run.answers, own_run.again, strict=True)
    ):
        verdict.fault(f"{title}: main is not what the program with its tensors computes")

    def built(name: str, kind: Any) -> Any:
        return own_run.tensors[name](kind) if name in own_run.tensors else None

    exact = Evaluation(model, inputs, built).run()
    rough = Evaluation(model, inputs, built, np.float32).run()
    verdict.tensors = len(own_run.tensors)
    for name, step in exact.steps.items():
        if name in own_run.tensors:
            _compare_tensor(verdict, f"{title}: {name}", step, rough.steps[name], exact)
    pairs = zip(own_run.answers, exact.outputs(), rough.outputs(), strict=True)
    for place, (ours, right, near) in enumerate(pairs):
        if ours.dtype.kind != "f":
            continue  # one of the tensors, or computed from whole numbers
        largest = np.max(np.abs(right[np.isfinite(right)]), initial=0)
        allowed = 4 * distance(near, right) + 1e-5 * largest
        if not distance(ours, right) <= allowed:
            verdict.counts["wrong"] += 1
            verdict.fault(
                f"{title}: answer {place} is off by {distance(ours, right) / largest:.1e} of its"
                f" largest value, fp32 may be by {allowed / largest:.1e}"
            )


def _compare_tensor(verdict: Verdict, title: str, step: Step, rough: Step, run: Any) -> None:
    name = title.split(": ", 1)[1]
    ours, right, counts = run.values[name], step.whole(), verdict.counts
    counts["all"] += ours.size
    if ours.dtype != step.limits.dtype or ours.shape != right.shape:
        counts["wrong"] += ours.size
        verdict.fault(f"{title} are {ours.dtype}{ours.shape}, no whole numbers of the type")
        return
    differ = (ours != right) & ~np.isnan(step.steps)
    if not differ.any():
        return
    steps, rough_steps = (np.broadcast_to(each.steps, ours.shape) for each in (step, rough))
    inside = np.isfinite(steps) & (np.abs(steps) < 2 * (step.limits.max - step.limits.min))
    off = np.abs(steps - rough_steps)[inside].max(initial=0)
    allowed = min(max(4 * off, _TIE), _MOST)
    by = np.abs(ours.astype(np.float64) - right)
    away = np.where(by == 1, np.abs(np.abs(steps - np.rint(steps)) - 0.5), np.inf)
    far = differ & ~(away <= allowed)
    ties = differ & (away <= _TIE)
    counts["ties"] += int(ties.sum())
    counts["near"] += int((differ & ~far & ~ties).sum())
    counts["wrong"] += int(far.sum())
    verdict.largest = max(verdict.largest, float(away[differ & ~far].max(initial=0)))
    if far.any():
        at = np.unravel_index(int(np.argmax(np.where(far, by, 0))), by.shape)
        verdict.fault(
            f"{title}: {far.sum()} of {far.size} wrong, the furthest at {[*map(int, at)]}:"
            f" {ours[at]} for {right[at]:g} (exactly {steps[at]:.6f} steps; fp32 is off by"
            f" {off:.1e})"
        )


def distance(ours: Any, right: Any) -> float:
    """The largest difference; infinite where infinities and NaN are in other places."""
    ours, right = np.asarray(ours, np.float64), np.asarray(right, np.float64)
    finite = np.isfinite(right)
    if not np.array_equal(np.where(finite, 0, ours), np.where(finite, 0, right), equal_nan=True):
        return float("inf")
    return float(np.max(np.abs(ours[finite] - right[finite]), initial=0))


def ties_per_100000(counts: Counter[str]) -> float:
    """How many of 100,000 values are one step off next to a tie."""
    return 1e5 * (counts["ties"] + counts["near"]) / max(counts["all"], 1)


def in_process(function: Callable[[Argument], Answer], argument: Argument) -> Answer:
    """The answer of a new process; raises RuntimeError if it ends without one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, argument).result()


def _judged(path: str) -> Verdict:
    try:
        return in_process(judge, Path(path))
    except Exception as error:  # the others are still to be judged
        traceback.print_exc()
        return Verdict(Path(path).stem, broken=f"{type(error).__name__}: {error}"[:300])


def main() -> int:
    """Run it."""
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL.onnx")
    parser.add_argument("--python", help="a Python that makes the networks")
    parser.add_argument("--only", default="", help="names of networks, with commas")
    options = parser.parse_args()
    if not (options.models or options.python):
        parser.error("give MODEL.onnx files, or --python PYTHON to make networks")
    with tempfile.TemporaryDirectory() as folder:
        models = [*options.models]
        if options.python:
            names = options.only.split(",") if options.only else []
            words = [options.python, "-m", "benchmarks.quantised_networks", folder, *names]
            root = Path(__file__).resolve().parents[1]
            subprocess.run(words, cwd=root, check=True, stdout=sys.stderr)
            models += sorted(map(str, Path(folder).glob("*.onnx")))
        verdicts = []
        for path in models:
            verdict = _judged(path)
            print(verdict, file=sys.stderr, flush=True)
            verdicts.append(verdict)
    total = Counter[str]()
    for verdict in verdicts:
        total += verdict.counts
    figures: dict[str, float] = {
        "networks": len(verdicts),
        "refused": sum(bool(verdict.refused) for verdict in verdicts),
        "broken": sum(bool(verdict.broken) for verdict in verdicts),
        "tensors": sum(verdict.tensors for verdict in verdicts),
        "faults": sum(verdict.more for verdict in verdicts),
        **{key: total[key] for key in ("all", "ties", "near", "wrong")},
    }
    figures["ties_per_100000"] = ties_per_100000(total)
    limits = {"wrong": 0, "faults": 0, "broken": 0, "ties_per_100000": MAX_TIES}
    return Outcome("quantised", figures, limits=limits).print()


if __name__ == "__main__":
    sys.exit(main())
