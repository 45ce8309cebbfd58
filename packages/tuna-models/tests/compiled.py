"""Planned models, compiled and linked as a worker and the coordinator do it, in this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm

from tuna.configs.model import BF16_TOLERANCE, WholeModelConfig
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm import model_answers, toolchain, whole_models
from tuna.libraries.tvm.kernel_child import TvmLoader
from tuna.libraries.tvm.model_answers import Answers, Case, ModelProblem, RightOutput, Run
from tuna_models.child_answers import BODY, PROGRAM
from tuna_models.compiler import build, passes, program
from tuna_models.compiler.build import Planned, TaskKernels
from tuna_models.compiler.program import Program
from tuna_models.compiler.segments import Form
from tuna_models.judging import bounds, edges, inputs, rules
from tuna_models.manifest import Precision
from tuna_models.reading import importer


def job_of(folder: Path, target: Mapping[str, Any]) -> KernelJob:
    """The job of a program that was written into a folder, with `answers.npz` there."""
    text = json.dumps(target)
    digests = (digit * 64 for digit in "012")
    config = WholeModelConfig("net", text, *digests)
    files = {"program": str(folder / PROGRAM), "answers": str(folder / "answers.npz")}
    return KernelJob(config, "TvmModel", text, {}, 0, 1, {}, str(folder / BODY), files)


def write_answers(path: Path, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Write the right outputs to these inputs, called y0, y1, ..."""
    answers = [RightOutput(values, f"y{place}") for place, values in enumerate(outputs)]
    Answers([Case(list(inputs), answers)]).write(path)


def write(planned: Planned, target: Mapping[str, Any], folder: Path, *others: Planned) -> Path:
    """Write a program into the folder and compile its functions; returns what was compiled."""
    code = tvm.target.Target(toolchain.for_code(target))
    Program.of([planned, *others], None, code).write(folder, "predicted")
    return _built(folder, target)


def _built(folder: Path, target: Mapping[str, Any]) -> Path:
    """Compile the functions of a program that was written into a folder."""
    whole_models.build(job_of(folder, target), folder / "built.zip")
    return folder / "built.zip"


def check(
    folder: Path,
    target: Mapping[str, Any],
    model: Any,
    reference: Any,
    precision: Precision = Precision.FP32,
) -> tuple[ModelProblem, list[Run]]:
    """The check of a built model against the answers of another."""
    module = importer.to_relax(model, "net")
    given = inputs.values(bounds.of(module), seed=0)
    near, _ = rules.tolerance(reference)
    near = BF16_TOLERANCE if precision is Precision.BF16 else near
    cases, _ = edges.cases(reference, bounds.of(module), given, near)
    Answers(cases, near).write(folder / "answers.npz")
    return answer(folder, target, module, precision)


def answer(
    folder: Path,
    target: Mapping[str, Any],
    module: Any,
    precision: Precision = Precision.FP32,
) -> tuple[ModelProblem, list[Run]]:
    """The problem in `answers.npz` of the folder, and the answer of an imported model to it."""
    of = tvm.target.Target(target)
    kernels = TaskKernels(of, {})
    analysis = passes.analyse(module, of, precision=precision)
    forms = (Form.TENSORS, Form.SEGMENTS) if analysis.cuts else ()
    planned, *checked = (build.emit(analysis, kernels, form) for form in (Form.MODEL, *forms))
    code = tvm.target.Target(toolchain.for_code(target))
    Program.of([planned], None, code, checked).write(folder, "predicted")
    job = job_of(folder, target)
    whole_models.build(job, folder / "built.zip")
    problem = model_answers.problem(job.files["answers"])
    kernel = TvmLoader().load(job, folder / "built.zip", [*problem.inputs, problem.blank()])
    return problem, kernel.answer()  # type: ignore[return-value]


def compile_to(planned: Planned, target: Mapping[str, Any], path: Path) -> None:
    """Write a shared library that TVM's Relax virtual machine loads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = tvm.target.Target(toolchain.for_code(target))
        main = Program.of([planned], None, code).write(folder, "predicted")
        objects = whole_models.extract_objects(_built(folder, target), folder)
        program.link(main, objects, target, path)
