"""Convolution layers: fields, checks, sizes, canonical text and key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import itemgetter
from reprlib import repr as shown
from typing import Any, ClassVar

from tuna.configs.config import Config
from tuna.configs.values import DIRECTIONS, MAX_COUNT, DataType, Direction, check_sizes, member
from tuna.errors import BadInput

#: Layouts that Tuna tunes, by number of spatial dimensions; the first is MIOpen's default
LAYOUTS: dict[int, tuple[str, ...]] = {2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}
MODES = ("conv", "trans")
#: Values that MIOpen's databases have in the depth fields of a two-dimensional convolution
DEPTH_OF_2D: dict[str, int] = {
    "in_d": 1,
    "fil_d": 1,
    "pad_d": 0,
    "conv_stride_d": 0,
    "dilation_d": 0,
    "trans_output_pad_d": 0,
}
COMMANDS: dict[DataType, str] = {
    DataType.FP32: "conv",
    DataType.FP16: "convfp16",
    DataType.BF16: "convbfp16",
    DataType.INT8: "convint8",
}
_DATA_TYPES: dict[str, DataType] = {data_type.value: data_type for data_type in COMMANDS}
FORW: dict[Direction, int] = {
    Direction.FORWARD: 1,
    Direction.BACKWARD_DATA: 2,
    Direction.BACKWARD_WEIGHTS: 4,
}

#: Names of all fields, in the order of `to_json` and of the canonical text
FIELDS = (
    "spatial_dim",
    *("batchsize", "in_channels", "in_d", "in_h", "in_w"),
    *("out_channels", "fil_d", "fil_h", "fil_w"),
    *("pad_d", "pad_h", "pad_w"),
    *("conv_stride_d", "conv_stride_h", "conv_stride_w"),
    *("dilation_d", "dilation_h", "dilation_w"),
    *("group_count", "mode", "pad_mode"),
    *("trans_output_pad_d", "trans_output_pad_h", "trans_output_pad_w"),
    *("direction", "in_layout", "fil_layout", "out_layout", "data_type"),
)
_POSITIVE = (
    *("batchsize", "in_channels", "in_d", "in_h", "in_w"),
    *("out_channels", "fil_d", "fil_h", "fil_w"),
    *("conv_stride_h", "conv_stride_w", "dilation_h", "dilation_w", "group_count"),
)
_NOT_NEGATIVE = (
    *("pad_d", "pad_h", "pad_w", "conv_stride_d", "dilation_d"),
    *("trans_output_pad_d", "trans_output_pad_h", "trans_output_pad_w"),
)
_positive = itemgetter(*_POSITIVE)
_not_negative = itemgetter(*_NOT_NEGATIVE)
_ALONG = ("in", "fil", "pad", "conv_stride", "dilation", "trans_output_pad")
_along = {axis: itemgetter(*(f"{name}_{axis}" for name in _ALONG)) for axis in "dhw"}
_DRIVER_ORDER = (
    *("batchsize", "spatial_dim", "pad_h", "pad_w"),
    *("pad_d", "conv_stride_h", "conv_stride_w", "conv_stride_d"),
    *("dilation_h", "dilation_w", "dilation_d", "group_count", "mode", "pad_mode"),
    *("trans_output_pad_h", "trans_output_pad_w", "trans_output_pad_d"),
    *("out_layout", "in_layout", "fil_layout"),
    *("in_d", "in_h", "in_w", "fil_d", "fil_h", "fil_w", "in_channels", "out_channels"),
)
_DRIVER_TEXT = " ".join(f"--{name} %({name})s" for name in _DRIVER_ORDER)
_CANONICAL_TEXT = "kind=convolution;" + ";".join(f"{name}=%({name})s" for name in FIELDS)
#: Cached properties that depend on the direction
_BY_DIRECTION = ("_canonical", "key")


@dataclass(frozen=True)
class ConvConfig(Config):
    """One convolution in one direction.

    The fields have MIOpen's names. Sizes of the input (`in_*`) and the output always are those of
    the *forward* layer, whatever the direction. Every config is in normal form, so that equal
    layers are equal objects: a two-dimensional one holds `DEPTH_OF_2D`, `pad_mode` is always
    `default` (`same` and `valid` are resolved to pads while reading), and only a transposed one has
    output padding.
    """

    kind: ClassVar[str] = "convolution"
    json_fields: ClassVar[tuple[str, ...]] = FIELDS

    batchsize: int
    in_channels: int
    in_h: int
    in_w: int
    out_channels: int
    fil_h: int
    fil_w: int
    pad_h: int = 0
    pad_w: int = 0
    conv_stride_h: int = 1
    conv_stride_w: int = 1
    dilation_h: int = 1
    dilation_w: int = 1
    group_count: int = 1
    direction: Direction = Direction.FORWARD
    data_type: DataType = DataType.FP32
    in_layout: str = "NCHW"
    fil_layout: str = "NCHW"
    out_layout: str = "NCHW"
    spatial_dim: int = 2
    in_d: int = 1
    fil_d: int = 1
    pad_d: int = 0
    conv_stride_d: int = 0
    dilation_d: int = 0
    mode: str = "conv"
    pad_mode: str = "default"
    trans_output_pad_h: int = 0
    trans_output_pad_w: int = 0
    trans_output_pad_d: int = 0

    def __post_init__(self) -> None:
        if type(self.direction) is not Direction:
            object.__setattr__(self, "direction", member(DIRECTIONS, "direction", self.direction))
        if type(self.data_type) is not DataType or self.data_type not in COMMANDS:
            object.__setattr__(self, "data_type", member(_DATA_TYPES, "data_type", self.data_type))
        self._check_words()
        self._check_numbers()
        self._check_shape()

    @classmethod
    def checked(cls, values: dict[str, Any]) -> ConvConfig:
        """The convolution with these values, brought into normal form; raises BadInput."""
        return cls(**normalise(values))

    def _check_words(self) -> None:
        check_layout(self.spatial_dim, self.in_layout)
        if not self.in_layout == self.fil_layout == self.out_layout:
            raise BadInput(
                "input, filter and output must have the same layout, got in_layout"
                f" {self.in_layout}, fil_layout {self.fil_layout}, out_layout {self.out_layout}"
            )
        if self.mode not in MODES:
            raise BadInput(f"mode must be conv or trans, got {shown(self.mode)}")
        if self.pad_mode != "default":
            raise BadInput(
                f"pad_mode {shown(self.pad_mode)} must be resolved to pads; a config holds only"
                " 'default'"
            )

    def _check_numbers(self) -> None:
        fields = vars(self)
        check_sizes(_POSITIVE, _positive(fields), 1)
        check_sizes(_NOT_NEGATIVE, _not_negative(fields), 0)
        if self.spatial_dim == 3:
            check_sizes(("conv_stride_d", "dilation_d"), (self.conv_stride_d, self.dilation_d), 1)
        elif (
            self.in_d != 1 or self.fil_d != 1 or self.pad_d or self.conv_stride_d or self.dilation_d
        ):
            normal = ", ".join(f"{name} {value}" for name, value in DEPTH_OF_2D.items())
            raise BadInput(f"a two-dimensional convolution has {normal}")
        groups = self.group_count
        if groups != 1 and (self.in_channels % groups or self.out_channels % groups):
            raise BadInput(
                f"group_count {groups} must divide in_channels {self.in_channels} and out_channels"
                f" {self.out_channels}"
            )

    def _check_shape(self) -> None:
        if self.trans_output_pad_d or self.trans_output_pad_h or self.trans_output_pad_w:
            self._check_output_padding()
        sizes = self.output_size
        if min(sizes) < 1:
            raise BadInput(self._why_empty(sizes))
        if (
            self.flops > MAX_COUNT
            or self.batchsize * self.in_channels * self.in_d * self.in_h * self.in_w > MAX_COUNT
        ):
            raise BadInput("the layer is too large: its elements or FLOPs do not fit in 63 bits")

    def _check_output_padding(self) -> None:
        if self.mode == "conv":
            raise BadInput("only a transposed convolution (mode trans) has trans_output_pad")
        for axis in "dhw":
            padding = getattr(self, f"trans_output_pad_{axis}")
            stride = getattr(self, f"conv_stride_{axis}")
            if padding and padding >= stride:
                raise BadInput(
                    f"trans_output_pad_{axis} {padding} must be less than the stride {stride}"
                )

    def _why_empty(self, sizes: tuple[int, ...]) -> str:
        axis, size = next(
            (a, n) for a, n in zip("dhw"[3 - self.spatial_dim :], sizes, strict=True) if n < 1
        )
        fil, dilation = getattr(self, f"fil_{axis}"), getattr(self, f"dilation_{axis}")
        pad, extent = getattr(self, f"pad_{axis}"), getattr(self, f"in_{axis}")
        if self.mode == "trans":
            return (
                f"the output has size {size} along {axis}: pad_{axis} {pad} is too large for the"
                " filter"
            )
        reach = dilation * (fil - 1) + 1
        return (
            f"the filter does not fit along {axis}: it reaches over {reach}, the padded input has"
            f" {extent + 2 * pad}"
        )

    def _output_along(self, axis: str) -> int:
        size, fil, pad, stride, dilation, output_pad = _along[axis](vars(self))
        reach = dilation * (fil - 1) + 1
        if self.mode == "conv":
            return int((size + 2 * pad - reach) // stride + 1)
        return int((size - 1) * stride + reach - 2 * pad + output_pad)

    @cached_property
    def output_size(self) -> tuple[int, ...]:
        """Spatial extents (D,) H, W of the forward layer's output, by MIOpen's formulas."""
        return tuple(map(self._output_along, "dhw"[3 - self.spatial_dim :]))

    @cached_property
    def flops(self) -> int:
        """Operations of the direct algorithm in any direction, two for each multiply-add."""
        if self.mode == "conv":
            positions = self.out_channels * prod(self.output_size)
            taps = self.in_channels // self.group_count
        else:
            positions = self.in_channels * self.in_d * self.in_h * self.in_w
            taps = self.out_channels // self.group_count
        return 2 * self.batchsize * positions * taps * self.fil_d * self.fil_h * self.fil_w

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Extents of x in the order of `in_layout`."""
        return self._ordered(
            self.in_layout, self.batchsize, self.in_channels, (self.in_d, self.in_h, self.in_w)
        )

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Extents of w in the order of `fil_layout`: K, C/groups, (Z,) Y, X.

        A transposed convolution has C, K/groups, (Z,) Y, X.
        """
        first, second = self.out_channels, self.in_channels
        if self.mode == "trans":
            first, second = second, first
        return self._ordered(
            self.fil_layout, first, second // self.group_count, (self.fil_d, self.fil_h, self.fil_w)
        )

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Extents of y in the order of `out_layout`."""
        return self._ordered(self.out_layout, self.batchsize, self.out_channels, self.output_size)

    def _ordered(
        self, layout: str, batch: int, channels: int, spatial: tuple[int, ...]
    ) -> tuple[int, ...]:
        spatial = spatial[-self.spatial_dim :]
        return (batch, *spatial, channels) if layout.endswith("C") else (batch, channels, *spatial)

    @cached_property
    def _canonical(self) -> str:
        return _CANONICAL_TEXT % vars(self)

    def driver(self) -> str:
        """The MIOpenDriver command of the layer: every flag in its long form, in MITuna's order."""
        return (
            f"./bin/MIOpenDriver {COMMANDS[self.data_type]} {_DRIVER_TEXT % vars(self)} --forw"
            f" {FORW[self.direction]}"
        )

    def facing(self, direction: Direction) -> ConvConfig:
        """The same layer in another direction."""
        kept = {name: value for name, value in vars(self).items() if name not in _BY_DIRECTION}
        return _unchecked({**kept, "direction": direction})

    @property
    def label(self) -> str:
        """A short text such as `conv 1x64x56x56 k64 3x3 s1 p1 NCHW fp32 F`."""
        first = 3 - self.spatial_dim
        extents = (self.batchsize, self.in_channels, *(self.in_d, self.in_h, self.in_w)[first:])
        words = ["conv" if self.mode == "conv" else "trans"]
        words.append("x".join(map(str, extents)))
        words.append(f"k{self.out_channels}")
        words.append("x".join(map(str, (self.fil_d, self.fil_h, self.fil_w)[first:])))
        words.append("s" + self._short("conv_stride"))
        words.append("p" + self._short("pad"))
        if self._short("dilation") != "1":
            words.append("d" + self._short("dilation"))
        if self.group_count != 1:
            words.append(f"g{self.group_count}")
        if self._short("trans_output_pad") != "0":
            words.append("op" + self._short("trans_output_pad"))
        return " ".join(
            [*words, self.in_layout, self.data_type.value.lower(), self.direction.value]
        )

    def _short(self, name: str) -> str:
        values = [getattr(self, f"{name}_{axis}") for axis in "dhw"[3 - self.spatial_dim :]]
        return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


def check_layout(spatial_dim: int, layout: str) -> None:
    """Raise BadInput unless a tensor of so many spatial dimensions can have this layout."""
    if type(spatial_dim) is not int or spatial_dim not in LAYOUTS:
        raise BadInput(f"spatial_dim must be 2 or 3, got {shown(spatial_dim)}")
    if layout not in LAYOUTS[spatial_dim]:
        raise BadInput(
            f"layout {shown(layout)} does not fit spatial_dim {spatial_dim}: use"
            f" {' or '.join(LAYOUTS[spatial_dim])}"
        )


def build(values: dict[str, Any]) -> ConvConfig:
    """`ConvConfig(**values)`, checked as well but made faster; `values` must hold every field."""
    config = _unchecked(values)
    config.__post_init__()
    return config


def _unchecked(values: dict[str, Any]) -> ConvConfig:
    config = object.__new__(ConvConfig)
    vars(config).update(values)
    return config


def normalise(values: dict[str, Any]) -> dict[str, Any]:
    """Bring fields that a person or another tool wrote into the normal form of `ConvConfig`.

    Two-dimensional: the depth fields become `DEPTH_OF_2D`. Not transposed: the output padding,
    which then has no meaning, becomes 0. `pad_mode` becomes pads by the rule of MIOpenDriver:
    `same` and `valid` count only for `mode` conv and only if every dilation is 1 or the filter is 1
    everywhere; elsewhere MIOpenDriver keeps the pads as given, and so do we.
    """
    if values.get("spatial_dim", 2) == 2:
        values.update(DEPTH_OF_2D)
    if values.get("mode", "conv") == "conv":
        values.update(trans_output_pad_d=0, trans_output_pad_h=0, trans_output_pad_w=0)
    pad_mode = values.get("pad_mode", "default")
    if pad_mode == "default":
        return values
    if pad_mode not in ("same", "valid"):
        raise BadInput(f"pad_mode must be default, same or valid, got {shown(pad_mode)}")
    values["pad_mode"] = "default"
    axes = "hw" if values.get("spatial_dim", 2) == 2 else "dhw"
    all_dense = all(values.get(f"dilation_{axis}", 1) == 1 for axis in axes)
    all_one = all(values.get(f"fil_{axis}") == 1 for axis in axes)
    if values.get("mode", "conv") != "conv" or not (all_dense or all_one):
        return values
    for axis in axes:
        values[f"pad_{axis}"] = 0 if pad_mode == "valid" else _same_pad(values, axis)
    return values


def _same_pad(values: dict[str, Any], axis: str) -> int:
    """Half of what `same` lacks along `axis`, rounded down, as MIOpenDriver computes it."""
    names = (f"in_{axis}", f"fil_{axis}", f"conv_stride_{axis}")
    size, fil, stride = sizes = tuple(values.get(name, 1) for name in names)
    check_sizes(names, sizes, 1)
    return int(max(fil - (size % stride or stride), 0)) // 2
