"""A product of matrices whose candidates are programs that run in the child that measures them, as
machine code could."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuna.libraries.kernels import Builder, Kernel, KernelJob, Loader

#: What the programs use: whatever a candidate may find in its process.
_TOOLS = """
import json, os, sys
from tuna.libraries import measuring

def answer(op, value, times=1):
    measuring.HANDLERS[op] = lambda **_: value

def frames(text, op="measure"):
    def handler(**_):
        for folder in ("self", os.getppid()):
            for fd in range(3, 32):
                try:
                    name = os.readlink(f"/proc/{folder}/fd/{fd}")
                    place = os.open(f"/proc/{folder}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
                except OSError:
                    continue
                if name.startswith("pipe:"):
                    os.write(place, text.encode())
        return {}
    measuring.HANDLERS[op] = handler
"""


class Lying(Builder, Loader):
    """`job.options["programs"]` are the candidates: each is run once it has answered rightly."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        return list(job.options["programs"])

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        path.write_text(params)

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        program = path.read_text()
        a, b, c = arrays

        def run() -> None:
            c[...] = a @ b
            if program != "good":
                ctypes.pythonapi.PyRun_SimpleString((_TOOLS + program).encode())

        return Kernel(run, arrays)
