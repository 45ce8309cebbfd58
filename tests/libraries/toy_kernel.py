"""A kernel in Python for the tests of `CandidateLibrary`: the params say how it behaves."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuna.libraries.kernels import Builder, Kernel, KernelJob, Loader


class Toy(Builder, Loader):
    """`job.options["params"]` are the candidates, each a word or two: how it builds, how it
    runs."""

    def propose(self, job: KernelJob) -> Sequence[str]:
        params = str(job.options.get("params", "good"))
        if params == "none":
            return []
        if params == "fails":
            raise ValueError("no proposal")
        return params.split(",")

    def workload(self, job: KernelJob) -> bytes:
        return b"the problem" if job.options.get("described") else b""

    def build_key(self, job: KernelJob, params: str) -> str:
        """Of candidates `same-NAME`."""
        if params == "same-raises":
            raise ValueError("no key")
        return "same" if params.startswith("same-") else ""

    def rebuild(self, job: KernelJob, params: str, built: Path, path: Path) -> None:
        if params == "same-dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if params == "same-fails":
            raise ValueError("another kernel")
        path.write_text(f"{params} of {built.read_text()}")

    def build(self, job: KernelJob, params: str, path: Path) -> None:
        if params == "build-raises":
            raise RuntimeError("cc: no")
        if params == "build-dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if params == "build-hangs":
            time.sleep(600)
        if params == "build-says-where":
            path.write_text(",".join(map(str, sorted(os.sched_getaffinity(0)))))
        elif params != "build-writes-nothing":
            path.write_text(params)

    def load(self, job: KernelJob, path: Path, arrays: Sequence[np.ndarray]) -> Kernel:
        way = path.read_text()
        a, b, c = arrays

        def run() -> None:
            if way == "dies":
                ctypes.string_at(0)
            if way == "hangs":
                time.sleep(600)
            if way == "raises":
                raise RuntimeError("no such device")
            if way == "wrong":
                c[...] = a @ b + 1
            elif way == "part":
                c[1:] = (a @ b)[1:]
            elif way == "keeps":  # a workspace that is read before it is written
                kept[:] = kept * 0 + a @ b
                c[...] = kept
            elif way != "nothing":
                c[...] = a @ b
            if way == "slow":
                time.sleep(0.005)

        if way.startswith("dated"):
            return Dated(run, arrays)
        return Clocked(run, arrays) if way == "clocked" else Kernel(run, arrays)


class Clocked(Kernel):
    """With a clock of its own."""

    def times_ms(self, number: int, repeats: int) -> list[float]:
        return [42.0] * repeats


class Dated(Kernel):
    """With the time of day as its times, so that no two measurements share them."""

    def times_ms(self, number: int, repeats: int) -> list[float]:
        return [time.time() * 1e3 % 1e5] * repeats


#: Of a 2 x 2 product.
kept = np.zeros((2, 2), dtype=np.float32)
