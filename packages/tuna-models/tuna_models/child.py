"""The child process that reads, builds and checks models. Imports TVM; the command line never does.

A user's mistake is not an exception here but an answer, which `process` raises again.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from tuna.configs import TaskConfig, from_json
from tuna.libraries.tvm import toolchain
from tuna.libraries.tvm.kernels import machine
from tuna.libraries.tvm.model_answers import Answers, Case, RightOutput
from tuna.libraries.tvm.whole_models import extract_object
from tuna_models import build, choosing, edges, importer, inputs, program, rules, runtimes, timing
from tuna_models.build import Record, TaskKernels
from tuna_models.child_answers import (
    ChildAnswer,
    Contenders,
    Estimates,
    LargestError,
    ModelFile,
    Plan,
    ReadModel,
    WeightFiles,
    WrittenAnswers,
)
from tuna_models.manifest import Class, ManifestTask, ModelTensor
from tuna_models.process import refusing
from tuna_models.program import Program
from tuna_models.segments import Form


@refusing
def locations(path: str) -> WeightFiles:
    """The places of its weights that the model file names, unchecked."""
    return WeightFiles(locations=tuple(importer.locations(Path(path))))


@refusing
def inspect(
    path: str,
    target: str,
    shapes: Mapping[str, Any],
    values: Mapping[str, Any],
    batch: int | None,
    text: str,
) -> ReadModel:
    """Return the model's tasks, and the texts of those without a core.

    The module's text is written to the file `text`.
    """
    model = importer.read(Path(path), shapes, batch, values)
    module = importer.to_relax(model, Path(path).name)
    planned = build.plan(module, TaskKernels(_target(target), {}, winograd=False), _target(target))
    Path(text).write_text(planned.text)
    return ReadModel(
        opset=importer.opset(model),
        inputs=tuple(
            ModelTensor(
                **declared,
                bounds=followed["bounds"],
                parameter=followed["name"] if followed["name"] != declared["name"] else "",
            )
            for declared, followed in zip(importer.inputs_of(model), inputs.of(module), strict=True)
        ),
        tasks=tuple(
            ManifestTask(config=task.to_json(), count=count) for task, count in planned.tasks()
        ),
        bodies=planned.bodies,
        tvm=tvm.__version__,
    )


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
    code, file = _target(target), ModelFile.model_validate(model)
    module = importer.to_relax(_read(file), Path(file.path).name)
    known = {key: [Record(*record) for record in variants] for key, variants in records.items()}
    variants = choosing.variants(module, known, code, winograd=winograd, compare=compare)
    plain = build.plan(module, None, code) if untuned and len(variants.planned) == 1 else None
    first, kernels = variants.planned[0], variants.kernels
    # other tasks than those of the model are no part of what is said of it
    same = kernels.with_records({key: of[0] for key, of in known.items()})
    forms = (Form.TENSORS, Form.SEGMENTS) if first.cuts else ()
    checked = [build.plan(module, same, code, form) for form in forms]
    made = Program.of(variants.planned, plain, code, checked)
    classes = kernels.classes
    counts = Counter(classes.get(task.key, Class.DEFAULT) for task, _ in first.tasks())
    choices = ", ".join(f"{counts[kind]} {kind}" for kind in Class if counts[kind])
    made.write(Path(folder), choices)
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
        refused_records=variants.kernels.refused,
        operations=sum(task.flops * count for task, count in first.tasks()),
        cpu_flags=machine.cpu_flags(code),
    )


@refusing
def answer(
    model: Mapping[str, Any],
    given: Mapping[str, Any],
    by: str,
    output: str,
) -> WrittenAnswers:
    """Write inputs and the answers to them into the file `output`: those of the reference, or of
    the runtime `by`.

    `model` is a `ModelFile`, `given` are arguments of `inputs.values`.
    """
    source, arrays = _read(ModelFile.model_validate(model)), inputs.values(**given)
    near, why = rules.tolerance(source)
    titles = "random inputs"
    try:
        if by:
            (run, *_) = runtimes.ALL[by](source, list(arrays.values()), 1)
            named = zip(run(), rules.names(source), strict=True)
            cases = [Case(list(arrays.values()), [RightOutput(*pair) for pair in named])]
        elif given["recorded"]:
            right = rules.of(source, arrays, near)
            cases = [Case(list(arrays.values()), right.outputs, right.quantised)]
            titles = "recorded inputs"
        else:
            cases, titles = edges.cases(source, given["inputs"], arrays, near)
    except Exception as error:  # operators and runtimes raise whatever they do
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
        return WrittenAnswers(unanswered=reason)
    Answers(cases, near).write(Path(output))
    count = len(cases[0].cuts)
    text = rules.line(cases[0].outputs, near, why, count, titles)
    return WrittenAnswers(rule=text, tolerance=near, quantised=count)


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
    """Link a planned model and its compiled functions into the shared library `output`."""
    compiled = extract_object(Path(functions), Path(folder))
    program.link(Path(folder), compiled, json.loads(target), Path(output))
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


def _read(file: ModelFile) -> Any:
    return importer.read(Path(file.path), file.shapes, None, file.values)


def _target(text: str) -> Any:
    # kernels in a model are those that were tuned
    return tvm.target.Target(toolchain.for_code(json.loads(text)))


HANDLERS = {
    "locations": locations,
    "inspect": inspect,
    "estimate": estimate,
    "plan": plan,
    "answer": answer,
    "difference": difference,
    "link": link,
    "compare": compare,
}
