"""Kernels of one's own and their shapes, read for an import and checked in a child of the
sandbox."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from tuna.common.files import read_text
from tuna.common.messages import last_line
from tuna.errors import BadInput
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildFault, ChildTimeout, child_env
from tuna_triton.triton_kernel import TritonKernelConfig
from tuna_triton.user_file import UserFile, parse

_MAX_FILE_BYTES, _MAX_SHAPES_BYTES, _MAX_SHAPES = 1 << 20, 16 << 20, 10_000
_EXAMPLE = "docs/gpu.md says what a file of a kernel has; examples/triton_kernels has two"
#: Time and memory of the functions at one shape.
_SHAPE_S, _MEMORY_BYTES = 60.0, 16 << 30


@dataclass(frozen=True)
class ImportedKernel:
    """A kernel at each of its shapes."""

    file: UserFile
    configs: tuple[TritonKernelConfig, ...]  #: different ones

    @property
    def bodies(self) -> dict[str, bytes]:
        """The body of the configs by its SHA-256."""
        return {self.file.digest: self.file.text.encode()}

    @property
    def tag(self) -> str:
        """A name for these layers that another version of the file does not have."""
        return f"{self.file.kernel.function}-{self.file.digest[:8]}"


def read_kernel(path: Path, shapes: Path) -> ImportedKernel:
    """Return the kernel of a Python file at the shapes of a JSON file; raises BadInput that names
    what is wrong with either.

    The file's functions are run for each shape, the reference too.
    """
    file = parse(read_text(path, _MAX_FILE_BYTES, _EXAMPLE), path.name)
    configs = tuple(
        dict.fromkeys(_config(file, shape, shapes, number) for number, shape in _shapes(shapes))
    )
    _check(file, configs)
    return ImportedKernel(file, configs)


def _shapes(path: Path) -> Sequence[tuple[int, dict[str, Any]]]:
    """The shapes of a file with their numbers."""
    text = read_text(path, _MAX_SHAPES_BYTES, _EXAMPLE)
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON: {error}.") from None
    if not isinstance(found, list) or not found or not all(isinstance(x, dict) for x in found):
        raise BadInput(
            f"{path} is not a list of shapes.", hint='such as [{"rows": 4096, "columns": 1024}]'
        )
    if len(found) > _MAX_SHAPES:
        raise BadInput(f"{path} has {len(found)} shapes, more than {_MAX_SHAPES}.")
    return list(enumerate(found, 1))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _config(file: UserFile, shape: dict[str, Any], path: Path, number: int) -> TritonKernelConfig:
    try:
        return TritonKernelConfig(file.kernel.function, tuple(shape.items()), file.digest)
    except BadInput as error:
        raise BadInput(f"Shape {number} of {path} is refused: {error}.") from None


def _check(file: UserFile, configs: Sequence[TritonKernelConfig]) -> None:
    """Run the file's functions for each shape; raises BadInput with the first fault."""
    with TemporaryDirectory(prefix="tuna-", ignore_cleanup_errors=True) as home:
        child = Child(
            "tuna_triton.user_kernel",
            env=child_env({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
            memory_bytes=_MEMORY_BYTES,
            cwd=home,
            box=Box(writable=(Path(home),)),
        )
        try:
            for config in configs:
                _check_shape(child, file, config)
        finally:
            child.close()


def _check_shape(child: Child, file: UserFile, config: TritonKernelConfig) -> None:
    request = {"op": "check", "text": file.text, "name": file.name, "config": config.to_json()}
    try:
        fault = child.call(request, _SHAPE_S, check=_fault)["fault"]
    except ChildTimeout:
        raise BadInput(
            f"The functions of {file.name} took more than {_SHAPE_S:g} s for {config.label}.",
            hint="compute the reference by NumPy's functions on whole arrays",
        ) from None
    except ChildFault as error:
        raise BadInput(
            f"The process that runs the functions of {file.name} ended at {config.label}: {error}"
            f" {last_line(error.tail)}".rstrip(" .")
            + "."
        ) from None
    if fault:
        raise BadInput(fault)


def _fault(answer: Any) -> dict[str, str]:
    if not isinstance(answer, dict) or not isinstance(answer.get("fault"), str):
        raise ValueError("no fault")
    return {"fault": answer["fault"][:2000]}
