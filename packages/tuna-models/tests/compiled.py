"""Models that are planned, and run or compiled and linked as a worker and the coordinator do it, in
this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm.target import codegen

from tuna.configs.model import BF16_TOLERANCE, WholeModelConfig
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm import model_answers, toolchain, whole_models
from tuna.libraries.tvm.kernel_child import TvmLoader
from tuna.libraries.tvm.model_answers import Answers, Case, ModelProblem, RightOutput, Run
from tuna_models.child_answers import BODY, PROGRAM
from tuna_models.compiler import build, passes, program
from tuna_models.compiler.build import Planned, TaskKernels
from tuna_models.compiler.program import Program, machine_of
from tuna_models.compiler.segments import Form
from tuna_models.judging import bounds, edges, inputs, right_answers
from tuna_models.manifest import Precision
from tuna_models.reading import importer, onnx_reference
from tuna_models.reading.torch_importer import TorchModel

#: This machine's CPU.
HERE: dict[str, Any] = {
    "kind": "llvm",
    "mcpu": str(codegen.llvm_get_system_cpu()),
    "num-cores": 1,
}
#: Without LLVM's optimisations, which take longer than all else and do not depend on operators;
#: tests of whole models and of exact sums have them.
TARGET = {**HERE, "opt-level": 0}


def planned(
    model: Any,
    kernels: TaskKernels | None = None,
    target: Mapping[str, Any] = TARGET,
    **options: Any,
) -> Planned:
    """The plan of a model of ONNX or PyTorch, or of a module of TVM; `options` of `build.plan`."""
    code = tvm.target.Target(target)
    module = model if isinstance(model, tvm.IRModule) else importer.to_relax(model, "net")
    return build.plan(module, kernels or TaskKernels(code, {}), code, **options)


def run(plan: Planned, *arrays: Any, target: Mapping[str, Any] = TARGET) -> list[Any]:
    """The outputs of a planned model."""
    machine = machine_of(plan, tvm.target.Target(target))
    answer = machine["main"](*map(tvm.runtime.tensor, arrays))
    return [value.numpy() for value in ([answer] if hasattr(answer, "numpy") else answer)]


def error_of(
    model: Any, plan: Planned, given: Mapping[str, Any], target: Mapping[str, Any] = TARGET
) -> float:
    """The largest error of a planned model against its reference."""
    is_torch = isinstance(model, TorchModel)
    expected = model.reference(given) if is_torch else onnx_reference.run(model, given)
    return inputs.largest_error(run(plan, *given.values(), target=target), expected)


def job_of(folder: Path, target: Mapping[str, Any]) -> KernelJob:
    """The job of a program that was written into a folder, with `answers.npz` there."""
    text = json.dumps(target)
    digests = (digit * 64 for digit in "012")
    config = WholeModelConfig("net", text, *digests)
    files = {"program": str(folder / PROGRAM), "answers": str(folder / "answers.npz")}
    return KernelJob(config, "TvmModel", text, {}, 0, 1, {}, str(folder / BODY), files)


def write_answers(path: Path, given: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Write the right outputs to these inputs, called y0, y1, ..."""
    answers = [RightOutput(values, f"y{place}") for place, values in enumerate(outputs)]
    Answers([Case(list(given), answers)]).write(path)


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
    near, _ = right_answers.tolerance(reference)
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
