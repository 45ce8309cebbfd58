"""Errors of long sums against float64, beside those of onnxruntime and OpenVINO in fp32.

`scripts/bench sums --python PYTHON` builds a model of one operator for each case with predicted
kernels, for one thread, and runs it in turn with the runtimes that PYTHON has (`pip install onnx
onnxruntime openvino`). An error is the largest one over the largest value of the right answer; it
may be twice that of the better runtime, or the last digit of fp32. Times are CPU time, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, command_line
from benchmarks.peer_process import drawn
from benchmarks.peers import Runner, running

_PEERS = ("onnxruntime", "openvino_f32")
#: Error over that of the better runtime, at most, and error that is none: fp32 has no more digits
_LIMIT, _LAST_DIGIT = 2.0, 2.0**-23
_OPSET, _IR = 18, 9


@dataclass(frozen=True)
class Case:
    """An operator on an input of one shape, with weights."""

    operator: str
    shape: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]  #: shapes of its other inputs, drawn at random
    answer: Callable[..., Any]  #: function that returns the right answer, in float64
    attributes: dict[str, Any] = field(default_factory=dict)
    axes: tuple[int, ...] = ()  #: axes of a reduction, an input of the operator

    def others(self) -> list[Any]:
        """The operator's inputs but the first."""
        random = np.random.default_rng(1)
        values = [random.standard_normal(shape).astype(np.float32) for shape in self.weights]
        return values + ([np.array(self.axes, np.int64)] if self.axes else [])

    def right(self) -> Any:
        """The right answer in float64."""
        inputs = [drawn(self.shape, np.float32), *self.others()[: len(self.weights)]]
        return self.answer(*(each.astype(np.float64) for each in inputs))


def _softmax(x: Any) -> Any:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + 1e-5) * scale + shift


def _instance_norm(x: Any, scale: Any, shift: Any) -> Any:
    centred = x - x.mean(axis=(2, 3), keepdims=True)
    normed = centred / np.sqrt(np.square(centred).mean(axis=(2, 3), keepdims=True) + 1e-5)
    return normed * scale[:, None, None] + shift[:, None, None]


def _convolution(x: Any, weights: Any) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(x, weights.shape[2:], axis=(2, 3))
    return np.einsum("nchwyx,kcyx->nkhw", windows[:, :, ::2, ::2], weights, optimize=True)


def _mean(*axes: int) -> Callable[[Any], Any]:
    return lambda x: x.mean(axis=axes, keepdims=True)


CASES = {
    "product of 1,024": Case("MatMul", (64, 1024), ((1024, 256),), np.matmul),
    "product of 4,096": Case("MatMul", (64, 4096), ((4096, 256),), np.matmul),
    "convolution of 2,304": Case(
        "Conv", (1, 256, 29, 29), ((256, 256, 3, 3),), _convolution, {"strides": [2, 2]}
    ),
    "mean of planes of 3,136": Case("ReduceMean", (1, 64, 56, 56), (), _mean(2, 3), axes=(2, 3)),
    "mean of 3,136 rows": Case("ReduceMean", (8, 3136, 64), (), _mean(1), axes=(1,)),
    "mean of 1,500": Case("ReduceMean", (64, 1500), (), _mean(1), axes=(1,)),
    "softmax of 18,710": Case("Softmax", (16, 18710), (), _softmax),
    "softmax of 1,500": Case("Softmax", (64, 1500), (), _softmax),
    "softmax of 197": Case("Softmax", (197, 197), (), _softmax),
    "layer norm of 768": Case("LayerNormalization", (128, 768), ((768,), (768,)), _layer_norm),
    "instance norm of 3,025": Case(
        "InstanceNormalization", (1, 64, 55, 55), ((64,), (64,)), _instance_norm
    ),
}


def main() -> int:
    """Run it."""
    parser = command_line(__doc__)
    parser.add_argument("--python", required=True, help="a Python that has the other runtimes")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases with a word")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each turn")
    options = parser.parse_args()
    outcome = Outcome("sums", {})
    for name, case in CASES.items():
        if not options.only or any(word in name for word in options.only):
            with tempfile.TemporaryDirectory(prefix="tuna-sums-") as folder:
                _compare(name, case, options, Path(folder), outcome)
    return outcome.print()


def _compare(
    name: str, case: Case, options: argparse.Namespace, folder: Path, outcome: Outcome
) -> None:
    """Write a case's errors and times down."""
    model, library, right = folder / "model.onnx", folder / "model.so", case.right()
    _save(case, right.shape, model)
    tune = [sys.executable, "-m", "tuna", "tune", str(model), "--minutes", "0"]
    command = [*tune, "--cores", "1", "--no-rivals", "-o", str(library)]
    subprocess.run(
        command, check=True, stdout=sys.stderr, env=os.environ | {"TUNA_HOME": str(folder)}
    )
    with contextlib.ExitStack() as stack:
        started = [running(sys.executable, "tuna", library, 1)]
        started += [running(options.python, peer, model, 1) for peer in _PEERS]
        runners = [each for each in map(stack.enter_context, started) if isinstance(each, Runner)]
        for _ in range(options.turns):
            for runner in runners:
                runner.turn(options.seconds)
        errors = {}
        for runner in runners:
            (answer,) = runner.answers(folder / f"{runner.name}.npz")
            errors[runner.name] = float(np.abs(answer - right).max() / np.abs(right).max())
    times = {runner.name: runner.time_ms for runner in runners}
    own, own_ms = errors.pop("tuna"), times.pop("tuna")
    outcome.figures |= {f"{name}, error": own, f"{name}, ms": own_ms}
    for peer, error in errors.items():
        outcome.baseline |= {f"{name}, {peer} error": error, f"{name}, {peer} ms": times[peer]}
    ratio = f"{name}: of the better error"
    outcome.ratios |= {
        ratio: own / max(min(errors.values()), _LAST_DIGIT / _LIMIT),
        f"{name}: of the faster time": own_ms / min(times.values()),
    }
    outcome.limits[ratio] = _LIMIT


def _save(case: Case, extents: tuple[int, ...], path: Path) -> None:
    """Write the model of a case."""
    from onnx import TensorProto, helper, numpy_helper, save

    constants = {f"w{place}": values for place, values in enumerate(case.others())}
    node = helper.make_node(case.operator, ["x", *constants], ["y"], **case.attributes)
    graph = helper.make_graph(
        [node],
        "sums",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, case.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, extents)],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=_IR), str(path))


if __name__ == "__main__":
    raise SystemExit(main())
