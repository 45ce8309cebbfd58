"""Batch normalisations in one direction: fields, checks, texts, driver commands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from reprlib import repr as shown
from typing import Any, ClassVar

from tuna.configs.config import Config
from tuna.configs.conv import FORW, LAYOUTS, check_layout
from tuna.configs.flags import Flags
from tuna.configs.kind import ConfigKind
from tuna.configs.values import (
    DATA_TYPES,
    DIRECTIONS,
    MAX_COUNT,
    DataType,
    Direction,
    check_sizes,
    member,
)
from tuna.errors import BadInput

COMMANDS: dict[DataType, str] = {
    DataType.FP32: "bnorm",
    DataType.FP16: "bnormfp16",
    DataType.BF16: "bnormbfp16",
}
#: Names of all fields, in the order of `to_json` and of the canonical text
FIELDS = (
    *("spatial_dim", "batchsize", "in_channels", "in_d", "in_h", "in_w"),
    *("mode", "run", "save", "alpha", "beta", "direction", "layout", "data_type"),
)
_SIZES = ("batchsize", "in_channels", "in_d", "in_h", "in_w")
_SWITCHES = ("mode", "run", "save")
_FACTORS = ("alpha", "beta")
_OF_COMMAND = {command: data_type for data_type, command in COMMANDS.items()}
_DIRECTIONS = {bits: direction for direction, bits in FORW.items()}
#: MIOpenDriver's flags and defaults, as in bn_driver.hpp; `-!` is MITuna's
_FLAGS = Flags(
    numbers={
        **{"F": "forw", "b": "back", "n": "batchsize", "c": "in_channels"},
        **{"D": "in_d", "!": "in_d", "H": "in_h", "W": "in_w"},
        **{"m": "mode", "r": "run", "s": "save"},
    },
    decimals={"A": "alpha", "B": "beta"},
    words={"L": "layout"},
    ignored={
        # flags of the run itself
        **{"i": "iter", "V": "verify", "t": "time", "w": "wall", "P": "printconv"},
        **{"S": "solution", "~": "gpubuffer_check", "&": "tuning_policy", "J": "use_hip_graph"},
        **{"x": "activ_alpha", "y": "activ_beta"},  # of the activation, which is off
    },
    fixed={
        **{"f": ("activ_mode", "0"), "I": ("inverse_variance", "0")},
        "Q": ("ping_pong_buffers", "0"),
    },
)
_DEFAULTS = {
    **{"forw": 0, "back": 0},
    **{"batchsize": 32, "in_channels": 3, "in_d": 0, "in_h": 32, "in_w": 32},
}
_CANONICAL_TEXT = "kind=batch_norm;" + ";".join(f"{name}=%({name})s" for name in FIELDS)


@dataclass(frozen=True)
class BatchNormConfig(Config):
    """One batch normalisation in one direction, with MIOpen's names.

    The direction is a term of Tuna and of fin, not of MIOpen: FORWARD is forward training (`--forw
    1`), BACKWARD_DATA is forward *inference* (`--forw 2`), BACKWARD_WEIGHTS is the whole backward
    pass (`--back 1`). A two-dimensional one has in_d 1; a three-dimensional one may have it too and
    then differs by its layout.
    """

    kind: ClassVar[str] = "batch_norm"
    json_fields: ClassVar[tuple[str, ...]] = FIELDS

    batchsize: int
    in_channels: int
    in_h: int
    in_w: int
    in_d: int = 1
    spatial_dim: int = 2
    #: scope of the statistics: 0 per activation (over the batch only), 1 spatial (one mean for a
    #: channel)
    mode: int = 0
    #: running mean and variance: 1 if training keeps them and inference uses them, else 0
    run: int = 0
    #: mean and inverse variance: 1 if training saves them and backward uses them, else 0
    save: int = 0
    alpha: float = 1.0
    beta: float = 0.0
    direction: Direction = Direction.FORWARD
    layout: str = "NCHW"
    data_type: DataType = DataType.FP32

    def __post_init__(self) -> None:
        if type(self.direction) is not Direction:
            object.__setattr__(self, "direction", member(DIRECTIONS, "direction", self.direction))
        if type(self.data_type) is not DataType:
            object.__setattr__(self, "data_type", member(DATA_TYPES, "data_type", self.data_type))
        if self.data_type not in COMMANDS:
            raise BadInput(
                f"batch normalisation has no data_type {self.data_type}: use {', '.join(COMMANDS)}"
            )
        for name in _FACTORS:
            object.__setattr__(self, name, _finite(name, getattr(self, name)))
        self._check_shape()
        for name in _SWITCHES:
            value = getattr(self, name)
            if type(value) is not int or value not in (0, 1):
                raise BadInput(f"{name} must be 0 or 1, got {shown(value)}")

    @classmethod
    def checked(cls, values: dict[str, Any]) -> BatchNormConfig:
        """The batch normalisation with these values and what follows from them; raises BadInput."""
        return cls(**_normalise(values))

    def _check_shape(self) -> None:
        check_sizes(_SIZES, (self.batchsize, self.in_channels, self.in_d, self.in_h, self.in_w), 1)
        check_layout(self.spatial_dim, self.layout)
        if self.spatial_dim == 2 and self.in_d != 1:
            raise BadInput(f"a two-dimensional batch normalisation has in_d 1, got {self.in_d}")
        if self.flops > MAX_COUNT:
            raise BadInput("the layer is too large: its elements or FLOPs do not fit in 63 bits")

    @property
    def flops(self) -> int:
        """Floating-point operations on elements of x; work per channel or activation is left out.

        For each element 4 to normalise, scale and shift (backward: 10 for dscale, dbias and dx),
        and 4 more for mean and variance where they are computed: in training, in inference without
        `run`, and backward without `save`.
        """
        known = {
            Direction.FORWARD: 0,
            Direction.BACKWARD_DATA: self.run,
            Direction.BACKWARD_WEIGHTS: self.save,
        }
        each = 10 if self.direction is Direction.BACKWARD_WEIGHTS else 4
        if not known[self.direction]:
            each += 4
        return each * self.batchsize * self.in_channels * self.in_d * self.in_h * self.in_w

    @cached_property
    def _canonical(self) -> str:
        return _CANONICAL_TEXT % vars(self)

    def driver(self) -> str:
        """The MIOpenDriver command of the layer: every flag in its long form, in MITuna's order.

        In two dimensions in_d is written as 0: MIOpenDriver takes any other depth for a third
        dimension.
        """
        bits = FORW[self.direction]
        in_d = self.in_d if self.spatial_dim == 3 else 0
        return (
            f"./bin/MIOpenDriver {COMMANDS[self.data_type]} --batchsize {self.batchsize}"
            f" --alpha {self.alpha} --beta {self.beta} --forw {bits & 3} --back {bits >> 2}"
            f" --mode {self.mode} --run {self.run} --in_d {in_d} --in_h {self.in_h}"
            f" --in_w {self.in_w} --in_channels {self.in_channels} --save {self.save}"
            f" --layout {self.layout}"
        )

    @property
    def label(self) -> str:
        """A short text such as `bnorm 32x64x56x56 spatial save run NCHW fp32 F`."""
        depth = (self.in_d,) if self.spatial_dim == 3 else ()
        sizes = (self.batchsize, self.in_channels, *depth, self.in_h, self.in_w)
        words = ["bnorm", "x".join(map(str, sizes)), "spatial" if self.mode else "activation"]
        words += [name for name in ("save", "run") if getattr(self, name)]
        if self.alpha != 1:
            words.append(f"a{self.alpha:g}")
        if self.beta:
            words.append(f"b{self.beta:g}")
        return " ".join([*words, self.layout, self.data_type.value.lower(), self.direction.value])


def _finite(name: str, value: object) -> float:
    """`value` as a float that has one text only (no negative zero)."""
    if type(value) not in (int, float):
        raise BadInput(f"{name} must be a number, got {shown(value)}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise BadInput(f"{name} must be finite, got {shown(value)}")
    return number + 0.0


def _normalise(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in the dimensions from depth and layout, and the layout from the dimensions.

    An in_d of 0 means no depth, as it does for MIOpenDriver.
    """
    depth = values.get("in_d", 0)
    if type(depth) is int and depth == 0:
        depth = values["in_d"] = 1
    deep = (type(depth) is int and depth > 1) or values.get("layout") in LAYOUTS[3]
    dims = values.setdefault("spatial_dim", 3 if deep else 2)
    if type(dims) is int and dims in LAYOUTS:
        values.setdefault("layout", LAYOUTS[dims][0])
    return values


def _read(words: list[str]) -> list[BatchNormConfig]:
    """The layer that a bnorm command names; raises BadInput.

    It is three-dimensional if its depth is more than 1 or its layout has a depth.
    """
    values = _FLAGS.read(words, _DEFAULTS)
    forw, back = values.pop("forw"), values.pop("back")
    if forw not in (0, 1, 2):
        raise BadInput(f"--forw must be 0 (off), 1 (training) or 2 (inference), got {forw}")
    if back not in (0, 1):
        raise BadInput(f"--back must be 0 or 1, got {back}")
    direction = _DIRECTIONS.get(forw + 4 * back)
    if direction is None:
        raise BadInput(
            f"one and only one of forw or back must be set, got --forw {forw} --back {back}"
        )
    values |= {"direction": direction, "data_type": _OF_COMMAND[words[0]]}
    return [BatchNormConfig.checked(values)]


KIND = ConfigKind(BatchNormConfig, commands=dict.fromkeys(_OF_COMMAND, _read))
