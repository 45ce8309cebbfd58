"""Imports TVM without its 23 seconds of tensor intrinsics that no CPU of this architecture uses.

`tvm.s_tir.tensor_intrin` parses the intrinsics of every device when it is first imported, which
each TuneContext does. Here an empty package takes its place and only the modules for the host are
imported. It depends on the layout of that package in the pinned version; where that differs the
plain import is used, which is slow and right.
"""

from __future__ import annotations

import importlib
import platform
import sys
import types
from pathlib import Path

_PACKAGE = "tvm.s_tir.tensor_intrin"
_BY_MACHINE = {
    "x86_64": ("x86",),
    "amd64": ("x86",),
    "aarch64": ("arm_cpu",),
    "arm64": ("arm_cpu",),
}


def import_intrinsics(wanted: tuple[str, ...] | None = None, architecture: str = "") -> bool:
    """Import the intrinsics named by `wanted` (default: those of the architecture, which is the
    host's by default).

    Returns whether the fast way worked.
    """
    machine = architecture or platform.machine().lower()
    names = _BY_MACHINE.get(machine, ()) if wanted is None else wanted
    there = sys.modules.get(_PACKAGE)
    if there is not None and getattr(there, "__file__", None) is not None:
        return False  # the whole package is there
    import tvm.s_tir

    if there is None:
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(Path(str(tvm.s_tir.__file__)).parent / "tensor_intrin")]
        sys.modules[_PACKAGE] = package
    else:
        package = there
    try:
        if not names:
            raise ImportError("no list of intrinsics for this machine")
        for name in names:
            importlib.import_module(f"{_PACKAGE}.{name}")
    except Exception:  # with any changed package the plain import below is the fallback
        for name in [name for name in sys.modules if name.startswith(_PACKAGE)]:
            del sys.modules[name]
        importlib.import_module(_PACKAGE)
        return False
    tvm.s_tir.tensor_intrin = package
    return True
