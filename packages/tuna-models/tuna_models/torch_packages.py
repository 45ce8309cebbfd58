"""Operators that packages add to PyTorch, which a program may have: registered by importing their
packages. Imports torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import zipfile
from collections.abc import Iterator
from typing import Any

from tuna.errors import BadInput

#: Modules that register the operators of a namespace, and the packages that have them
_PACKAGES = {
    "quantized_decomposed": ("torch.ao.quantization.fx._decomposed", "torch"),
    "torchao": ("torchao.quantization", "torchao"),
    "torchvision": ("torchvision", "torchvision"),
}
_OPERATOR = re.compile(rb'"torch\.ops\.(\w+)\.(\w+)')
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
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                if member.endswith(".json"):
                    with archive.open(member) as stream:
                        for space, operator in _OPERATOR.findall(stream.read(_MAX_BYTES)):
                            yield space.decode(), operator.decode()


class LoadWarnings(logging.Handler):
    """The last line of what `torch.export.load` logs, in which it tells why it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def emit(self, record: Any) -> None:
        """Keep the line of the exception in a traceback."""
        lines = record.getMessage().strip().splitlines()
        self.last = lines[-1] if lines else self.last

    def __enter__(self) -> LoadWarnings:
        logging.getLogger("torch.export").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torch.export").removeHandler(self)
