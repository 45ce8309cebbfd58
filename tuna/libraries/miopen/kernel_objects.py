"""Kernel objects in fin's format: base64 of bzip2, with the size and MD5 of the uncompressed code
object."""

from __future__ import annotations

import base64
import bz2
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from tuna.libraries.context import ArtifactStore
from tuna.libraries.items import CodeObject

#: Maximum of bytes of a code object; a larger declared size is refused before decompression
MAX_BYTES = 256 << 20
#: Limits of the database's columns for a kernel's name and options, in characters
_MAX_FILE, _MAX_OPTIONS = 1024, 1 << 20


class BadKernel(Exception):
    """An invalid kernel object; the message says why."""


@dataclass(frozen=True)
class Compiled:
    """The output of a compile step for one solver, with the code objects in the artifact store."""

    solver: str
    algorithm: str
    workspace: int
    params: str
    tunable: bool
    known_params: str | None  #: best params of the session, if MIOpen was given them for this build
    #: code objects, whose name is the source file and whose args are the compiler options
    kernels: tuple[CodeObject, ...]

    @property
    def param_independent(self) -> tuple[CodeObject, ...]:
        """The kernels if they do not depend on the params (not tunable, or a single build); else
        none."""
        return self.kernels if not self.tunable or len(self.kernels) == 1 else ()

    def dump(self) -> bytes:
        """JSON for `load`; equal contents give equal bytes."""
        kernels = [[kernel.artifact, kernel.name, kernel.args] for kernel in self.kernels]
        document = {**vars(self), "kernels": kernels}
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
            raise KeyError("of the compile step, which is not a manifest,") from None


def unpack(packed: bytes, size: int, md5: object) -> bytes:
    """The code object that bzip2 packed; with a size of 0 it is not packed. Raises BadKernel."""
    code = packed
    if size:
        # Stops at the declared size, so that a hostile blob cannot fill the memory.
        try:
            code = bz2.BZ2Decompressor().decompress(packed, size + 1)
        except (OSError, ValueError) as error:
            raise BadKernel(f"its blob cannot be unpacked: {error}") from None
        if len(code) != size:
            raise BadKernel(f"it does not have the declared {size} bytes")
    if hashlib.md5(code, usedforsecurity=False).hexdigest() != md5:
        raise BadKernel(f"its MD5 is not {md5}")
    return code


def decode(encoded: Mapping[str, Any]) -> bytes:
    """The code in one of fin's kernel objects, verified; raises BadKernel.

    Some versions of fin use the URL-safe alphabet padded with dots, and truncate the text at the
    first NUL: both alphabets are decoded, and a wrong size or MD5 is refused.
    """
    file, options, blob, size, md5 = (
        encoded.get(name)
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
        return unpack(base64.b64decode(text + "=" * (-len(text) % 4), validate=True), size, md5)
    except (BadKernel, ValueError) as error:
        raise BadKernel(f"{file}: {error}") from None


def encode(file: str, options: str, code: bytes) -> dict[str, Any]:
    """The kernel object for fin's eval steps."""
    return {
        "kernel_file": file,
        "comp_options": options,
        "blob": base64.b64encode(bz2.compress(code, 9)).decode(),
        "md5_sum": hashlib.md5(code, usedforsecurity=False).hexdigest(),
        "uncompressed_size": len(code),
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
            digest = artifacts.put(decode(found))
            kept[name] = CodeObject(artifact=digest, name=name[0], args=name[1])
    return tuple(kept.values())


def fetch(compiled: Compiled, artifacts: ArtifactStore) -> list[dict[str, Any]]:
    """The kernel objects for fin's eval steps; raises KeyError if an artifact is missing or
    damaged."""
    return [encode(code.name, code.args, artifacts.get(code.artifact)) for code in compiled.kernels]
