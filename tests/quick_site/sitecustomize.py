"""For processes of tests that have this folder on PYTHONPATH: a kernel is timed for a tenth of a
second, and the machine is probed once before and after, not eight times.

On a busy machine repeats go on until the time is spent: 1 s for each candidate and 0.5 s for each
finalist in each process. No test that uses this looks at the figures.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_LONGEST_S = 0.1


def _quicken(measuring: ModuleType) -> None:
    timed = measuring._timed

    def quickly(contestants: Any, budget_s: float, *rest: Any) -> Any:
        return timed(contestants, min(budget_s, _LONGEST_S), *rest)

    measuring._timed = quickly  # type: ignore[attr-defined]
    measuring.probes._TRIES = 1


class _Finder:
    """Finds one module, and changes it once it is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "tuna.libraries.measuring":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def then_quicken(module: ModuleType) -> None:
            execute(module)
            _quicken(module)

        spec.loader.exec_module = then_quicken  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
