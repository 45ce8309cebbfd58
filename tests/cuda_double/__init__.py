"""Stand-ins for NVIDIA's driver and management library, and candidates that run on them."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared_data import need

from tuna.libraries.triton.artifact import (
    GLOBAL_SCRATCH,
    PARAM_BYTES,
    PROFILE_SCRATCH,
    Artifact,
    Buffer,
    Launch,
    Param,
)
from tuna.testing.servers import find

UUID = "GPU-fa4e0000-0000-0000-0000-000000000000"
_SOURCE = Path(__file__).with_name("libcuda.c")
_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


@functools.cache
def _library() -> bytes:
    """The compiled stand-in; skips where there is no C compiler."""
    need(find("cc"), "a C compiler (cc)")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.so")
        words = ["cc", "-O2", "-shared", "-fPIC", f"-Wl,-soname,{_NAMES[0]}"]
        subprocess.run([*words, "-o", made, _SOURCE, "-lm", "-ldl"], check=True)
        return made.read_bytes()


def install(folder: Path) -> Path:
    """Write both libraries into a folder, which then belongs into LD_LIBRARY_PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _NAMES:
        (folder / name).write_bytes(_library())
    return folder


def image(params: Sequence[Param], **words: object) -> bytes:
    """A module that does what the words say: see libcuda.c."""
    sizes = ",".join(str(PARAM_BYTES[one.type]) for one in params)
    told = {"params": sizes, **words}
    return ("FAKE " + " ".join(f"{name}={value}" for name, value in told.items())).encode()


def product(m: int, n: int, k: int, element: str = "fp16", **words: object) -> Artifact:
    """A candidate that multiplies packed matrices; `words` say how it behaves."""
    params = (
        *(Param(f"{name}_ptr", "ptr", name) for name in "abc"),
        *(Param(name, "i32", value=size) for name, size in (("M", m), ("N", n), ("K", k))),
        *(Param(name, "ptr", name) for name in (GLOBAL_SCRATCH, PROFILE_SCRATCH)),
    )
    shapes = {"a": ((m, k), "input"), "b": ((k, n), "input"), "c": ((m, n), "output")}
    code = image(params, run=f"product_{element}", **words)
    return Artifact(
        "sm_90",
        "3.6.0",
        "0" * 64,
        tuple(Buffer(name, element, shape, role) for name, (shape, role) in shapes.items()),
        (Launch(0, "gemm", (m * n, 1, 1), 4, 32, 65536, 0, 1, 0, 1, params),),
        (code,),
    )
