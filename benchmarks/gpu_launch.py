"""Launches one candidate in a process of its own, and prints what came of it as JSON:

    python -m benchmarks.gpu_launch '{"artifact": PATH, "config": {...}, "by": "driver"}'

`by`: Tuna's launches through the `driver`, or `triton`: Triton's JIT and launcher. `limits`: those
of `tuna.sandbox.child`, applied before anything else, but for the parts in `without` (landlock,
seccomp, resources, capabilities), the system calls in `allow` and the rules in `rules`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tuna.sandbox import child, seccomp

#: Parts of the box that can be left out one by one.
PARTS = ("landlock", "seccomp", "resources", "capabilities")


def main() -> None:
    """Answer the request in the command line."""
    asked = json.loads(sys.argv[1])
    try:
        if asked.get("limits"):
            _close(asked)
        answer = _launched(asked)
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(answer), flush=True)


def _close(asked: Mapping[str, Any]) -> None:
    limits, without = dict(asked["limits"]), set(asked.get("without", ()))
    box = dict(limits["box"] or {"gpus": True, "network": False, "rules": []})
    for part, nothing in (("landlock", 0), ("seccomp", False)):
        box[part] = nothing if part in without else box.get(part, nothing)
    box["rules"] = [*box["rules"], *asked.get("rules", ())]
    if "resources" in without:
        limits["resources"] = {}
    if "capabilities" in without:
        child._drop_capabilities = lambda: None
    _allow(set(asked.get("allow", ())))
    child.limit_self({**limits, "parent": os.getppid(), "box": box})


def _allow(allowed: set[str]) -> None:
    """Leave these system calls out of the filter."""
    refuse, refuse_if = seccomp.Filter.refuse, seccomp.Filter.refuse_if

    def refuse_others(self: seccomp.Filter, names: Iterable[str], number: int = 1) -> None:
        refuse(self, [name for name in names if name not in allowed], number)

    def refuse_other(self: seccomp.Filter, name: str, *checks: Any) -> None:
        if name not in allowed:
            refuse_if(self, name, *checks)

    seccomp.Filter.refuse = refuse_others  # type: ignore
    seccomp.Filter.refuse_if = refuse_other  # type: ignore


def _launched(asked: Mapping[str, Any]) -> dict[str, Any]:
    # as in the child that measures, packages are imported in the box
    from tuna.configs import from_json
    from tuna_triton.artifact import from_bytes
    from tuna_triton.cuda_measuring import DeviceBench
    from tuna_triton.driver import Cuda

    config, path = from_json(asked["config"]), asked["artifact"]
    artifact = from_bytes(Path(path).read_bytes())
    if asked["by"] == "triton":
        from benchmarks.gpu_triton import JitCuda

        cuda: Cuda = JitCuda(asked["solver"], config, asked["params"])
    else:
        cuda = Cuda()
    if asked.get("limits"):  # as before the first candidate
        seccomp.forbid_processes()
    with DeviceBench(cuda, config).placed(path) as candidate:
        error, tolerance = candidate.error()
        outputs = {
            one.name: hashlib.sha256(candidate.read(one).tobytes()).hexdigest()
            for one in artifact.buffers
            if one.role == "output"
        }
        once_ms = candidate.once_ms()
    same = getattr(cuda, "codes", None)
    return {
        "outputs": outputs,
        "error": error,
        "right": error <= tolerance,
        "once_ms": once_ms,
        "facts": vars(cuda.facts),
        "data_bytes": _status("VmData"),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "opened": _opened(),
        "same_code": None if same is None else same == list(artifact.binaries),
    }


def _status(name: str) -> int:
    """A line of this process's status that is in kilobytes, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _opened() -> list[str]:
    """Files that this process has open or mapped."""
    found = {line.split(maxsplit=5)[-1] for line in _lines("/proc/self/maps") if "/" in line}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    return sorted(one for one in found if one.startswith("/"))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    main()
