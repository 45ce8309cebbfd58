"""Calls the child process with TVM, `child`. Imports neither TVM nor ONNX.

A TunaError of a child's handler travels as an answer (`refusing`) and is raised again here
(`accepted`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from tuna.common.files import is_full
from tuna.common.messages import install_extra
from tuna.errors import BadInput, LibraryMissing, NotFound, ServiceError, StorageFull, TunaError
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildFailed, ChildFault, child_env
from tuna_models.child_answers import ChildAnswer
from tuna_models.limits import ModelLimits, raise_memory_error
from tuna_models.refusals import REPORT_HINT

Answer = TypeVar("Answer", bound=ChildAnswer)

#: Enough to read, plan and compile a model of a few hundred functions on a loaded machine.
_TIMEOUT_S = 1800.0
_KINDS: Mapping[str, type[TunaError]] = {
    kind.__name__: kind for kind in (BadInput, NotFound, ServiceError, StorageFull)
}


class ModelProcess:
    """A child that reads, builds and checks models; ended by `close` or at the end of a `with`."""

    def __init__(
        self,
        target: str,
        model: str,
        *,
        writable: Sequence[Path] = (),
        readable: Sequence[Path] = (),
        cpus: Sequence[int] | None = None,
        limits: ModelLimits | None = None,
    ) -> None:
        """`target` is the JSON of a TVM target; threads are its cores, or as many as `cpus`.

        `model` names the model in messages. `writable` are the folders in which the child works,
        `readable` foreign files that it needs. `limits` are by default those of the settings.
        """
        if importlib.util.find_spec("onnx") is None:
            raise LibraryMissing(
                "ONNX models need the package onnx.", hint=install_extra("tvm", "onnx")
            )
        self._model = model
        self.threads = len(cpus) if cpus else int(json.loads(target).get("num-cores", 1))
        names = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        variables = dict.fromkeys(names, str(self.threads)) | {"TVM_BIND_THREADS": "0"}
        self._home = TemporaryDirectory(prefix="tuna-", ignore_cleanup_errors=True)
        box = Box(writable=(Path(self._home.name), *writable), readable=readable)
        self.limits = limits or ModelLimits.of_settings()
        self._child = Child(
            "tuna_models.child",
            env=child_env(variables),
            cpus=cpus,
            box=box,
            limits=self.limits.resources,
        )

    def start(self, model: str) -> None:
        """Start the child if there is none, which imports TVM while the caller goes on; it works on
        this model from now on. Raises BadInput with how it ended."""
        self._model = model
        with self._faults():
            self._child.start()

    def call(self, kind: type[Answer], op: str, **arguments: Any) -> Answer:
        """Return the child's answer to an operation, which is of this kind; raises BadInput with
        what it refused, or with how it ended."""
        with self._faults():
            request = {"op": op, "cpu_s": self.limits.cpu_s * self.threads, **arguments}
            answer = self._child.call(request, _TIMEOUT_S)
        return kind.model_validate(accepted(answer))

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Raise BadInput, or StorageFull, in place of a fault of the child."""
        try:
            yield
        except ChildFault as error:
            cause = RuntimeError(error.tail)
            if is_full(error) or is_full(cause):
                raise StorageFull(f"No space is left to build {self._model}.") from cause
            what = f"The process that works on the model {self._model}"
            if refusal := self.limits.refusal(what, error, self.threads):
                raise refusal from cause
            if isinstance(error, ChildFailed):
                reason = str(error).splitlines()[0][:300].rstrip(".")  # TVM's traceback follows
                said = f"The model {self._model} cannot be processed ({reason})."
            else:
                said = f"The process that compiles {self._model} ended: {error}."
            raise BadInput(said, hint=REPORT_HINT) from cause

    def close(self) -> None:
        """End the child."""
        self._child.close()
        self._home.cleanup()

    def __enter__(self) -> ModelProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def refusing(
    handler: Callable[..., dict[str, Any] | ChildAnswer],
) -> Callable[..., dict[str, Any]]:
    """Decorate a child's handler: a TunaError becomes an answer with `refused`, `hint`, `kind`."""

    @functools.wraps(handler)
    def answer(**arguments: Any) -> dict[str, Any]:
        try:
            found = handler(**arguments)
            return found.model_dump() if isinstance(found, ChildAnswer) else found
        except TunaError as error:
            raise_memory_error(error)
            return {"refused": str(error), "hint": error.hint, "kind": type(error).__name__}

    return answer


def accepted(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a child's answer, or raise the error that it holds."""
    if "refused" in answer:
        raise _KINDS.get(answer["kind"], BadInput)(answer["refused"], hint=answer["hint"])
    return answer
