"""Launches a kernel of each signature by Triton's compiled launcher, then by Tuna's, on the
stand-in: `python -m cuda_double.beside_triton FOLDER SIGNATURES`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import cuda_double
from tuna.libraries.triton.artifact import GLOBAL_SCRATCH, PROFILE_SCRATCH, Launch, Param
from tuna.libraries.triton.driver import Cuda

WARPS, SHARED, GRID = 8, 70_000, (5, 4, 3)


def launcher(path: Path) -> Any:
    """Triton's launcher, an extension module."""
    loader = importlib.machinery.ExtensionFileLoader("__triton_launcher", str(path))
    spec = importlib.util.spec_from_loader("__triton_launcher", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module.launch


def main(folder: Path, signatures: list[list[tuple[str, str]]]) -> None:
    cuda = Cuda("libcuda.so.1")
    for number, signature in enumerate(signatures):
        values: dict[str, float] = {
            name: cuda.allocate(64) for name, kind in signature if kind[0] == "*"
        }
        for at, (name, kind) in enumerate(signature):
            if kind != "constexpr" and name not in values:
                values[name] = 37.1 + at if kind.startswith("fp") else 37 + at
        at = {GLOBAL_SCRATCH: cuda.allocate(1 << 16), PROFILE_SCRATCH: 0}
        params = [
            Param(name, "ptr", buffer=name)
            if kind[0] == "*"
            else Param(name, kind, value=values[name])
            for name, kind in signature
            if kind != "constexpr"
        ]
        params += [Param(name, "ptr", buffer=name) for name in at]
        launch = Launch(0, "kernel", GRID, WARPS, 32, SHARED, 64, 16, 0, 1, tuple(params))
        kernel = cuda.kernel(cuda.load(cuda_double.image(params)), launch)
        theirs = launcher(folder / f"{number}.so")
        scratch = (at[GLOBAL_SCRATCH], None)
        given = [values.get(name, 0) for name, _ in signature]
        metadata = (WARPS, 1, SHARED)
        theirs(*GRID, 0, kernel.value, False, False, *scratch, metadata, None, None, None, *given)
        cuda.launch(kernel, launch, {**at, **{name: int(value) for name, value in values.items()}})
        cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
