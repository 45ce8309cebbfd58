"""Functions as object files: each is compiled alone, on any of the cores of this process. Imports
TVM.

An object file depends on its function and the target alone, so the number of processes changes no
byte of what is linked of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from tuna.sandbox.forks import start_fork

#: Maximum number of processes: the longest function of a model takes a sixth of the time of all,
#: and LLVM in each process 100 MB.
_MAX_PROCESSES = 8
_NUMBER_BYTES = 4


def compile_all(
    functions: Mapping[Path, Any], target: tvm.target.Target, processes: int | None = None
) -> None:
    """Compile the functions of TIR into object files, by default with a process for each core that
    this process may use.

    Forks write what they can. What is missing when they have ended, this process compiles itself,
    so that a fault is raised here, or ends this process, as it would without them. Nothing of TVM
    may have run on several threads in this process before.
    """
    # the longest first, so that the processes end together
    modules = sorted(
        ((path, tvm.IRModule({name: function})) for path, (name, function) in functions.items()),
        key=lambda entry: -len(tvm.ir.save_json(entry[1])),
    )
    count = min(processes or len(os.sched_getaffinity(0)), _MAX_PROCESSES, len(modules))

    def compile_one(number: int) -> None:
        path, module = modules[number]
        built = tvm.tirx.build(module, target=target)
        part = path.with_suffix(".part.o")
        built.write_to_file(str(part))
        part.replace(path)

    with tempfile.TemporaryFile() as numbers:
        numbers.write(
            b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in range(len(modules)))
        )
        numbers.flush()
        os.lseek(numbers.fileno(), 0, os.SEEK_SET)

        def compile_next() -> None:
            # forks share the place in the file, so that each number is read once
            while taken := os.read(numbers.fileno(), _NUMBER_BYTES):
                compile_one(int.from_bytes(taken, "big"))

        forks = [start_fork(compile_next) for _ in range(count - 1)]
        try:
            compile_next()
        finally:
            for fork in forks:
                os.waitpid(fork, 0)
    for number, (path, _) in enumerate(modules):
        if not path.exists():
            compile_one(number)
