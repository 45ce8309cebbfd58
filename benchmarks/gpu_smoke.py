"""First contact with a GPU: what it is, and launches of some candidates by Tuna's driver, in the
box and out of it, beside those of Triton's own launcher, which must write the same bits.

Where a launch fails in the box alone, it is repeated without each part of the box; then the fewest
system calls, or folders, that must be opened for it are searched for.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_launch import PARTS
from tuna.configs import Config, from_json
from tuna.libraries.items import WorkItem
from tuna.libraries.steps import find_step
from tuna.sandbox import box as boxes
from tuna.sandbox import landlock, seccomp
from tuna.sandbox.box import Box
from tuna.sandbox.processes import child_env
from tuna.testing.rehearsal import run_context
from tuna_triton import nvml
from tuna_triton.library import TritonLibrary

ROOT = Path(__file__).resolve().parents[1]
_FP8 = {"data_type": "FP8_E4M3", "c_type": "BF16", "trans_b": True}
_BLOCKS = {"scheme": "fp8_w8a8", "block_n": 128, "block_k": 128}
_SCALES = {"scale_a": "block1x128", "scale_b": "block128x128"}


def _product(m: int, n: int, k: int, **facts: object) -> Config:
    return from_json({"kind": "gemm", "m": m, "n": n, "k": k, **facts})


def _experts(tokens: int, intermediate: int, hidden: int, **facts: object) -> Config:
    sizes = {"tokens": tokens, "intermediate": intermediate, "hidden": hidden}
    return from_json({"kind": "moe", "experts": 8, "topk": 2, **sizes, **facts})


#: Solver and layer of each candidate that is launched; sizes that no tile divides among them.
CASES: Sequence[tuple[str, Config]] = (
    ("TritonGemm", _product(96, 80, 64, data_type="FP16")),
    ("TritonGemm", _product(300, 260, 200, data_type="BF16")),
    ("TritonGemm", _product(128, 256, 512, **_FP8)),
    ("TritonBlockFp8", _product(100, 256, 384, **_FP8, **_SCALES)),
    ("TritonMoe", _experts(7, 96, 160)),
    ("TritonMoe", _experts(40, 128, 256, **_BLOCKS)),
    ("TritonMoe", _experts(33, 96, 160, scheme="fp8_w8a8")),
    ("TritonMoe", _experts(9, 96, 160, scheme="int8_w8a16")),
)
#: Candidates of each: the consumer's default, and points of the space.
EACH = 2
#: Candidates that are launched at a time.
_AT_ONCE = 8
_SEARCH_S = 150.0
#: Folders of which a driver may want more, with all rights.
_FOLDERS = [f"/{name}" for name in ("dev", "etc", "run", "var", "tmp", "root", "home", "proc")]


@dataclass
class Launches:
    """What came of the launches, as figures and as lines for a reader."""

    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def facts(notes: list[str]) -> dict[str, float]:
    """What NVML says of the first device, and this kernel of the box."""
    notes.append(f"kernel {os.uname().release}, Landlock {landlock.version()}")
    notes.append(f"open in the box: {'; '.join(boxes.lacking()) or 'nothing'}")
    try:
        library = nvml.Nvml()
        device = library.devices()[0]
        notes.append(f"NVML: {device}")
        return {
            "memory_gib": device.memory_bytes / 2**30,
            "sm_mhz": library.sm_mhz(device.uuid),
            "highest_sm_mhz": library.sm_mhz(device.uuid, highest=True),
            "slowed": library.is_slowed(device.uuid),
        }
    except (nvml.NvmlError, IndexError) as error:
        notes.append(f"NVML does not answer: {error}")
        return {"nvml_failed": 1}


def launches(folder: Path, until: float = math.inf) -> Launches:
    """Compile the candidates and launch each in three ways, several at a time; those that are not
    begun at the moment `until` are left out."""
    launched, library, context = Launches(), TritonLibrary(), run_context(folder)
    launched.figures |= facts(launched.notes)
    requests: list[dict[str, Any]] = []
    try:
        arch = library.environment().arch
        for solver, config in CASES:
            item = WorkItem(
                **{"job_id": 1, "attempt": 1, "session_id": 1, "library": "triton"},
                **{"step": "compile", "solver": solver, "config": config.to_json()},
                target=arch,
                options={"candidates": EACH},
            )
            (built,) = library.run(find_step(library, "compile"), [item], context)
            for trial in built.trials:
                if trial.artifact is None:
                    launched.notes.append(f"{config.label}: not built: {trial.output_tail[-300:]}")
                    continue
                own = folder / str(len(requests))
                own.mkdir()
                (own / "candidate.tkb").write_bytes(context.artifacts.get(trial.artifact))
                requests.append({"artifact": str(own / "candidate.tkb"), "solver": solver})
                requests[-1] |= {"config": config.to_json(), "params": trial.params}
                requests[-1]["index"] = trial.index
    finally:
        library.close()
    requests.sort(key=lambda one: one["index"])  # one of each case before the second of any
    with ThreadPoolExecutor(min(_AT_ONCE, len(os.sched_getaffinity(0)))) as pool:
        answers = list(pool.map(lambda one: _in_three_ways(one, until), requests))
    counted = dict.fromkeys(("candidates", "right", "triton_equal", "box_equal", "same_code"), 0)
    for request, answer in zip(requests, answers, strict=True):
        if answer is None:
            launched.left_out.append(f"{_name(request)}: the time is over")
        else:
            _compare(request, answer, counted, launched, until)
    launched.figures |= {name: float(count) for name, count in counted.items()}
    return launched


def _in_three_ways(request: dict[str, Any], until: float) -> list[dict[str, Any]] | None:
    """The answers by Tuna's driver, by Triton's launcher, and in the box; None after `until`."""
    folder = Path(request["artifact"]).parent
    ways = ({"by": "driver"}, {"by": "triton"}, {"by": "driver", "limits": limits_of(folder)})
    answers = []
    for way in ways:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return None
        answers.append(launched({**request, **way}, folder, min(120, left_s)))
    return answers


def _name(request: dict[str, Any]) -> str:
    return f"{from_json(request['config']).label} {request['params']}"


def _compare(
    request: dict[str, Any],
    answers: list[dict[str, Any]],
    counted: dict[str, int],
    found: Launches,
    until: float,
) -> None:
    """Count what is equal in a candidate's answers."""
    ours, theirs, boxed = answers
    counted["candidates"] += 1
    for which, one in (("by the driver", ours), ("by Triton", theirs), ("in the box", boxed)):
        if "failed" in one:
            found.notes.append(f"{_name(request)} {which}: {one['failed']}")
    counted["right"] += bool(ours.get("right"))
    counted["triton_equal"] += "outputs" in ours and ours["outputs"] == theirs.get("outputs")
    counted["box_equal"] += "outputs" in ours and ours["outputs"] == boxed.get("outputs")
    counted["same_code"] += bool(theirs.get("same_code"))
    folder = Path(request["artifact"]).parent
    limits = limits_of(folder)
    if "failed" in boxed and "failed" not in ours and "box_failed" not in found.figures:
        found.figures["box_failed"] = 1
        reasons = {**request, "by": "driver", "limits": limits}
        found.notes += why_boxed_fails(reasons, folder, until)
    elif counted["candidates"] == 1 and "failed" not in ours:
        found.notes.append(f"device: {ours['facts']}")
        most = max(one.get("data_bytes", 0) for one in (ours, boxed))
        found.figures["data_gib"] = most / 2**30  # what RLIMIT_DATA counts
        found.notes.append(f"files beyond the box: {_beyond(ours['opened'], limits) or 'none'}")


def limits_of(folder: Path) -> dict[str, Any]:
    """The limits of a child that measures on a GPU, with candidates in `folder`."""
    writable = folder / "writable"
    writable.mkdir(exist_ok=True)
    box = Box(writable=(writable,), readable=(folder,), gpus=True)
    env = {**child_env(), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    facts = boxes.facts(box, env)
    if facts is not None:  # this program itself
        facts["rules"] = [*facts["rules"], (str(ROOT / "benchmarks"), int(landlock.READ))]
    return {"resources": boxes.resources(box, TritonLibrary.memory_bytes), "box": facts}


def launched(request: dict[str, Any], folder: Path, timeout_s: float = 120) -> dict[str, Any]:
    """The answer of `gpu_launch`; `failed` says why there is none."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(ROOT)]))
    if request.get("limits"):
        env |= dict.fromkeys(("HOME", "TMPDIR"), str(folder / "writable"))
    command = [sys.executable, "-m", "benchmarks.gpu_launch", json.dumps(request)]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {timeout_s:g} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"failed": f"exit code {done.returncode}: {(done.stdout + done.stderr)[-600:]}"}


def why_boxed_fails(request: dict[str, Any], folder: Path, until: float = math.inf) -> list[str]:
    """Which part of the box a launch cannot do with, and what must be opened in it."""

    def works(**changes: Any) -> bool:
        return "failed" not in launched({**request, **changes}, folder, timeout_s=60)

    notes, guilty = [], []
    for part in PARTS:
        alone = works(without=[one for one in PARTS if one != part])
        others = works(without=[part])
        notes.append(f"with {part} alone it {_word(alone)}, without {part} it {_word(others)}")
        guilty += [part] if not alone else []
    until = min(until, time.monotonic() + _SEARCH_S)
    if "seccomp" in guilty:
        without = [one for one in PARTS if one != "seccomp"]
        needed = fewest(
            lambda names: works(without=without, allow=names), sorted(seccomp.CALLS), until
        )
        notes.append(f"seccomp: it works if these calls are allowed: {needed}")
    if "landlock" in guilty:
        without = [one for one in PARTS if one != "landlock"]
        rights = int(~landlock.Right(0))

        def opened(paths: list[str]) -> bool:
            return works(without=without, rules=[(one, rights) for one in paths])

        paths = fewest(opened, _FOLDERS, until)
        while paths and time.monotonic() < until:
            inner = [
                str(one) for path in paths if Path(path).is_dir() for one in Path(path).iterdir()
            ]
            deeper = fewest(opened, inner, until) if inner else None
            if not deeper:
                break
            paths = deeper
        notes.append(f"Landlock: it works if these are open: {paths}")
    return notes


def _word(works: bool) -> str:
    return "works" if works else "fails"


def fewest(
    works: Callable[[list[str]], bool], things: Sequence[str], until: float
) -> list[str] | None:
    """The things that are needed, found by leaving out halves, quarters and so on; None: all of
    them are not enough. After the moment `until` the answer holds more than are needed."""
    left = list(things)
    if not works(left):
        return None
    size = len(left)
    while size > 1 and time.monotonic() < until:
        size = (size + 1) // 2
        at = 0
        while at < len(left) and time.monotonic() < until:
            others = left[:at] + left[at + size :]
            if works(others):
                left = others
            else:
                at += size
        if size == 1:
            break
    return left


def _beyond(opened: Sequence[str], limits: dict[str, Any]) -> list[str]:
    """Files that no rule of the box opens."""
    box = limits["box"] or {"rules": []}
    rules = [os.path.realpath(path) for path, _ in box["rules"]]
    return [
        path
        for path in opened
        if not any(os.path.commonpath([rule, path]) == rule for rule in rules)
    ]


def _alone() -> int:
    """Print the launches alone, as lines."""
    with tempfile.TemporaryDirectory() as folder:
        found = launches(Path(folder))
    print("\n".join(found.notes), file=sys.stderr)
    print(json.dumps(found.figures))
    return 0


if __name__ == "__main__":
    sys.exit(_alone())
