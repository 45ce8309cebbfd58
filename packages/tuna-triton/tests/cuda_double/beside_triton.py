"""Launches a kernel of each signature by Triton's compiled launcher, then by Tuna's, on the
stand-in: `python -m cuda_double.beside_triton FOLDER SIGNATURES`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_double
from tuna_triton.artifact import GLOBAL_SCRATCH, PROFILE_SCRATCH, Launch, Param
from tuna_triton.driver import Cuda

WARPS, SHARED, GRID = 8, 70_000, (5, 4, 3)


def launcher(path: Path) -> Any:
    """Triton's launcher, an extension module."""
    loader = importlib.machinery.ExtensionFileLoader("__triton_launcher", str(path))
    spec = importlib.util.spec_from_loader("__triton_launcher", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module.launch


def flat(kinds: Any) -> list[str]:
    """The types of a signature, tuples taken apart."""
    if isinstance(kinds, str):
        return [kinds]
    return [one for kind in kinds for one in flat(kind)]


def value_of(cuda: Cuda, kind: str, number: int) -> Any:
    """An argument of this type; None for a constant, which is not passed."""
    if kind[0] == "*":
        return cuda.allocate(64)
    if kind == "constexpr":
        return None
    return 37.1 + number if kind.startswith("fp") else 1 if kind == "i1" else 37 + number


def nested(kinds: Any, values: Iterator[Any]) -> Any:
    """The next values in the form that the types have."""
    if isinstance(kinds, str):
        return next(values)
    return tuple(nested(one, values) for one in kinds)


def main(folder: Path, signatures: list[list[Any]]) -> None:
    cuda = Cuda("libcuda.so.1")
    for number, signature in enumerate(signatures):
        kinds = flat(signature)
        values = [value_of(cuda, kind, place) for place, kind in enumerate(kinds)]
        at = {GLOBAL_SCRATCH: cuda.allocate(1 << 16), PROFILE_SCRATCH: 0}
        params = [
            Param(f"x{place}", "ptr", buffer=f"x{place}")
            if kind[0] == "*"
            else Param(f"x{place}", kind, value=values[place])
            for place, kind in enumerate(kinds)
            if kind != "constexpr"
        ]
        addresses = {f"x{place}": value for place, value in enumerate(values)}
        params += [Param(name, "ptr", buffer=name) for name in at]
        launch = Launch(0, "kernel", GRID, WARPS, 32, SHARED, 64, 16, 0, 1, tuple(params))
        kernel = cuda.kernel(cuda.load(cuda_double.image(params)), launch)
        theirs = launcher(folder / f"{number}.so")
        scratch = (at[GLOBAL_SCRATCH], None)
        given = nested(signature, iter(values))
        metadata = (WARPS, 1, SHARED)
        theirs(*GRID, 0, kernel.value, False, False, *scratch, metadata, None, None, None, *given)
        cuda.prepared(kernel, launch, {**at, **addresses})()
        cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
