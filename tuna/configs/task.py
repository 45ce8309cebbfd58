"""Tasks, the fused functions of models: a core layer with an epilogue, or a function's text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, ClassVar

from tuna.configs.attention import AttentionConfig
from tuna.configs.config import Config
from tuna.configs.conv import ConvConfig
from tuna.configs.gemm import GemmConfig
from tuna.configs.kind import ConfigKind, Similar, from_json, kind_of
from tuna.configs.values import DataType
from tuna.errors import BadInput

#: Layers that are cores of tasks
Core = ConvConfig | GemmConfig | AttentionConfig
#: Layouts of the tensors of a task with a core: channels in blocks of the target's vector length,
#: or the core's own layout
LAYOUTS = ("native", "layer")
#: Names of steps of an epilogue, each a row of `STEPS`
BIAS, RESIDUAL, PRELU, AFFINE = "bias", "residual", "prelu", "affine"
RELU, RELU6, SIGMOID, TANH, SILU = "relu", "relu6", "sigmoid", "tanh", "silu"
GELU, GELU_TANH = "gelu", "gelu_tanh"
HARD_SIGMOID, HARD_SWISH = "hard_sigmoid", "hard_swish"
DEQUANTIZE, QUANTIZE, COMPENSATION = "dequantize", "quantize", "compensation"
WEIGHT_ZERO, WINDOW_SUMS = "weight_zero", "window_sums"
#: Rows and columns of a pixel that steps write as channels of their own
DEPTH_TO_SPACE = {
    f"depth_to_space_{high}x{wide}": (high, wide)
    for high, wide in itertools.product(range(1, 5), repeat=2)
    if high * wide > 1
}
#: NumPy's name of the type that a step writes
CASTS = {"to_fp16": "float16", "to_bf16": "bfloat16", "to_fp32": "float32"}
#: Forms of a step's arguments: a value for each channel (of a product: each column); one for each
#: that is computed, with those that fill up a vector; one for each pixel (of a product: each row);
#: sums of weights; a tensor of the answer's shape
CHANNELS, LANES, PIXELS = "channels", "lanes", "pixels"
WEIGHT_SUMS, ANSWER = "weight sums", "answer"
#: Kinds of values that an epilogue begins with, and kinds of steps beside their names: the sum of
#: two tensors of bytes is rounded in any case
SUM, WHOLE_SUM = "sum", "integer sum"
_ACTIVATION, _CAST, ADDITION, _ROUNDED_SUM = "activation", "cast", "addition", "rounded addition"


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel."""

    role: str
    letter: str  #: name in the text of the kernel
    form: str = CHANNELS
    #: type by NumPy's name, or by the name of a field of `kernels.types.Types`
    type: str = "float32"
    steps: Any = None  #: steps that pack it (`kernels.packing`); None: it stays as it is


#: Argument that sums of whole numbers start with: the zero point's part and a bias of whole
#: numbers, whose total is exact, also where both are large and nearly cancel
START = Argument("start", "Z", LANES, "sums")


@dataclass(frozen=True)
class EpilogueStep:
    """A row of the grammar of epilogues."""

    name: str
    after: tuple[str, ...]  #: kinds of the values and steps that may come before it
    #: expression of its values, by functions that are called as NumPy's, the values before it, its
    #: arguments and numbers
    definition: Callable[..., Any] = lambda np, x: x
    arguments: tuple[Argument, ...] = ()
    kind: str = ""  #: kind of the step, of which an epilogue has one; by default its name
    numbers: tuple[str, ...] = ()  #: numbers that it reads in the argument SCALARS
    writes: str = ""  #: NumPy's name of the type of the answer; empty: as it would be without it
    renews: bool = False  #: whether what comes before it does not matter for what comes after it


def _activation(name: str, definition: Callable[..., Any], *arguments: Argument) -> EpilogueStep:
    after = (SUM, BIAS, RESIDUAL, AFFINE, DEQUANTIZE)
    return EpilogueStep(name, after, definition, arguments, _ACTIVATION)


def _quantize(after: tuple[str, ...], kind: str) -> EpilogueStep:
    """To the nearest whole numbers. Their limits are without the zero point, which is added to what
    is written."""
    numbers = ("low", "high", "zero")
    return EpilogueStep(QUANTIZE, after, _rounded, (), kind, numbers, "uint8", renews=True)


def _rounded(np: Any, x: Any, low: Any, high: Any, zero: Any) -> Any:
    return np.clip(np.rint(x), low, high)


def _sigmoid(np: Any, x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _hard_sigmoid(np: Any, x: Any) -> Any:
    return np.clip(x + 3.0, 0.0, 6.0) / 6.0


def _gelu_tanh(np: Any, x: Any) -> Any:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _depth_to_space(name: str, high: int, wide: int) -> EpilogueStep:
    """Channels of one pixel to high x wide pixels, in the order (row, column, channel)."""

    def definition(np: Any, x: Any) -> Any:
        batch, channels, rows, columns = x.shape
        parts = x.reshape(batch, high, wide, channels // high // wide, rows, columns)
        return parts.transpose(0, 3, 4, 1, 5, 2).reshape(batch, -1, rows * high, columns * wide)

    after = (SUM, BIAS, _ACTIVATION, AFFINE, _CAST, DEQUANTIZE, QUANTIZE)
    return EpilogueStep(name, after, definition)


STEPS = (
    EpilogueStep(BIAS, (SUM,), lambda np, x, bias: x + bias, (Argument(BIAS, "B"),)),
    EpilogueStep(
        RESIDUAL,
        (SUM, BIAS, _ACTIVATION, AFFINE, DEQUANTIZE),
        lambda np, x, residual: x + residual,
        (Argument(RESIDUAL, "R", ANSWER, "real"),),
    ),
    _activation(RELU, lambda np, x: np.maximum(x, 0.0)),
    _activation(RELU6, lambda np, x: np.clip(x, 0.0, 6.0)),
    _activation(SIGMOID, _sigmoid),
    _activation(TANH, lambda np, x: np.tanh(x)),
    _activation(SILU, lambda np, x: x * _sigmoid(np, x)),
    _activation(GELU, lambda np, x: 0.5 * x * (1.0 + np.erf(x * math.sqrt(0.5)))),
    _activation(GELU_TANH, _gelu_tanh),
    _activation(HARD_SIGMOID, _hard_sigmoid),
    _activation(HARD_SWISH, lambda np, x: x * _hard_sigmoid(np, x)),
    _activation(PRELU, lambda np, x, slope: np.where(x > 0.0, x, x * slope), Argument(PRELU, "S")),
    EpilogueStep(
        AFFINE,
        (SUM, BIAS, RESIDUAL, _ACTIVATION),
        lambda np, x, scale, shift: x * scale + shift,
        (Argument("scale", "F"), Argument("shift", "O")),
    ),
    *(
        EpilogueStep(name, (SUM, BIAS, RESIDUAL, _ACTIVATION, AFFINE), kind=_CAST, writes=kind)
        for name, kind in CASTS.items()
    ),
    # The part of a number that is taken off all weights of a channel, which eight bits do not hold
    # together, of the sum of what a pixel reads less the input's zero point
    EpilogueStep(
        WEIGHT_ZERO,
        (WHOLE_SUM,),
        lambda np, x, window_sums, weight_zero: x - window_sums * weight_zero,
        (
            Argument(WINDOW_SUMS, "O", PIXELS, "sums"),
            Argument(WEIGHT_ZERO, "V", CHANNELS, "sums"),
        ),
    ),
    # From sums of whole numbers to real values
    EpilogueStep(
        DEQUANTIZE,
        (WHOLE_SUM, WEIGHT_ZERO),
        lambda np, x, start, factor, offset: (x + start) * factor + offset,
        (START, Argument("factor", "M"), Argument("offset", "B")),
        writes="float32",
        renews=True,
    ),
    _quantize((DEQUANTIZE, RESIDUAL, _ACTIVATION), QUANTIZE),
    # The sum with a tensor of bytes: x is without its zero point, the other one is not
    EpilogueStep(
        RESIDUAL,
        (QUANTIZE,),
        lambda np, x, r, factor, residual_factor, offset: x * factor + r * residual_factor + offset,
        (Argument(RESIDUAL, "R", ANSWER, "input"),),
        ADDITION,
        ("factor", "residual_factor", "offset"),
        renews=True,
    ),
    _quantize((ADDITION,), _ROUNDED_SUM),
    *(_depth_to_space(name, *sizes) for name, sizes in DEPTH_TO_SPACE.items()),
    # The only step of a layer of signed bytes that is not a task
    EpilogueStep(
        COMPENSATION,
        (),
        lambda np, x, compensation: x + compensation,
        (Argument(COMPENSATION, "Z", WEIGHT_SUMS, "sums"),),
    ),
)
#: Names of the steps that apply a function to each value
ACTIVATIONS = tuple(step.name for step in STEPS if step.kind == _ACTIVATION)
#: Definitions of those without arguments
DEFINITIONS = {
    step.name: step.definition for step in STEPS if step.kind == _ACTIVATION and not step.arguments
}
#: Argument that holds the numbers of all steps, behind the value of the padding
SCALARS = Argument("scalars", "P", "scalars")


def steps_of(epilogue: Sequence[str], first: str = "") -> list[EpilogueStep]:
    """Return the rows of an epilogue's steps, where each may follow those before it; raises
    BadInput. `first` is the kind of the values that it begins with, empty for any."""
    rows, before = list[EpilogueStep](), {first} - {""}
    for name in epilogue:
        known = [step for step in STEPS if step.name == name]
        row = next((step for step in known if before <= {*step.after}), None)
        if row is None:
            allowed = ", ".join(dict.fromkeys(kind for step in known for kind in step.after))
            raise BadInput(
                f"{shown(name)} in an epilogue cannot follow {' and '.join(sorted(before))}: it"
                f" follows {allowed or 'nothing, as it is unknown'}"
            )
        rows.append(row)
        before = {row.kind or name} if row.renews else {*before, row.kind or name}
    if ADDITION in before:
        raise BadInput(f"an epilogue cannot end with {'+'.join(epilogue)}: {QUANTIZE} follows it")
    return rows


def arguments_of(epilogue: Sequence[str], *, padded: bool) -> list[Argument]:
    """Return the arguments of a kernel between the weights and the answer, in order. `padded`: the
    input is padded.

    The scalars follow those of DEQUANTIZE: the value of the padding, then the numbers of the steps.
    """
    steps = steps_of(epilogue)
    added = [[*step.arguments] for step in steps]
    if DEQUANTIZE in epilogue and (padded or QUANTIZE in epilogue):
        added[list(epilogue).index(DEQUANTIZE)].append(SCALARS)
    return [argument for arguments in added for argument in arguments]


def interleaving(epilogue: Sequence[str]) -> tuple[int, int]:
    """Return the rows and columns that the channels of a pixel become."""
    return DEPTH_TO_SPACE.get(epilogue[-1], (1, 1)) if epilogue else (1, 1)


def pads(core: Config) -> bool:
    """Whether the input of a layer is padded."""
    return isinstance(core, ConvConfig) and (core.pad_h > 0 or core.pad_w > 0)


def scalar_count(epilogue: Sequence[str]) -> int:
    """Return the number of values of SCALARS."""
    return 1 + sum(len(step.numbers) for step in steps_of(epilogue))


def scalar_values(
    epilogue: Sequence[str], padding: float, *numbers: Mapping[str, float]
) -> list[float]:
    """Return the values of SCALARS, with the numbers of each step that has any."""
    wanted = [step.numbers for step in steps_of(epilogue) if step.numbers]
    values = zip(wanted, numbers, strict=True)
    return [padding, *(given[name] for names, given in values for name in names)]


@dataclass(frozen=True)
class TaskConfig(Config):
    """A function that models call; models that call the same function share the config.

    A task with a `core` is that layer with `epilogue` applied before the answer is written; its
    tensors are in `layouts`, and weights are packed ahead of time. Any other task is the text of
    its function (TVM's JSON of it), the body, and has a `name`.
    """

    kind: ClassVar[str] = "task"
    body_field: ClassVar[str] = "body"

    core: Core | None = None
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
        steps_of(self.epilogue, WHOLE_SUM if self.core.data_type is DataType.INT8 else SUM)
        if isinstance(self.core, AttentionConfig) and not CASTS.keys() >= {*self.epilogue}:
            raise BadInput("the epilogue of an attention is a cast, or nothing")
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
            if not isinstance(layer, Core):
                raise BadInput(
                    "the core of a task is a convolution, a gemm or an attention in JSON"
                )
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


def _similar(config: TaskConfig) -> Similar | None:
    """Return the likeness to tasks with similar cores, the same layouts and epilogue."""
    core = config.core
    similar = None if core is None else kind_of(core).similar(core)
    if core is None or similar is None:
        return None
    family = (config.layouts, config.epilogue, core.kind, *similar.family)
    return Similar(family, similar.sizes, similar.batch_first)


KIND = ConfigKind(TaskConfig, reference="tuna.libraries.task_reference:task", similar=_similar)
