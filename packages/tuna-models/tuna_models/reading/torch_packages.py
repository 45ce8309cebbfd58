"""Operators that packages add to PyTorch, which a program may have: registered by importing their
packages. Imports torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from tuna.common.messages import one_line
from tuna.errors import BadInput
from tuna_models.refusals import REASON_CHARS

#: Modules that register the operators of a namespace, and the packages that have them
_PACKAGES = {
    "quantized_decomposed": ("torch.ao.quantization.fx._decomposed", "torch"),
    "torchao": ("torchao.quantization", "torchao"),
    "torchvision": ("torchvision", "torchvision"),
}
_OPERATOR = re.compile(rb'"torch\.ops\.(\w+)\.(\w+)')
#: Words of a text of torch's that says why it does not load a program
_TELLS = re.compile(r"\bversion|torch\.ops|\boperator|\bregister|\bmodule\b", re.IGNORECASE)
#: Characters of a part's name in a message
_NAME_CHARS = 80
#: Maximum of bytes of a program's graph
_MAX_BYTES = 256 << 20


def register(name: str, data: bytes) -> None:
    """Register the operators of a program in a file; raises BadInput with those that no installed
    package has."""
    import torch

    operators = sorted(set(_operators(data)))
    for space in sorted({space for space, _ in operators}):
        module, _ = _PACKAGES.get(space, ("", ""))
        if module:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    missing = [
        (space, operator)
        for space, operator in operators
        if not hasattr(getattr(torch.ops, space), operator)
    ]
    if missing:
        packages = sorted({_PACKAGES[space][1] for space, _ in missing if space in _PACKAGES})
        words = ", ".join(f"{space}.{operator}" for space, operator in missing)
        raise BadInput(
            f"{name} has operators that no installed package registers: {words}.",
            hint=f"pip install {' '.join(packages)}"
            if packages
            else "export the model without them: they are of its own code",
        )


def _operators(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the namespaces and names of the operators in a file; none of one of another form."""
    with contextlib.suppress(zipfile.BadZipFile, RuntimeError, NotImplementedError, OSError):
        for text in _documents(data):
            for space, operator in _OPERATOR.findall(text):
                yield space.decode(), operator.decode()


def _documents(data: bytes) -> Iterator[bytes]:
    """Yield the JSON documents in a program's archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.namelist():
            if member.endswith(".json"):
                with archive.open(member) as stream:
                    yield stream.read(_MAX_BYTES)


def damage(data: bytes) -> str:
    """The part of a program's archive that is not whole, in words; empty where all are."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.namelist():
            try:
                text = archive.read(member)
                if member.endswith(".json"):
                    json.loads(text)
            except (zipfile.BadZipFile, zlib.error, ValueError, OSError):
                return f"its part {one_line(member, _NAME_CHARS)} cannot be read"
    return ""


def version_fault(data: bytes) -> str:
    """The difference of a whole program's version from torch's, in words; empty without one."""
    from torch._export.serde.schema import SCHEMA_VERSION

    ours, _ = SCHEMA_VERSION
    for stated in map(json.loads, _documents(data)):
        version = stated.get("schema_version") if isinstance(stated, dict) else None
        theirs = version.get("major") if isinstance(version, dict) else None
        if theirs not in (None, ours):
            return f"it is of version {theirs} of the format, and this torch has {ours}"
    return ""


class LoadWarnings(logging.Handler):
    """The last line of what `torch.export.load` logs, in which it tells why it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def emit(self, record: Any) -> None:
        """Keep the line of the exception in a traceback."""
        lines = record.getMessage().strip().splitlines()
        self.last = lines[-1] if lines else self.last

    def reason(self, error: Exception) -> str:
        """Why a program was not loaded, which ended in this error."""
        lines = (self.last or str(error)).strip().splitlines()
        text = one_line(lines[-1] if lines else "", REASON_CHARS).rstrip(".")
        return text if _TELLS.search(text) else "its description is of another form"

    def __enter__(self) -> LoadWarnings:
        logging.getLogger("torch.export").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torch.export").removeHandler(self)
