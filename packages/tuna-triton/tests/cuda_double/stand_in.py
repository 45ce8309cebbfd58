"""The stand-in for both of NVIDIA's libraries, compiled where a test asks for it."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

from shared_data import needed_program

_SOURCE = Path(__file__).with_name("libcuda.c")
_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


@functools.cache
def _library() -> bytes:
    """The compiled stand-in; skips where there is no C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.so")
        words = [needed_program("cc"), "-O2", "-shared", "-fPIC", f"-Wl,-soname,{_NAMES[0]}"]
        subprocess.run([*words, "-o", made, _SOURCE, "-lm", "-ldl"], check=True)
        return made.read_bytes()


def install(folder: Path) -> Path:
    """Write both libraries into a folder, which then belongs into LD_LIBRARY_PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _NAMES:
        (folder / name).write_bytes(_library())
    return folder


def variables(folder: Path) -> dict[str, str]:
    """Environment of a `tuna` that builds real Triton kernels for the stand-in in this folder: what
    compiles them adds to the stand-in's `script` what they compute."""
    (folder / "script").touch()
    return {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": str(Path(__file__).with_name("describing")),
        "TUNA_SANDBOX_WRITE": str(folder / "script"),
    }
