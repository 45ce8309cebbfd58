"""Names of a package that are imported from their modules when they are used first."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], tuple[str, ...]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is `file`.

    Its names are those that `__init__.pyi` beside it, which type checkers read, imports.
    """
    modules = {
        alias.name: str(node.module)
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:  # a module of the package, such as `golden`
            value: Any = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: list(modules), tuple(modules)
