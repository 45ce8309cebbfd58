"""Lets each process that builds Triton kernels tell the stand-in of the driver about them: Python
imports this module at its start where its folder is in PYTHONPATH."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: What compiles kernels, with the function of `described` that watches it.
_COMPILERS = {"tuna_triton.builder": "watch", "benchmarks.gpu_triton": "watch_jit"}


class _Finder:
    """Finds a module that compiles as usual, and changes it once it is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _COMPILERS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            import described

            getattr(described, _COMPILERS[name])(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
