"""The child process that reads, builds and checks models. Imports TVM; the command line never does.

What a user did wrong is not an exception here but an answer with `refused` and `hint`, which `process` raises again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tvm

from tuna.configs import TaskConfig, from_json
from tuna.errors import TunaError
from tuna.models import build, importer, timing
from tuna.models.kernels import Kernels, Record


def _refusing(handler: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(handler)
    def answer(**arguments: Any) -> dict[str, Any]:
        try:
            return handler(**arguments)
        except TunaError as error:
            return {"refused": str(error), "hint": error.hint}

    return answer


@_refusing
def inspect(path: str, target: str, shapes: Mapping[str, Any], batch: int | None, text: str) -> dict[str, Any]:
    """The tasks of the model file, with the text of those that have no core; writes the module's text to `text`."""
    model = importer.read_onnx(Path(path), shapes, batch)
    planned = build.plan(
        importer.to_relax(model, Path(path).name), Kernels(_target(target), {}, winograd=False), _target(target)
    )
    Path(text).write_text(planned.text)
    return {
        "opset": importer.opset(model),
        "inputs": build.tensors(importer.real_inputs(model)),
        "tasks": [[task.to_json(), count] for task, count in planned.tasks()],
        "bodies": planned.bodies,
        "tvm": tvm.__version__,
    }


@_refusing
def make(
    path: str, target: str, shapes: Mapping[str, Any], records: Mapping[str, Any], winograd: bool, output: str
) -> dict[str, Any]:
    """Build the model into the shared library `output`; `records` are [solver, params, other task or None] by task key."""
    model = importer.read_onnx(Path(path), shapes)
    known = {key: Record(solver, params, _task(other)) for key, (solver, params, other) in records.items()}
    kernels = Kernels(_target(target), known, winograd=winograd)
    planned = build.plan(importer.to_relax(model, Path(path).name), kernels, _target(target))
    build.compile_to(planned, _target(target), Path(output))
    return {
        "classes": {key: str(found) for key, found in kernels.classes.items()},
        "functions": {name: task.key for name, task in planned.functions.items()},
        "refused_records": kernels.refused,
    }


@_refusing
def check(path: str, shapes: Mapping[str, Any], library: str, seed: int, rivals: bool) -> dict[str, Any]:
    """Error against ONNX's reference on random input, times in turn with onnxruntime, and the share of each function."""
    model = importer.read_onnx(Path(path), shapes)
    return timing.compare(model, Path(library), seed, rivals=rivals)


def _task(fields: dict[str, Any] | None) -> TaskConfig | None:
    found = None if fields is None else from_json(fields)
    return found if isinstance(found, TaskConfig) else None


def _target(text: str) -> Any:
    return tvm.target.Target(json.loads(text))


HANDLERS = {"inspect": inspect, "make": make, "check": check}
