"""The check of a model's file before its import: all that is in the way, and the tasks without a
kernel. Imports TVM and onnx.

Behind an operator that cannot be imported there may be others. So it is cut out of a copy of the
file, as far as what it makes is known, and the rest is read anew.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import tvm

from tuna.configs import TaskConfig
from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries.tvm import function_costs, function_texts, functions
from tuna.libraries.tvm.kernels import machine
from tuna_models.arguments import Obstacles
from tuna_models.child_answers import AskedFile, FileCheck, Obstacle, PlainTask, Roofline
from tuna_models.compiler import build, choosing, graph, passes, precisions
from tuna_models.compiler.build import Planned, TaskKernels
from tuna_models.compiler.passes import Analysis
from tuna_models.manifest import Class, ManifestTask, ModelTensor
from tuna_models.names import names_of
from tuna_models.reading import fold, importer
from tuna_models.reading.known import UNKNOWN, Value
from tuna_models.refusals import Refusal

#: Seconds after which nothing more is looked for behind what cannot be imported.
_LONG_S = 10.0
#: Share of the time below which it is not looked up whether a task runs as scalars.
_SMALL = 0.005
#: Operations on floats in LLVM's text, and the extent of vectors.
_FLOATS = re.compile(
    r"\b(?:load|store|f(?:add|sub|mul|div|cmp|ptosi|ptoui)|[su]itofp|select|call)\b[\w ,.]*?"
    r" (<\d+ x )?(?:float|double|half|bfloat)\b"
)
#: Names of functions that Tuna writes as loops of their own (`recurrent_loops.py`, `indices.py`).
_WRITTEN = ("lstm", "gru", "rnn", "check_indices")
#: Words in the name of a function that is a convolution or a product.
_CORE = re.compile(r"(?:^|_)(conv[123]d(?:_transpose)?|matmul)")


@dataclass(frozen=True)
class ReadFile:
    """A model that was read and planned with predicted kernels."""

    model: Any
    analysis: Analysis
    planned: Planned
    kernels: TaskKernels


def read(asked: AskedFile, target: Any) -> ReadFile:
    """Read a model's file and plan it; raises BadInput for one that cannot be imported."""
    path, precision = Path(asked.path), asked.precision
    precisions.check_target(precision, target)
    model = importer.read(path, asked.shapes, asked.batch, asked.values)
    module = importer.to_relax(model, path.name)
    kernels = TaskKernels(target, {}, winograd=False)
    analysis = passes.analyse(module, target, precision=precision, in_fp32=asked.in_fp32)
    planned = build.emit(analysis, kernels)
    if not asked.in_fp32:
        precisions.check_plan(precision, planned, path.name)
    return ReadFile(model, analysis, planned, kernels)


def check(asked: AskedFile, target: Any) -> FileCheck:
    """Say what would become of the file, which is a copy that this may change."""
    refused: dict[Obstacle, None] = {}
    assumed, is_whole, started = "", True, time.monotonic()
    while True:
        try:
            analysed = read(asked, target)
        except BadInput as error:
            new = [each for each in _obstacles(error) if each not in refused]
            refused |= dict.fromkeys(new)
            if not new or time.monotonic() - started > _LONG_S:
                break
            if isinstance(error, Obstacles) and error.shapes:
                ones = _batches_of_one(error.shapes)
                if not ones:
                    break
                asked = asked.model_copy(update={"shapes": {**asked.shapes, **ones}})
                assumed = " ".join(
                    f"--shape {shlex.quote(f'{name}={_listed(extents)}')}"
                    for name, extents in ones.items()
                )
            nodes = {each.node for each in new if each.operator}
            if nodes:
                try:
                    if not _cut(asked, nodes):
                        break
                except (BadInput, Refusal):  # what it says, others have said, or it is of the copy
                    break
                is_whole = False  # and the shapes are in the file now
                asked = asked.model_copy(update={"shapes": {}, "batch": None})
        else:
            if is_whole:
                return _described(analysed, target, tuple(refused), assumed)
            break
    return FileCheck(obstacles=tuple(refused), assumed=assumed)


def _listed(extents: Sequence[int]) -> str:
    return ",".join(map(str, extents))


def _batches_of_one(shapes: Mapping[str, Sequence[int | str]]) -> dict[str, list[int]]:
    """Shapes that close open extents with 1; none unless each is the first of an input."""
    found: dict[str, list[int]] = {}
    firsts = {extents[0] for extents in shapes.values()} - {"?"}
    for label, (first, *others) in shapes.items():
        if any(isinstance(extent, str) and extent not in firsts for extent in others):
            return {}
        if first == "?":
            found[label] = [1, *(1 if isinstance(extent, str) else extent for extent in others)]
    return found | {extent: [1] for extent in firsts if isinstance(extent, str)}


def _obstacles(error: BadInput) -> Sequence[Obstacle]:
    """The obstacles that an error names."""
    if isinstance(error, Obstacles):
        return error.obstacles
    return [Obstacle(reason=str(error).rstrip("."), hint=error.hint)]


def _cut(asked: AskedFile, names: Collection[str]) -> bool:
    """Cut nodes out of an ONNX file; whether there is something left to read.

    What they made is an input from now on, where it is known to be real numbers of known extents;
    else what follows from it is cut out too.
    """
    path = Path(asked.path)
    if importer.is_torch(path):
        return False
    model = onnx.load(str(path), load_external_data=False)
    importer.fix_shapes(path.name, model, asked.shapes, asked.batch)
    graph, gone, made = model.graph, set[str](), []
    try:
        values = fold.known(model)
    except Refusal:  # of an input or a constant
        return False
    kept = []
    for node in graph.node:
        if names_of(node)[1] in names:
            for output in node.output:
                if _is_image(values.get(output, UNKNOWN)):
                    made.append(onnx.helper.make_value_info(output, values[output].type))
                else:
                    gone.add(output)
        elif gone.intersection(node.input):
            gone.update(node.output)
        else:
            kept.append(node)
    if not kept or len(kept) == len(graph.node):
        return False  # nothing is left, or they are within functions or bodies
    read = {name for node in kept for name in node.input}
    del graph.node[:]
    graph.node.extend(kept)
    graph.input.extend(made)
    del graph.output[:]
    ends = [output for node in kept for output in node.output if output and output not in read]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in ends)
    onnx.save(model, str(path))
    return True


def _is_image(value: Value) -> bool:
    """Whether a value is real numbers of known extents, which hardly decide a shape."""
    real = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    return value.kind in real and value.shape is not None and all(value.shape)


def _described(
    found: ReadFile, target: Any, refused: tuple[Obstacle, ...], assumed: str
) -> FileCheck:
    planned = found.planned
    return FileCheck(
        obstacles=refused,
        assumed=assumed,
        inputs=tuple(ModelTensor(**value) for value in importer.inputs_of(found.model)),
        tasks=tuple(ManifestTask(config=task.to_json(), count=n) for task, n in planned.tasks()),
        without_kernel=_without_kernel(found, target),
        rooflines=_rooflines(found, target),
        left_in_fp32=dict(planned.left_in_fp32),
    )


def _rooflines(read: ReadFile, target: Any) -> dict[str, Roofline]:
    """The rooflines of the tasks by label; of convolutions the direct count of operations."""
    cpu, found = machine.from_target(target), {}
    per_byte = cpu.cores * cpu.peak(DataType.FP32) / machine.memory_bytes(cpu.cores)
    for name, task in read.planned.functions.items():
        function, times = read.planned.module[name], 1.0
        if task.core is not None:
            operations = float(task.core.flops)
            times = cpu.peak(DataType.FP32) / cpu.peak(task.core.data_type)
        else:
            plain = read.kernels.plain.get(task.key, function)
            operations = function_costs.of_function(plain).operations
            has_products = function_costs.OPERATIONS in (plain.attrs or {})
            times = 1.0 if has_products else 2.0
        memory = function_costs.moved_bytes(function) * per_byte
        found[task.label] = Roofline(arithmetic=operations * times, memory=memory)
    return found


def _without_kernel(read: ReadFile, target: Any) -> tuple[PlainTask, ...]:
    """The tasks that are TVM's plain code, and those that run as scalars, by their time."""
    tasks = [
        (task, count)
        for task, count in read.planned.tasks()
        if (function := read.kernels.plain.get(task.key)) is not None
        and not functions.moves_nothing(function)
    ]
    if not tasks:
        return ()
    cycles = {task.key: _cycles(read, task, target) for task, _ in read.planned.tasks()}
    total = sum(cycles[task.key] * count for task, count in read.planned.tasks()) or 1.0
    final = {task.key: name for name, task in read.planned.functions.items()}
    rows = []
    for task, count in tasks:
        share, why = cycles[task.key] * count / total, _why(read, task)
        if not why and share < _SMALL:
            continue
        scalars = runs_as_scalars(read.planned.module[final[task.key]], target)
        if why or scalars:
            reason = why or "LLVM finds no vectors in its schedule by rule"
            rows.append(
                PlainTask(task=task.label, count=count, reason=reason, share=share, scalars=scalars)
            )
    return tuple(sorted(rows, key=lambda row: -row.share))


def _why(found: ReadFile, task: TaskConfig) -> str:
    """Why a task without a core has no kernel and no schedule; empty where it has one."""
    if core := _CORE.search(task.name):
        function = found.kernels.plain[task.key]
        shapes = [[int(extent) for extent in param.shape] for param in function.params[:2]]
        label = graph.label(core[1], shapes)
        reason = found.analysis.reasons.get(label, f"its type is {function.params[0].dtype}")
        return f"no kernel for {label}: {reason}"
    is_default = found.kernels.classes[task.key] is Class.DEFAULT
    if is_default and task.name.rstrip("_0123456789") not in _WRITTEN:
        return "no schedule by rule: TVM's default, on one core"
    return ""


def _cycles(found: ReadFile, task: TaskConfig, target: Any) -> float:
    """The estimate of a call of a task's best kernel; of plain code the least that it may take."""
    if task.core is not None:
        return min(choosing.estimates(task, target).values(), default=0.0)
    module = function_texts.module_of(found.planned.bodies[task.body])
    return function_costs.of_function(module["main"]).cycles


def runs_as_scalars(function: Any, target: Any) -> bool:
    """True if most operations on floats, in the code that LLVM has optimised, are on single values.

    A loop over vectors that LLVM took apart counts as scalars, a plain one that it put in vectors
    does not.
    """
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    text = tvm.tirx.build(module, target=target).inspect_source("ll")  # after LLVM's passes
    kinds = Counter(bool(each[1]) for each in _FLOATS.finditer(str(text)))
    return kinds[False] > kinds[True]
