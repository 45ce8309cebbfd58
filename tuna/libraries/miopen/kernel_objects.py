"""Kernel objects in fin's format: base64 of bzip2, with the size and MD5 of the uncompressed code
object."""

from __future__ import annotations

import base64
import binascii
import bz2
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from tuna.libraries.context import ArtifactStore
from tuna.libraries.items import CodeObject

#: Largest code object; a larger declared size is refused before decompression.
MAX_BYTES = 256 << 20
#: Limits of the database's columns for a kernel's name and options, in characters.
_MAX_FILE, _MAX_OPTIONS = 1024, 1 << 20


class BadKernel(Exception):
    """An invalid kernel object; the message says why."""


@dataclass(frozen=True)
class KernelObject:
    """A code object with its key in MIOpen: source file and compiler options."""

    file: str
    options: str
    code: bytes


@dataclass(frozen=True)
class Compiled:
    """The output of a compile step for one solver, with the code objects in the artifact store."""

    solver: str
    algorithm: str
    workspace: int
    params: str
    tunable: bool
    known_params: str | None  #: the session's best params, if MIOpen was given them for this build
    kernels: tuple[CodeObject, ...]  #: name is the source file, args the compiler options

    @property
    def param_independent(self) -> tuple[CodeObject, ...]:
        """The kernels if they do not depend on the params (not tunable, or a single build); else
        none."""
        return self.kernels if not self.tunable or len(self.kernels) == 1 else ()

    def dump(self) -> bytes:
        """JSON for `load`; equal contents give equal bytes."""
        document = {
            "solver": self.solver,
            "algorithm": self.algorithm,
            "workspace": self.workspace,
            "params": self.params,
            "tunable": self.tunable,
            "known_params": self.known_params,
            "kernels": [[kernel.artifact, kernel.name, kernel.args] for kernel in self.kernels],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def load(cls, data: bytes) -> Compiled:
        """The inverse of `dump`; raises KeyError for an invalid manifest."""
        try:
            found = from_json(data)
            kernels = tuple(
                CodeObject(artifact=digest, name=name, args=args)
                for digest, name, args in found["kernels"]
            )
            return cls(**found | {"kernels": kernels})
        except (ValueError, TypeError, LookupError):
            raise KeyError("of the compile step, which is no manifest,") from None


def decode(found: Mapping[str, Any]) -> KernelObject:
    """The kernel in one of fin's kernel objects, verified; raises BadKernel.

    Some versions of fin use the URL-safe alphabet padded with dots, and truncate the text at the
    first NUL: both alphabets are decoded, and a wrong size or MD5 is refused.
    """
    file, options, blob, size, md5 = (
        found.get(name)
        for name in ("kernel_file", "comp_options", "blob", "uncompressed_size", "md5_sum")
    )
    if (
        not isinstance(file, str)
        or not isinstance(options, str)
        or not isinstance(blob, str)
        or not file
    ):
        raise BadKernel("a kernel object lacks its file, options or blob")
    if len(file) > _MAX_FILE or len(options) > _MAX_OPTIONS:
        raise BadKernel(f"{file:.200}: the kernel's name or options are too long")
    if type(size) is not int or not 0 < size <= MAX_BYTES:
        raise BadKernel(f"{file}: the kernel's size {size!r} is not possible ({md5})")
    text = blob.strip().translate(str.maketrans("-_.", "+/=")).rstrip("=")
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        code = bz2.BZ2Decompressor().decompress(packed, size + 1)
    except (binascii.Error, OSError, ValueError) as error:
        raise BadKernel(
            f"{file}: the blob of {len(blob)} characters cannot be unpacked: {error}"
        ) from None
    if len(code) != size:
        raise BadKernel(f"{file}: the kernel has {len(code)} bytes, not the declared {size}")
    if hashlib.md5(code, usedforsecurity=False).hexdigest() != md5:
        raise BadKernel(f"{file}: the kernel's MD5 is not {md5}")
    return KernelObject(file, options, code)


def encode(kernel: KernelObject) -> dict[str, Any]:
    """The kernel object for fin's eval steps."""
    return {
        "kernel_file": kernel.file,
        "comp_options": kernel.options,
        "blob": base64.b64encode(bz2.compress(kernel.code, 9)).decode(),
        "md5_sum": hashlib.md5(kernel.code, usedforsecurity=False).hexdigest(),
        "uncompressed_size": len(kernel.code),
    }


def store(objects: Sequence[Mapping[str, Any]], artifacts: ArtifactStore) -> tuple[CodeObject, ...]:
    """Store fin's kernel objects as artifacts, without fin's duplicates of (file, options); raises
    BadKernel."""
    kept: dict[tuple[str, str], CodeObject] = {}
    for found in objects:
        if not isinstance(found, Mapping):
            raise BadKernel("a kernel object is not a JSON object")
        name = (str(found.get("kernel_file")), str(found.get("comp_options")))
        if name not in kept:
            kernel = decode(found)
            kept[name] = CodeObject(
                artifact=artifacts.put(kernel.code), name=kernel.file, args=kernel.options
            )
    return tuple(kept.values())


def fetch(compiled: Compiled, artifacts: ArtifactStore) -> list[dict[str, Any]]:
    """The kernel objects for fin's eval steps; raises KeyError if an artifact is missing or
    damaged."""
    return [
        encode(KernelObject(code.name, code.args, artifacts.get(code.artifact)))
        for code in compiled.kernels
    ]
