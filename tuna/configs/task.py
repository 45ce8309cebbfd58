"""Tasks, the fused functions of models: a core layer with an epilogue, or a function's text."""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, ClassVar

from tuna.configs.config import Config
from tuna.configs.conv import ConvConfig
from tuna.configs.gemm import GemmConfig
from tuna.configs.kind import ConfigKind, Similar, from_json, kind_of
from tuna.configs.values import DataType
from tuna.errors import BadInput

#: Layouts of the tensors of a task with a core: channels in blocks of the target's vector length,
#: or the core's own layout
LAYOUTS = ("native", "layer")
#: Steps of an epilogue: add a value for each channel (of a product: each column), add a tensor of
#: the answer's shape, apply a function to each value, write another type
BIAS, RESIDUAL = "bias", "residual"
RELU, RELU6, SIGMOID, TANH, SILU, GELU, GELU_TANH, HARD_SIGMOID, HARD_SWISH, PRELU = ACTIVATIONS = (
    *("relu", "relu6", "sigmoid", "tanh", "silu"),
    *("gelu", "gelu_tanh"),  #: GELU by erf, and by the approximation with tanh
    *("hard_sigmoid", "hard_swish"),  #: min(max(x + 3, 0), 6) / 6, and x times that
    "prelu",  #: negative values times a value for each channel
)
#: NumPy's name of the type that is written
CASTS = {"to_fp16": "float16", "to_bf16": "bfloat16", "to_fp32": "float32"}
#: Steps of an epilogue of sums of whole numbers: to real values, by a factor and an offset for each
#: channel; and to the nearest whole numbers, which are written as uint8 if this is the last step. A
#: residual between two of the latter is whole numbers too.
DEQUANTIZE, QUANTIZE = "dequantize", "quantize"


@dataclass(frozen=True)
class TaskConfig(Config):
    """A function that models call; models that call the same function share the config.

    A task with a `core` is that layer with `epilogue` applied before the answer is written; its
    tensors are in `layouts`, and weights are packed ahead of time. Any other task is the text of
    its function (TVM's JSON of it), the body, and has a `name`.
    """

    kind: ClassVar[str] = "task"
    body_field: ClassVar[str] = "body"

    core: ConvConfig | GemmConfig | None = None
    layouts: str = ""
    epilogue: tuple[str, ...] = ()
    name: str = ""  #: description of a task without a core, such as `add_relu`
    body: str = ""  #: SHA-256 of the task's text
    structure: str = ""  #: TVM's structural hash of the text, hex, which does not depend on names

    def __post_init__(self) -> None:
        if self.core is None:
            if not (self.name and self.body) or self.layouts or self.epilogue:
                raise BadInput(
                    "a task without a core has a name and a body, and neither layouts nor an"
                    " epilogue"
                )
            return
        if self.layouts not in LAYOUTS:
            raise BadInput(f"layouts must be {' or '.join(LAYOUTS)}, got {shown(self.layouts)}")
        if self.core.data_type is DataType.INT8:
            if self.epilogue and not _is_integer_epilogue(self.epilogue):
                raise BadInput(
                    f"an epilogue of INT8 is {DEQUANTIZE}, then {RESIDUAL} and one of"
                    f" {', '.join(ACTIVATIONS)} in either order, then {QUANTIZE}, then {RESIDUAL}"
                    f" and {QUANTIZE}, each but the first if it is there; got"
                    f" {shown(self.epilogue)}"
                )
        elif not _is_epilogue(self.epilogue):
            raise BadInput(
                f"an epilogue is {BIAS}, then {RESIDUAL} and one of {', '.join(ACTIVATIONS)} in"
                f" either order, then {' or '.join(CASTS)}, each if it is there; got"
                f" {shown(self.epilogue)}"
            )
        if self.name or self.body or self.structure:
            raise BadInput("a task with a core has no name, body or structure")

    def to_json(self) -> dict[str, Any]:
        """`kind` and the fields, the core as its own JSON."""
        return {
            **super().to_json(),
            "core": self.core and self.core.to_json(),
            "epilogue": list(self.epilogue),
        }

    @classmethod
    def checked(cls, values: dict[str, Any]) -> TaskConfig:
        """The task with these JSON values; raises BadInput."""
        core, epilogue = values.get("core"), values.get("epilogue", [])
        layer = None
        if core is not None:
            layer = from_json(core) if isinstance(core, dict) else None
            if not isinstance(layer, ConvConfig | GemmConfig):
                raise BadInput("the core of a task is a convolution or a gemm in JSON")
        if not isinstance(epilogue, list) or not all(isinstance(part, str) for part in epilogue):
            raise BadInput(f"epilogue must be a list of names, got {shown(epilogue)}")
        for name in ("layouts", "name", "body", "structure"):
            if not isinstance(values.get(name, ""), str):
                raise BadInput(f"{name} must be a text, got {shown(values[name])}")
        return cls(**{**values, "core": layer, "epilogue": tuple(epilogue)})

    @property
    def label(self) -> str:
        """A short text such as `conv ... +bias+relu native`."""
        if self.core is None:
            return f"task {self.name[:200]} {self.body[:8]}"
        epilogue = "".join(f"+{part}" for part in self.epilogue)
        return " ".join(filter(None, (self.core.label, epilogue, self.layouts)))

    @property
    def flops(self) -> int:
        """Operations of the core; 0 without a core, whose operations are not counted."""
        return self.core.flops if self.core is not None else 0


def _is_epilogue(parts: tuple[str, ...]) -> bool:
    left = list(parts)
    if left[:1] == [BIAS]:
        del left[0]
    if left and left[-1] in CASTS:
        del left[-1]
    functions = [part for part in left if part in ACTIVATIONS]
    return len(functions) <= 1 and left.count(RESIDUAL) == len(left) - len(functions) <= 1


def _is_integer_epilogue(parts: tuple[str, ...]) -> bool:
    if parts[0] != DEQUANTIZE:
        return False
    left = parts[1:]
    if QUANTIZE not in left:
        return _is_epilogue((BIAS, *left)) and not set(left) & set(CASTS)
    place = left.index(QUANTIZE)
    real, whole = left[:place], left[place + 1 :]
    return _is_integer_epilogue((DEQUANTIZE, *real)) and whole in ((), (RESIDUAL, QUANTIZE))


def _similar(config: TaskConfig) -> Similar | None:
    """Return the likeness to tasks with similar cores, the same layouts and epilogue."""
    core = config.core
    similar = None if core is None else kind_of(core).similar(core)
    if core is None or similar is None:
        return None
    family = (config.layouts, config.epilogue, core.kind, *similar.family)
    return Similar(family, similar.sizes, similar.batch_first)


KIND = ConfigKind(TaskConfig, reference="tuna.libraries.task_reference:task", similar=_similar)
