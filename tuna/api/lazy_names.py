"""Names of a package or module that are imported from their modules when they are used first."""

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
    """Return `__getattr__`, `__dir__` and `__all__` of the package or module in `file`.

    Its names are those that the .pyi beside it, which type checkers read, imports.
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
        module = importlib.import_module(modules[name])
        # a module, such as `golden`, is no attribute before it is imported
        is_module = module.__name__ == package or not hasattr(module, name)
        value: Any = (
            importlib.import_module(f"{module.__name__}.{name}")
            if is_module
            else getattr(module, name)
        )
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: list(modules), tuple(modules)
