"""Tuna from Python: what the commands do, as functions that return data and print nothing.

    from tuna import api

    session = api.init_session("tvm", "from a notebook")
    api.import_configs(Path("layers.txt"), "mine")
    api.update_solvers("tvm")
    api.update_applicability(session.id, "mine")
    api.load_jobs(session.id, tag="mine", reason="tuning", options={"candidates": 16})
    api.run(session.id)
    api.report(session.id).layers[0].best

They use the settings of the process (`TUNA_*`), as the commands do, and raise
`tuna.errors.TunaError`. Importing this takes no time: a name's module is imported when the name is
used first. The names are those that `__init__.pyi`, which type checkers read, imports.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi")
_MODULES = {
    alias.name: str(node.module)
    for node in ast.parse(_STUB.read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = tuple(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] == __name__:  # a module of this package, such as `golden`
        found: Any = importlib.import_module(f"{__name__}.{name}")
    else:
        found = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
