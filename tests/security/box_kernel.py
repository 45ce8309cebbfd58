"""A product of matrices whose compiled candidates first try what measured code must not be able to
do."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuna.libraries.kernels import Builder, Kernel, KernelJob, Loader

_SOURCE = Path(__file__).with_name("box_acts.c")


class Hostile(Builder, Loader):
    """`job.options["params"]` are the candidates: `act argument`, or `good`."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        return str(job.options["params"]).split(",")

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        """The library, compiled once, with the act at its end, where no loader looks."""
        made = Path("acts.so")
        if not made.exists():
            subprocess.run(
                [str(shutil.which("cc")), "-shared", "-fPIC", "-o", str(made), str(_SOURCE)],
                check=True,
            )
        path.write_bytes(made.read_bytes() + f"\n{params}".encode())

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        params = path.read_bytes().rpartition(b"\n")[2].decode()
        what, _, argument = params.partition(" ")
        if argument == "OTHER":
            argument = str(next(one for one in sorted(path.parent.glob("*.so")) if one != path))
        act = ctypes.CDLL(str(path)).act
        a, b, c = arrays

        def run() -> None:
            refused = act(what.encode(), argument.encode()) if what != "good" else 0
            if refused:
                raise OSError(
                    refused, f"{what} refused: {errno.errorcode[refused]}", os.strerror(refused)
                )
            c[...] = a @ b

        return Kernel(run, arrays)
