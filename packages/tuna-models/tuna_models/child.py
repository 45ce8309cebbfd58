"""The child process that reads, builds and checks models. Imports TVM; the command line never does.

A user's mistake is not an exception here but an answer, which `process` raises again.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from tuna.common.cpu import cpu_model
from tuna.common.messages import one_line
from tuna.configs import TaskConfig, from_json
from tuna.configs.model import TOLERANCE
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.model_answers import Answers, Case, RightOutput
from tuna.libraries.tvm.whole_models import extract_objects
from tuna.sandbox.forks import start_fork
from tuna_models.child_answers import (
    AskedFile,
    ChildAnswer,
    Contenders,
    Estimates,
    FileCheck,
    LargestError,
    ModelFile,
    Plan,
    ReadModel,
    Sentence,
    WeightFiles,
    WrittenAnswers,
)
from tuna_models.compiler import build, choosing, passes, program
from tuna_models.compiler.build import Record, TaskKernels
from tuna_models.compiler.passes import Analysis
from tuna_models.compiler.program import Program
from tuna_models.compiler.segments import Form
from tuna_models.judging import (
    alone,
    bounds,
    edges,
    file_check,
    inputs,
    not_finite,
    promise,
    right_answers,
    runtimes,
    timing,
)
from tuna_models.limits import raise_memory_error
from tuna_models.manifest import Class, ManifestTask, ModelTensor, Precision
from tuna_models.process import refusing
from tuna_models.reading import importer
from tuna_models.reading.onnx_reference import ReferenceFault

#: How onnxruntime says at which node it fails, and how it begins an error; characters of a reason
_RUNNING = re.compile(r".*while running (\w+) node\. Name:'(.*?)' Status Message: (.*)", re.DOTALL)
_STATUS, _REASON_CHARS = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : "), 200
#: The last analysed model with kernels for its target; the program of the last planned one, by its
#: folder; and forks that write answers, by the file.
_ANALYSED: dict[tuple[str, str], tuple[Analysis, TaskKernels]] = {}
_PLANNED: dict[str, Any] = {}
_FORKS: dict[str, int] = {}


@refusing
def locations(path: str) -> WeightFiles:
    """The places of its weights that the model file names, unchecked."""
    return WeightFiles(locations=tuple(importer.locations(Path(path))))


@refusing
def inspect(asked: Mapping[str, Any], text: str) -> ReadModel:
    """Return the tasks of the model that an `AskedFile` is, and the texts of those without a core.

    The module's text is written to the file `text`.
    """
    wanted = AskedFile.model_validate(asked)
    analysed = file_check.read(wanted, _target(wanted.target))
    planned, declared_inputs = analysed.planned, importer.inputs_of(analysed.model)
    sizes = {declared["name"]: declared["shape"] for declared in declared_inputs}
    kept = wanted.model_dump(include={"path", "values", "precision", "in_fp32"})
    _ANALYSED.clear()
    _ANALYSED[_key(ModelFile(shapes=sizes, **kept), wanted.target)] = (
        analysed.analysis,
        analysed.kernels,
    )
    Path(text).write_text(planned.text)
    return ReadModel(
        opset=importer.opset(analysed.model),
        inputs=tuple(
            ModelTensor(
                **declared,
                bounds=followed["bounds"],
                parameter=followed["name"] if followed["name"] != declared["name"] else "",
            )
            for declared, followed in zip(
                declared_inputs, bounds.of(analysed.analysis.module), strict=True
            )
        ),
        tasks=tuple(
            ManifestTask(config=task.to_json(), count=count) for task, count in planned.tasks()
        ),
        bodies=planned.bodies,
        tvm=tvm.__version__,
        left_in_fp32=dict(planned.left_in_fp32),
    )


@refusing
def check_file(asked: Mapping[str, Any]) -> FileCheck:
    """Return what would become of an `AskedFile`, which is a copy."""
    wanted = AskedFile.model_validate(asked)
    code = json.loads(wanted.target)
    if code.keys() == {"num-cores"}:
        code |= {"kind": "llvm", **toolchain.host()}
    return file_check.check(wanted, _target(json.dumps(code)))


@refusing
def estimate(tasks: list[dict[str, Any]], target: str, bodies: Mapping[str, str]) -> Estimates:
    """Estimate the cycles of the best point of each solver, by task key.

    `bodies` are the texts of tasks without a core, by their SHA-256.
    """
    cycles = {}
    for task in map(from_json, tasks):
        assert isinstance(task, TaskConfig)
        cycles[task.key] = choosing.estimates(task, _target(target), bodies.get(task.body, ""))
    return Estimates(cycles=cycles)


@refusing
def plan(
    model: Mapping[str, Any],
    target: str,
    records: Mapping[str, Any],
    winograd: bool,
    compare: bool,
    untuned: bool,
    folder: str,
) -> Plan:
    """Plan the model, a `ModelFile`, and write what crosses to workers into `folder`
    (`program.Program.write`).

    `records` are lists of [solver, params, whether of a similar task] by task key, the best first.
    With `compare` all of them are timed in the model, and the predicted kernel; with `untuned`, and
    nothing to compare, also what TVM makes of the model without Tuna.
    """
    file = ModelFile.model_validate(model)
    (analysis, kernels), code = _analysed(file, target), _target(target)
    known = {key: [Record(*record) for record in variants] for key, variants in records.items()}
    variants = choosing.variants(analysis, kernels, known, winograd=winograd, compare=compare)
    plain = None
    if untuned and len(variants.planned) == 1:
        plain = build.plan(analysis.module, None, code)
    first, kernels = variants.planned[0], variants.kernels
    # those of the model's tasks: a form that is checked may have others
    classes, refused = dict(kernels.classes), dict(kernels.refused)
    forms = (Form.TENSORS, Form.SEGMENTS) if first.cuts else ()
    checked = [build.emit(analysis, kernels, form) for form in forms]
    made = Program.of(variants.planned, plain, code, checked)
    counts = Counter(classes.get(task.key, Class.DEFAULT) for task, _ in first.tasks())
    choices = ", ".join(f"{counts[kind]} {kind}" for kind in Class if counts[kind])
    _PLANNED.clear()
    _PLANNED[folder] = made.write(Path(folder), choices)
    # the names of the tasks' functions, which differ between variants where kernels do
    functions = {
        made.names[f"timed_{number}"][name]: task.key
        for number, planned in enumerate(variants.planned)
        for name, task in planned.functions.items()
    }
    places: dict[str, dict[str, int | None]] = defaultdict(dict)
    for number, planned in enumerate(variants.planned):
        for name, task in planned.functions.items():
            if task.key in variants.records:
                own = made.names[f"timed_{number}"][name]
                places[task.key].setdefault(own, variants.records[task.key][number])
    return Plan(
        classes=classes,
        functions=functions,
        calls=dict(made.calls),
        places=places,
        refused_records=refused,
        operations=sum(task.flops * count for task, count in first.tasks()),
        cpu_flags=machine.cpu_flags(code),
        winograd=variants.kernels.has_winograd,
    )


def begin_answer(**arguments: Any) -> dict[str, Any]:
    """Begin to compute what `answer` will be asked with these arguments, in a fork; not answers of
    PyTorch and onnxruntime, whose threads a fork lacks."""
    output = str(arguments["output"])

    def write() -> None:
        _said(output).write_text(json.dumps(_answer(**arguments)))

    if not arguments["by"] and not importer.is_torch(Path(arguments["model"]["path"])):
        _FORKS[output] = start_fork(write)
    return {}


def answer(**arguments: Any) -> dict[str, Any]:
    """The answer of `_answer`, which a fork may have begun to compute."""
    output = str(arguments["output"])
    fork = _FORKS.pop(output, None)
    if fork is not None and os.waitpid(fork, 0)[1] == 0:
        said: dict[str, Any] = json.loads(_said(output).read_text())
        return said
    return _answer(**arguments)


@refusing
def _answer(
    model: Mapping[str, Any],
    given: Mapping[str, Any],
    by: str,
    output: str,
) -> WrittenAnswers:
    """Write inputs and the answers to them into the file `output`: those of the reference, or of
    the runtime `by`.

    `model` is a `ModelFile`, `given` are arguments of `inputs.values`.
    """
    file = ModelFile.model_validate(model)
    source, arrays = _read(file), inputs.values(**given)
    near, why = right_answers.tolerance(source)
    if file.precision is Precision.BF16 and file.max_error > near:
        near, why = file.max_error, "bf16"
    titles = "random inputs"
    try:
        if by:
            (run, *_) = runtimes.ALL[by](source, list(arrays.values()), 1)
            named = zip(run(), right_answers.names(source), strict=True)
            cases = [Case(list(arrays.values()), [RightOutput(*pair) for pair in named])]
        elif given["recorded"]:
            right = right_answers.of(source, arrays, near)
            cases = [Case(list(arrays.values()), right.outputs, right.quantised)]
            titles = "recorded inputs"
        else:
            cases, titles = edges.cases(source, given["inputs"], arrays, near)
    except Exception as error:  # operators and runtimes raise whatever they do
        raise_memory_error(error)
        return WrittenAnswers(unanswered=_reason(error))
    not_finite.refuse(Path(file.path).name, source, arrays, cases[0].outputs, titles)
    Answers(cases, near).write(Path(output))
    count = len(cases[0].cuts)
    text = right_answers.line(cases[0].outputs, near, why, count, titles)
    return WrittenAnswers(rule=text, tolerance=near, quantised=count)


def _reason(error: Exception) -> str:
    """Why the reference or a runtime has no answer, with the operator where they name it."""
    text = _RUNNING.sub(r"the operator \1 (\2): \3", str(error).strip())
    text = _STATUS.sub("", text.splitlines()[0] if text else "")
    own = isinstance(error, ReferenceFault) or text.startswith("the operator ")
    return one_line(text if own else f"{type(error).__name__}: {text}", _REASON_CHARS)


@refusing
def keep_error(
    model: Mapping[str, Any],
    target: str,
    given: Mapping[str, Any],
    answers: str,
    facts: Mapping[str, Any],
    built_error: float,
) -> WrittenAnswers:
    """Choose what a model in bf16 leaves in fp32 so that its error is kept, and add natural inputs
    to a file of right answers; what is returned adds that to the `facts` on the file.

    `given` are arguments of `inputs.values`. A model that was built so and was off by `built_error`
    leaves more. Nothing is chosen for another CPU than this, nor for a quantised model.
    """
    written, code = WrittenAnswers.model_validate(facts), _target(target)
    analysis, _ = _analysed(ModelFile.model_validate(model), target)
    own_flags = cpu_model().flags.split()
    if written.quantised or not set(machine.cpu_flags(code)).issubset(own_flags):
        return written
    right, roundings = Answers.read(Path(answers)), promise.Roundings(analysis, code)
    if roundings.error(right.cases[0], ()) > max(TOLERANCE, right.tolerance / 4):
        return written
    if not given["recorded"] and not built_error:
        right, count = promise.with_natural(right, roundings, given["inputs"])
        right.write(Path(answers))
        if count:
            rule = f"{written.rule} and {count} natural inputs, compared with its answers in fp32"
            written = written.model_copy(update={"rule": rule})
    chosen = promise.choose(
        right,
        roundings,
        promise.costs(roundings, analysis, code),
        left=analysis.in_fp32,
        built_error=built_error,
    )
    return written.model_copy(update={"promise": chosen})


@refusing
def operators(model: Mapping[str, Any], answers: str) -> Sentence:
    """Return a sentence on the first operator that is wrong alone, on the inputs of a file of right
    answers."""
    source, right = _read(ModelFile.model_validate(model)), Answers.read(Path(answers))
    names = [value["name"] for value in importer.inputs_of(source)]
    cases = [dict(zip(names, case.inputs, strict=True)) for case in right.cases]
    try:
        return Sentence(sentence=alone.sentence(source, cases, right.tolerance))
    except Exception as error:  # the reference raises whatever its operators do
        raise_memory_error(error)
        return Sentence(sentence=f"Its operators were not built alone ({_reason(error)}).")


@refusing
def difference(found: str, expected: str) -> LargestError:
    """Return the largest error of the answers in one file against those in another."""
    ours, right = (
        [answer.values for answer in Answers.read(Path(path)).cases[0].outputs]
        for path in (found, expected)
    )
    return LargestError(error=inputs.largest_error(ours, right))


@refusing
def link(folder: str, functions: str, target: str, output: str) -> ChildAnswer:
    """Link the model that was planned last, in this folder, and its compiled functions into the
    shared library `output`."""
    compiled = extract_objects(Path(functions), Path(folder))
    program.link(_PLANNED.pop(folder), compiled, json.loads(target), Path(output))
    return ChildAnswer()


@refusing
def compare(
    model: Mapping[str, Any],
    library: str,
    given: Mapping[str, Any],
    threads: int,
) -> Contenders:
    """Time the built model in turn with other runtimes; see `timing.compare`.

    `model` is a `ModelFile`, `given` are arguments of `inputs.values`.
    """
    found, arrays = _read(ModelFile.model_validate(model)), inputs.values(**given)
    return timing.compare(found, Path(library), arrays, threads=threads)


def _analysed(file: ModelFile, target: str) -> tuple[Analysis, TaskKernels]:
    """The analysis of the model, with kernels for the target; the last one is kept."""
    key = _key(file, target)
    if key not in _ANALYSED:
        module, code = importer.to_relax(_read(file), Path(file.path).name), _target(target)
        _ANALYSED.clear()
        analysis = passes.analyse(module, code, precision=file.precision, in_fp32=file.in_fp32)
        _ANALYSED[key] = analysis, TaskKernels(code, {})
    return _ANALYSED[key]


def _key(file: ModelFile, target: str) -> tuple[str, str]:
    return json.dumps(file.model_dump(exclude={"max_error"}), sort_keys=True), target


def _said(output: str) -> Path:
    """The file in which a fork writes what it answers."""
    return Path(f"{output}.json")


def _read(file: ModelFile) -> Any:
    return importer.read(Path(file.path), file.shapes, None, file.values)


def _target(text: str) -> Any:
    # kernels in a model are those that were tuned
    return tvm.target.Target(toolchain.for_code(json.loads(text)))


HANDLERS = {
    "locations": locations,
    "inspect": inspect,
    "check_file": check_file,
    "estimate": estimate,
    "plan": plan,
    "begin_answer": begin_answer,
    "answer": answer,
    "difference": difference,
    "keep_error": keep_error,
    "operators": operators,
    "link": link,
    "compare": compare,
}
