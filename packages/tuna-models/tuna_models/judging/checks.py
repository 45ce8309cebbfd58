"""The check of a built model: contenders, inputs, and the verdict on its answers."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuna.common.files import open_plain
from tuna.configs.model import BF16_TOLERANCE
from tuna.errors import BadInput
from tuna_models.refusals import REPORT_HINT

#: Names of the right answers: by the reference, and by the runtime that is asked where there is no
#: reference, or it differs.
REFERENCE, RIVAL = "reference", "onnxruntime"
#: Packages of the runtimes that a built model is timed beside, and the reason why one that is not
#: here does not take part.
RUNTIMES: Mapping[str, str] = {"onnxruntime": "onnxruntime", "pytorch": "torch"}
ABSENT = "not installed"
#: How a file of numpy.savez begins: it is a zip archive.
_NPZ = b"PK\x03\x04"


@dataclass(frozen=True)
class Checks:
    """Contenders and inputs of the check and timing of a built model; raises BadInput for a file
    that has no recorded inputs."""

    #: True: onnxruntime and PyTorch take part if they are installed and the device is here.
    rivals: bool = True
    untuned: bool = False  #: True: TVM's untuned model takes part, which takes long
    recorded: Path | None = None  #: npz file of inputs by name; None: random inputs
    seed: int = 0  #: Seed of the random inputs
    compare: bool = True  #: Whether the fastest few kernels of each task are timed in the model
    #: Largest error of the answers of a model in bf16, relative to the largest value of each
    max_error: float = BF16_TOLERANCE

    def __post_init__(self) -> None:
        if self.recorded is not None:
            check_recorded(self.recorded)

    @property
    def inputs_key(self) -> list[Any]:
        """Return all of this that the right answers depend on."""
        recorded = (
            "" if self.recorded is None else hashlib.sha256(self.recorded.read_bytes()).hexdigest()
        )
        return [recorded, self.seed, self.max_error]

    @property
    def key(self) -> list[Any]:
        """Return all of this that a build depends on."""
        return [self.rivals, self.untuned, self.compare, *self.inputs_key]


def check_recorded(path: Path) -> Path:
    """The path of a file of recorded inputs; raises BadInput for one of another form."""
    with contextlib.suppress(OSError), open_plain(path) as stream:
        if stream.read(len(_NPZ)) == _NPZ:
            return path
    raise BadInput(f"{path} is not a file of NumPy arrays.", hint="write one with numpy.savez")


@dataclass(frozen=True)
class Checked:
    """Outcomes of the comparisons of a built model."""

    #: Faults found by the reference and by runtimes; empty if the answer is right.
    faults: Mapping[str, str]
    doubts: Mapping[str, float]  #: errors against the reference of the runtimes that differ
    unanswered: str = ""  #: reason why the reference has no answer; empty: it has
    #: Reason why onnxruntime, which is installed, has no answer; empty: it has, or is not installed
    rival_unanswered: str = ""
    recorded: bool = False  #: True for inputs of a file, False for random ones
    winograd: bool = False  #: True if it has Winograd's sums, which may be the reason
    bf16: bool = False  #: True if the model is computed in bf16, which may be the reason
    alone: str = ""  #: sentence on its operators alone


class Imprecise(BadInput):
    """A built model in bf16 whose error is beyond its bound."""

    #: Largest error against the reference; infinite: another rule is broken
    error: float = math.inf


def judge(opset: str, checked: Checked) -> str:
    """Return a remark on the check of a model, empty where its answer is the reference's;
    raises BadInput for a wrong one.

    Where the reference cannot compute the model, the others' answers count. Where all of them agree
    with the model and differ from the reference, it is that which is wrong. `opset` as in the
    manifest.
    """
    reference = "PyTorch's own answer" if " " in opset else "ONNX's reference evaluator"
    inputs = "on recorded inputs" if checked.recorded else "on random inputs"
    others = {name: fault for name, fault in checked.faults.items() if name != REFERENCE}
    names, verb = " and ".join(others), "agree" if len(others) > 1 else "agrees"
    agree = bool(others) and not any(others.values())
    hint = REPORT_HINT
    if checked.bf16:
        hint = "leave it in fp32, or allow the error: --max-error"
    elif checked.winograd:
        hint = f"build it without Winograd: --no-winograd; if that fails too, {hint}"
    if checked.unanswered:
        why = f"{reference} cannot compute the model ({checked.unanswered})"
        if agree:
            return f"{why}: it was compared with {names}, which {verb}"
        if others:
            faults = "; ".join(f"by {name} {fault}" for name, fault in others.items() if fault)
            raise BadInput(f"The built model is wrong, {inputs}: {faults}; {why}.", hint=hint)
        if checked.rival_unanswered:
            raise BadInput(
                f"{why}, nor can {RIVAL}, which is installed ({checked.rival_unanswered}): there is"
                " no right answer to compare with.",
                hint="correct that operator, or give inputs that it takes: --input FILE.npz",
            )
        raise BadInput(
            f"{why}, and no other runtime is here that can.",
            hint="with onnxruntime installed its answer is compared: pip install onnxruntime",
        )
    fault = checked.faults[REFERENCE]
    if not fault:
        return ""
    if agree and all(name in checked.doubts for name in others):
        return (
            f"{reference} is wrong here: by it {fault}, {inputs}; {names} {verb} with the model,"
            f" and not with {reference}"
        )
    text = f"The built model is wrong by {reference}, {inputs}: {fault}"
    for name, other in others.items():
        apart = checked.doubts.get(name)
        between = (
            "which agrees with it" if apart is None else f"which differs from it by {apart:.2g}"
        )
        text += f"; by {name}, {between}, {other or 'the model is right'}"
    raise BadInput(" ".join(filter(None, (f"{text}.", checked.alone))), hint=hint)


def disagreement(apart: Mapping[str, float], quantised: bool) -> str:
    """Say which runtimes differ from a model that agrees with the reference, and by how much."""
    names = " and ".join(f"from {name} by {error:.2g}" for name, error in apart.items())
    text = f"the built model, right by its reference, differs {names} of the largest value"
    return f"{text}, as quantised models do from one runtime to the next" if quantised else text
