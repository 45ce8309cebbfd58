"""The models of `benchmarks/planted.py`: what is checked, and right models from three sources."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.planting import Fault
from tuna_models.manifest import Precision

#: Seconds of a script that writes models.
_SCRIPT_S = 60.0


@dataclass(frozen=True)
class Subject:
    """A model that is built and checked."""

    name: str
    model: Callable[[], Any]  #: makes the ONNX model
    fault: Fault | None = None
    precision: Precision = Precision.FP32
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, fault: Fault) -> Subject:
        """A model with a fault."""
        return cls(fault.name, fault.model, fault, fault.precision)


@dataclass(frozen=True)
class Verdict:
    """What the check says of a model."""

    #: right, wrong (on other inputs than random ones), differs (on random ones), skipped (refused
    #: at the import, or without a reference), or raw
    word: str
    text: str = ""  #: what is wrong, or the reason
    rule: str = ""  #: the check's line about its rules and inputs
    seconds: float = 0.0


def right_models(scripts: Path, folder: Path) -> list[Subject]:
    """Models that Tuna builds right: those of the tests in fp32 and, where the CPU has it, in bf16,
    those that scripts write into `folder`, and ONNX's node tests in an order by their names."""
    return [*_of_tests(), *_of_scripts(scripts, folder), *_of_nodes()]


def _of_tests() -> list[Subject]:
    from tuna.common.cpu import cpu_model

    nets, quantised_nets = map(importlib.import_module, ("nets", "quantised_nets"))
    quantised = {
        name: getattr(quantised_nets, name)
        for name in ("residual", "dynamic", "operators", "bytes_alone", "stem")
    }
    # its answer is fp16, and its file says fp32
    made = {name: make for name, make in nets.NETS.items() if name != "activated"}
    subjects = [Subject(f"net {name}", make) for name, make in made.items()]
    subjects += [Subject(f"quantised {name}", make) for name, make in quantised.items()]
    subjects += [
        Subject("quantised dynamic gelu", partial(quantised_nets.dynamic, gelu=True)),
        Subject("quantised real weights", partial(quantised_nets.residual, whole=False)),
        Subject("quantised signed stem", partial(quantised_nets.stem, np.int8)),
    ]
    if "avx512_bf16" in cpu_model().flags.split():
        subjects += [
            Subject(f"bf16 {name}", make, precision=Precision.BF16) for name, make in made.items()
        ]
    return subjects


def _of_scripts(scripts: Path, folder: Path) -> list[Subject]:
    """The models that scripts write; those that need more than onnx and NumPy are left out."""
    for script in sorted([*scripts.glob("models/*.py"), *scripts.glob("zoo/*.py")]):
        if script.stem != "common":
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run(
                    [sys.executable, str(script)],
                    env={**os.environ, "OUT": str(folder)},
                    cwd=folder,
                    capture_output=True,
                    timeout=_SCRIPT_S,
                    check=False,
                )
    paths = sorted(folder.rglob("*.onnx"))
    return [
        Subject(f"script {path.relative_to(folder)}", partial(onnx.load, path)) for path in paths
    ]


def _of_nodes() -> list[Subject]:
    from benchmarks import conformance

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = sorted(conformance.current_cases(), key=lambda case: case.name)
    found = []
    # every seventh, then those behind them: all operators come early
    for case in (case for start in range(7) for case in cases[start::7]):
        arrays = {name: each for name, each in case.inputs.items() if isinstance(each, np.ndarray)}
        if len(arrays) == len(case.inputs):
            shapes = {name: list(each.shape) for name, each in arrays.items()}
            found.append(Subject(f"node {case.name}", partial(_same, case.model), shapes=shapes))
    return found


def _same(model: Any) -> Any:
    return model
