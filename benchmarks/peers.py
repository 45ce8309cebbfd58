"""Built models beside what PyPI has: onnxruntime, OpenVINO in fp32 and as it comes, ncnn, MNN.

`scripts/bench peers MODEL.onnx LIBRARY.so [LIBRARY.so ...] --python PYTHON` times libraries that
`tuna model build` wrote of the model, each with as many threads as it is built for, in turn with
the runtimes that PYTHON has (`pip install onnx onnxruntime openvino MNN ncnn`). Each runs in a
process of its own, on as many cores; a turn takes `--seconds`. Of one thread the CPU time counts,
of several the wall time. ncnn reads a model that its own pnnx has converted: MODEL.ncnn.param.
Tasks without a kernel of Tuna's, and those that run as scalars, are named on stderr with the reason
if they take more than 5 % of the estimated time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, command_line
from tuna.sandbox.cores import available_cpus, measuring_with
from tuna_models import api

_PROGRAM = Path(__file__).with_name("peer_process.py")
_PEERS = ("onnxruntime", "openvino_f32", "openvino", "mnn", "ncnn")
#: Share of the estimated time above which a task without a kernel is named.
_MUCH = 0.05
#: Peers that compute in fp32, as Tuna does.
_FP32 = ("onnxruntime", "openvino_f32", "mnn", "ncnn")


@dataclass
class Runner:
    """A runtime in its process."""

    name: str
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    medians_ms: list[float] = field(default_factory=list)

    @property
    def time_ms(self) -> float:
        """The median of its turns."""
        return statistics.median(self.medians_ms)

    def share(self, peer: Runner) -> float:
        """Its time over that of a peer: the median of the ratios within rounds."""
        pairs = zip(self.medians_ms, peer.medians_ms, strict=True)
        return statistics.median(own / other for own, other in pairs)

    def turn(self, seconds: float) -> None:
        """Let it run the model for so long."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        self.medians_ms.append(statistics.median(json.loads(self.process.stdout.readline())))

    def answers(self, file: Path) -> list[Any]:
        """Let it run the model once and write its answers to a file; return them."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{file}\n")
        self.process.stdin.flush()
        assert json.loads(self.process.stdout.readline()) == []
        with np.load(file, allow_pickle=False) as arrays:
            return [arrays[name] for name in arrays.files]


def main() -> int:
    """Run it."""
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument("libraries", type=Path, nargs="+", metavar="LIBRARY.so")
    parser.add_argument("--python", required=True, help="a Python that has the other runtimes")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.2, help="of each turn")
    options = parser.parse_args()
    outcome = Outcome("peers", {})
    ours: dict[int, float] = {}
    for library in options.libraries:
        facts = json.loads(Path(f"{library}.json").read_text())
        threads = facts["target"].get("num-cores", 1)
        _say_what_is_slow(options.model, facts, threads)
        ours[threads] = _in_turn(options, library, threads, outcome)
    if {1, 2} <= ours.keys():
        outcome.ratios["one thread over two"] = ours[1] / ours[2]
    return outcome.print()


def _say_what_is_slow(model: Path, facts: dict[str, Any], threads: int) -> None:
    """Print the tasks that `tuna model check` names, if they take much of the time."""
    with measuring_with(threads):
        check = api.check_file(
            model,
            shapes={value["name"]: value["shape"] for value in facts["inputs"]},
            precision=facts["precision"],
        )
    for each in check.without_kernel:
        if each.share > _MUCH:
            runs = "scalars" if each.scalars else "vectors"
            text = f"{each.task} ({each.count} calls) takes {each.share:.1%} at least, in {runs}"
            print(f"{threads} threads, {text}: {each.reason}", file=sys.stderr, flush=True)


def _in_turn(options: argparse.Namespace, library: Path, threads: int, outcome: Outcome) -> float:
    """Milliseconds of the library, which are written down with those of the peers."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(running(sys.executable, "tuna", library, threads))
        assert isinstance(ours, Runner), f"{library} does not run: {ours}"
        started = (running(options.python, name, options.model, threads) for name in _PEERS)
        peers = [one for one in map(stack.enter_context, started) if isinstance(one, Runner)]
        for _ in range(options.turns):
            for runner in (ours, *peers):
                runner.turn(options.seconds)
    key = f"{threads} threads"
    outcome.figures[f"{key}, tuna ms"] = ours.time_ms
    for peer in peers:
        named = f"{key}, {peer.name} {peer.facts['version']} ({peer.facts['precision']})"
        outcome.baseline[f"{named} ms"] = peer.time_ms
        outcome.ratios[f"{named}: tuna's share"] = ours.share(peer)
    fp32 = [ours.share(peer) for peer in peers if peer.name in _FP32]
    if fp32:
        outcome.ratios[f"{key}: of the fastest in fp32"] = max(fp32)
    return ours.time_ms


@contextlib.contextmanager
def running(
    python: str, name: str, model: Path, threads: int, *inputs: Path
) -> Iterator[Runner | str]:
    """A runtime that has the model loaded, and its inputs from these .npz files; the reason where
    it does not take part, which is said."""
    cpus = set(available_cpus()[-threads:])
    # what a runtime converts lies there: the process is killed, and removes nothing
    with tempfile.TemporaryDirectory(prefix="tuna-peers-") as folder:
        process = subprocess.Popen(
            [python, "-I", str(_PROGRAM), name, str(model.resolve()), str(threads), *inputs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "TMPDIR": folder},
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        try:
            assert process.stdout
            assert process.stderr
            line = process.stdout.readline()
            if line:
                yield Runner(name, process, json.loads(line))
            else:
                reason = process.stderr.read().strip().rpartition("\n")[2]
                print(f"{name} does not take part: {reason}", file=sys.stderr, flush=True)
                yield reason
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
