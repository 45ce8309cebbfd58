"""The two runs of `benchmarks.gpu`: stages one after the other, each in a process of its own and
within its seconds, so that one that fails costs no other.

All figures are in one file, which is written anew after each stage: a run that is cut off has left
those of the stages before. A stage that would not fit into what is left is left out by its name.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Outcome
from tuna.common.files import atomic_file
from tuna_triton import nvml

ROOT = Path(__file__).resolve().parents[1]
#: Seconds of a run, and those that are kept for its start and its end.
RUN_S, _KEPT_S = 420.0, 10.0
#: Seconds that a stage has beyond its own to end by itself, before it is killed.
GRACE_S = 8.0
_TAIL = 1500
#: prctl: orphans below this process become its children.
_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Part:
    """A stage of a run."""

    name: str
    #: Options of `benchmarks.gpu`, which gets `--seconds` and `--out` too.
    words: Sequence[str]
    #: Seconds that it may take; None: what the run has left.
    most_s: float | None
    #: Seconds below which it is left out; kept for it while others run.
    least_s: float


_TOKENS = "256"
_SHAPE = ("--stage", "shape", "--tokens", _TOKENS, "--part")
RUNS: Mapping[int, Sequence[Part]] = {
    1: (
        Part("smoke", ["--stage", "smoke"], 150, 40),
        Part("faults", ["--stage", "faults"], 80, 30),
        Part("product", ["--stage", "product"], 60, 20),
        Part("helion", ["--stage", "helion"], None, 60),
    ),
    2: (
        Part("exhaustive", [*_SHAPE, "exhaustive"], 120, 40),
        Part("search", [*_SHAPE, "search"], 70, 20),
        Part("autotune", ["--stage", "autotune", "--tokens", _TOKENS], None, 60),
    ),
}


def whole(asked: argparse.Namespace, stand_in: bool) -> int:
    """All stages of the run that the command line of `benchmarks.gpu` asks for; returns 0 where
    each was right and within its limits."""
    if not asked.out:
        raise SystemExit("--run needs --out: the folder for its figures and trials.")
    few = ["--candidates", str(asked.candidates)] if asked.candidates else []
    document = run(
        asked.run,
        RUNS[asked.run],
        seconds=asked.seconds or RUN_S,
        folder=asked.out.absolute(),
        stand_in=stand_in,
        command=[sys.executable, "-m", "benchmarks.gpu", *few],
    )
    print(json.dumps(document, indent=1))
    return 0 if document["ok"] else 1


def run(
    number: int,
    parts: Sequence[Part],
    *,
    seconds: float,
    folder: Path,
    stand_in: bool,
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.gpu"),
) -> dict[str, Any]:
    """Run the parts and return what is written to `run-NUMBER.json` in the folder, beside every
    trial in `trials.jsonl`."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    document: dict[str, Any] = {"bench": "gpu", "run": number, "limit_s": seconds}
    document |= {"stand_in": stand_in, "machine": machine(), "stages": {}, "left_out": []}
    with tempfile.TemporaryDirectory() as home:
        for place, part in enumerate(parts):
            left_s = seconds - _KEPT_S - (time.monotonic() - started)
            later_s = sum(one.least_s + GRACE_S for one in parts[place + 1 :])
            most_s = left_s - GRACE_S - later_s
            if most_s < part.least_s:
                why = f"{part.name}: {max(most_s, 0):.0f} s are left, and it takes {part.least_s:g}"
                document["left_out"].append(why)
            else:
                allowed_s = most_s if part.most_s is None else min(part.most_s, most_s)
                stage = _stage(part, command, allowed_s, folder, Path(home))
                left_out = stage.pop("left_out", [])
                document["left_out"] += [f"{part.name}: {one}" for one in left_out]
                document["stages"][part.name] = stage
            document["seconds"] = time.monotonic() - started
            document["ok"] = all(one["ok"] for one in document["stages"].values())
            with atomic_file(folder / f"run-{number}.json") as path:
                path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def machine() -> dict[str, Any]:
    """The device, the driver's packages and the processors of this machine."""
    facts: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "kernel": os.uname().release}
    for name in ("triton", "torch", "helion", "vllm", "numpy"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    try:
        facts["device"] = nvml.Nvml().devices()[0].name
    except (nvml.NvmlError, IndexError) as error:
        facts["device"] = f"unknown: {error}"
    return facts


def _stage(
    part: Part, command: Sequence[str], allowed_s: float, folder: Path, home: Path
) -> dict[str, Any]:
    """Run one stage; its figures, or why there are none."""
    out, log = home / f"{part.name}.out", home / f"{part.name}.log"
    files = ["--home", str(home), "--out", str(out), "--trials", str(folder / "trials.jsonl")]
    words = [*command, *part.words, "--seconds", f"{allowed_s:.0f}", *files]
    clock = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file)
        try:
            process.wait(allowed_s + GRACE_S)
            cut_off = False
        except subprocess.TimeoutExpired:
            cut_off = True
        finally:
            end_children()
    print(f"--- {part.name}", log.read_text(errors="replace"), sep="\n", file=sys.stderr)
    facts: dict[str, Any] = {"allowed_s": allowed_s, "seconds": time.monotonic() - clock}
    lines = out.read_text().splitlines() if out.exists() else []
    if cut_off:
        facts |= {"ok": False, "failed": f"killed after {facts['seconds']:.0f} s"}
    elif not lines:
        tail = log.read_text(errors="replace")[-_TAIL:]
        facts |= {"ok": False, "failed": f"ended with code {process.returncode}: {tail}"}
    for line in lines:
        document = json.loads(line)
        outcome = Outcome(
            "gpu", document["figures"], budget=document["budget"], limits=document["limits"]
        )
        missed = sorted(outcome.missed)
        facts |= document | {"ok": not missed and not cut_off, "missed": missed}
    return facts


def end_children() -> None:
    """Kill all processes below this one: what a stage that was killed has left."""
    this = psutil.Process()
    while children := this.children(recursive=True):
        for one in children:
            try:
                one.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(children, timeout=1)
