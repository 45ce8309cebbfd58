"""The installed oneDNN: found by package metadata here, asked for its version and instruction set
in a child."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from tuna.errors import LibraryMissing
from tuna.libraries.base import Environment
from tuna.libraries.cached_probe import cached_probe
from tuna.messages import install_extra
from tuna.sandbox.cores import eval_cpus
from tuna.sandbox.cpu import cpu_model
from tuna.sandbox.processes import Child, ChildFault, child_env

#: The wheel that holds the library. Intel's own of later years need 600 MB of runtimes.
WHEEL = "onednn-cpu-gomp"
_FILE = "libdnnl.so.3"
_HINT = install_extra("onednn")
_TIMEOUT_S = 180.0
_MEMORY_BYTES = 4 << 30


def library_path() -> Path:
    """The library's file in this Python's installation; raises LibraryMissing."""
    try:
        found = files(WHEEL) or []
    except PackageNotFoundError:
        found = []
    for path in (Path(str(file.locate())) for file in found if file.name == _FILE):
        if path.exists():
            return path.resolve()
    raise LibraryMissing("oneDNN is not installed.", hint=_HINT)


def describe() -> Environment:
    """The environment of this machine: CPU, measuring cores, oneDNN."""
    path, cpu = library_path(), cpu_model()
    file = path.stat()
    facts = cached_probe(
        "onednn",
        [str(path), file.st_size, file.st_mtime_ns, cpu.name, cpu.digest],
        lambda: _facts(path),
    )
    return Environment(
        library="onednn",
        library_version=facts["version"],
        arch=facts["isa"],
        num_cu=len(eval_cpus()),
        toolchain=f"onednn-{facts['version']}",
        device=cpu.name,
        flags={"cpu_flags": cpu.digest, "cpu_runtime": facts["runtime"]},
    )


def child(module: str) -> Child:
    """A child that may load oneDNN, on this process's cores."""
    return Child(module, env=child_env({"OMP_NUM_THREADS": "1"}), memory_bytes=_MEMORY_BYTES)


def ask(
    asked: Child, op: str, timeout_s: float = _TIMEOUT_S, **arguments: Any
) -> Mapping[str, Any]:
    """Return a child's answer; raises LibraryMissing where oneDNN cannot be used."""
    try:
        return asked.call({"op": op, **arguments}, timeout_s)
    except ChildFault as error:
        raise LibraryMissing(f"oneDNN cannot be used here: {error}.", hint=_HINT) from error


@functools.cache  # it does not change while this process lives
def _facts(path: Path) -> Mapping[str, str]:
    asked = child("tuna.libraries.onednn.implementations")
    try:
        return {name: str(value) for name, value in ask(asked, "describe", path=str(path)).items()}
    finally:
        asked.close()
