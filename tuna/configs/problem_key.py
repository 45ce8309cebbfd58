"""MIOpen's names of a convolution, from a config and back: the key of a find-db line, and the 24
fields of a perf-db row.

Source: `ProblemDescription::Serialize` of MIOpen 2d1fd997, checked against the files it ships. "In"
and "out" are those of MIOpen's *problem*: for B (backward data) and W (backward weights) "in" is
the forward layer's output side.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from tuna.configs.conv import LAYOUTS, ConvConfig
from tuna.configs.lines import LineForm, UnsupportedLine
from tuna.configs.values import DataType, Direction, check_sizes
from tuna.errors import BadInput

#: Layouts that all three tensors may share with only one word in the key
_DEFAULT_LAYOUTS = {2: "NCHW", 3: "NCDHW"}
_DIRECTIONS = ("F", "B", "W")
_LENGTHS = ("in", "fil", "pad", "conv_stride", "dilation")
#: Data types of a key that a layer can have: that of all three tensors, by fin for `convint8` too
_DATA_TYPES = {
    name.value: name for name in (DataType.FP32, DataType.FP16, DataType.BF16, DataType.INT8)
}
#: Beginning of a key: channels and sizes
_KEY_START = re.compile(r"\d+-\d+-\d+-")
#: Separator of the fields of a key; MIOpen ships a few with negative sizes
_HYPHEN = re.compile(r"(?<!-)-")


class NoKey(UnsupportedLine):
    """MIOpen has no key for this layer, or Tuna has no layer for this key."""


@dataclass(frozen=True)
class PerfKey:
    """The columns of the perf db's `config` table, in their order there."""

    layout: str  #: layout of the problem's "in"
    data_type: str
    direction: str
    spatial_dim: int
    in_channels: int
    in_h: int
    in_w: int
    in_d: int
    fil_h: int
    fil_w: int
    fil_d: int
    out_channels: int
    batchsize: int
    pad_h: int
    pad_w: int
    pad_d: int
    conv_stride_h: int
    conv_stride_w: int
    conv_stride_d: int
    dilation_h: int
    dilation_w: int
    dilation_d: int
    bias: int
    group_count: int

    def text(self) -> str:
        """The key as a perf db in text form has it: the numbers, then layout, data type and
        direction, joined by x."""
        return "x".join(str(getattr(self, name)) for name in _PERF_TEXT)

    @classmethod
    def parse(cls, text: str) -> PerfKey:
        """The inverse of `text`; raises BadInput."""
        words = text.split("x")
        if len(words) != len(_PERF_TEXT):
            raise BadInput(
                f"{text!r} is not a perf-db key: {len(words)} fields, not {len(_PERF_TEXT)}"
            )
        try:
            numbers = [_number(word) for word in words[: len(_PERF_NUMBERS)]]
        except ValueError as error:
            raise BadInput(f"{text!r} is not a perf-db key: {error}") from None
        layout, data_type, direction = words[len(_PERF_NUMBERS) :]
        return cls(layout, data_type, direction, *numbers)


PERF_FIELDS = tuple(field.name for field in fields(PerfKey))
_PERF_NUMBERS = PERF_FIELDS[3:]
#: Order of the fields in a perf db in text form
_PERF_TEXT = (*_PERF_NUMBERS, "layout", "data_type", "direction")


@dataclass(frozen=True)
class ProblemKey:
    """A convolution problem; sizes, pads, strides and dilations are (D,) H, W."""

    in_channels: int
    in_size: tuple[int, ...]
    fil_size: tuple[int, ...]
    out_channels: int
    out_size: tuple[int, ...]
    batchsize: int
    pads: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    layouts: tuple[str, str, str]  #: layouts of in, weights and out
    #: data type of all tensors, or those of in, weights and out joined where they differ
    data_type: str
    direction: str  #: direction: F, B or W
    group_count: int = 1
    bias: int = 0
    casts: str = ""  #: tensor casts as they stand in the key, such as `_ciFP8_coFP8`

    @property
    def spatial_dim(self) -> int:
        """Number of spatial dimensions, 2 or 3."""
        return len(self.in_size)

    def text(self) -> str:
        """The key as a find db has it."""
        default = _DEFAULT_LAYOUTS[self.spatial_dim]
        return self._text(default if self.layouts == (default,) * 3 else "-".join(self.layouts))

    def short_text(self) -> str:
        """The key with one word for equal layouts, whichever they are."""
        return self._text(
            "-".join(self.layouts if len(set(self.layouts)) > 1 else self.layouts[:1])
        )

    def _text(self, layouts: str) -> str:
        groups = "" if self.group_count == 1 else f"_g{self.group_count}"
        words = (
            *(self.in_channels, *self.in_size, _by(self.fil_size)),
            *(self.out_channels, *self.out_size, self.batchsize),
            *(_by(self.pads), _by(self.strides), _by(self.dilations), self.bias),
            *(layouts, self.data_type, f"{self.direction}{groups}{self.casts}"),
        )
        return "-".join(map(str, words))

    def perf(self) -> PerfKey:
        """The perf-db fields; a two-dimensional problem has depth 1, 0 as the depth of pad, stride
        and dilation."""
        three = self.spatial_dim == 3
        in_d, fil_d = (self.in_size[0], self.fil_size[0]) if three else (1, 1)
        pad_d, stride_d, dilation_d = (
            (self.pads[0], self.strides[0], self.dilations[0]) if three else (0, 0, 0)
        )
        # fmt: off
        return PerfKey(
            self.layouts[0], self.data_type, self.direction, self.spatial_dim,
            self.in_channels, self.in_size[-2], self.in_size[-1], in_d,
            self.fil_size[-2], self.fil_size[-1], fil_d, self.out_channels, self.batchsize,
            self.pads[-2], self.pads[-1], pad_d, self.strides[-2], self.strides[-1], stride_d,
            self.dilations[-2], self.dilations[-1], dilation_d, self.bias, self.group_count,
        )
        # fmt: on


def from_conv(config: ConvConfig) -> ProblemKey:
    """The problem that MIOpen makes of a layer; raises NoKey where its form is not known for
    certain."""
    if config.mode != "conv":
        raise NoKey("a transposed convolution has no checked MIOpen key")
    forward = config.direction is Direction.FORWARD
    if config.data_type is DataType.INT8 and not forward:
        raise NoKey("MIOpen has INT8 convolutions forward only")
    x = (config.in_channels, _along(config, "in"), config.in_layout)
    y = (config.out_channels, config.output_size, config.out_layout)
    (in_channels, in_size, in_layout), (out_channels, out_size, out_layout) = (
        (x, y) if forward else (y, x)
    )
    return ProblemKey(
        in_channels=in_channels,
        in_size=in_size,
        fil_size=_along(config, "fil"),
        out_channels=out_channels,
        out_size=out_size,
        batchsize=config.batchsize,
        pads=_along(config, "pad"),
        strides=_along(config, "conv_stride"),
        dilations=_along(config, "dilation"),
        layouts=(in_layout, config.fil_layout, out_layout),
        data_type=config.data_type.value,
        direction=config.direction.value,
        group_count=config.group_count,
    )


def to_conv(key: ProblemKey) -> ConvConfig:
    """The layer that MIOpen gives this key, the inverse of `from_conv`.

    Raises NoKey for what a layer of Tuna cannot be (tensor casts, a bias, data types or layouts
    that differ between tensors), BadInput for a key whose numbers are not those of a convolution.
    """
    if key.casts:
        raise NoKey(f"Tuna has no convolution with tensor casts ({key.casts.lstrip('_')})")
    in_layout, fil_layout, out_layout = key.layouts
    if not in_layout == fil_layout == out_layout:
        raise NoKey(
            f"Tuna has no convolution whose tensors differ in layout ({', '.join(key.layouts)})"
        )
    config = _conv(key.perf(), key.in_size, key.out_size)
    if from_conv(config) != key:
        raise BadInput(
            f"{key.text()} is not a convolution: the layer with its sizes has"
            f" {from_conv(config).text()}"
        )
    return config


def conv_from_perf(key: PerfKey) -> ConvConfig:
    """A layer that has this row of a perf db; raises NoKey and BadInput as `to_conv` does.

    A row of B and W holds only the output side of the forward layer. The forward input then is the
    smallest that gives it, (out - 1) * stride + dilation * (fil - 1) + 1 - 2 * pad along each axis
    (at least 1); up to stride - 1 more would give the same row.
    """
    check_sizes(_PERF_NUMBERS, tuple(getattr(key, name) for name in _PERF_NUMBERS), 0)
    smallest = tuple(_smallest_input(key, axis) for axis in _axes(key))
    config = _conv(key, _along(key, "in"), smallest)
    if from_conv(config).perf() != key:
        raise BadInput(
            f"{key.text()} is not a convolution: the layer with its sizes has"
            f" {from_conv(config).perf().text()}"
        )
    return config


def problem_of(key: PerfKey) -> ProblemKey:
    """A problem with this row of a perf db, for one that no layer has; its "out" has the size that
    a convolution gives, at least 1.

    Raises BadInput for a row whose numbers are those of no problem.
    """
    if key.spatial_dim not in LAYOUTS or key.direction not in _DIRECTIONS:
        raise BadInput(f"{key.text()} is not a 2D or 3D problem with a direction F, B or W")
    size = _output if key.direction == Direction.FORWARD else _smallest_input
    problem = ProblemKey(
        in_channels=key.in_channels,
        in_size=_along(key, "in"),
        fil_size=_along(key, "fil"),
        out_channels=key.out_channels,
        out_size=tuple(size(key, axis) for axis in _axes(key)),
        batchsize=key.batchsize,
        pads=_along(key, "pad"),
        strides=_along(key, "conv_stride"),
        dilations=_along(key, "dilation"),
        layouts=(key.layout,) * 3,
        data_type=key.data_type,
        direction=key.direction,
        group_count=key.group_count,
        bias=key.bias,
    )
    if parse(problem.text()).perf() != key:
        raise BadInput(
            f"{key.text()} is not a problem: it reads as {parse(problem.text()).perf().text()}"
        )
    return problem


def _axes(of: ConvConfig | PerfKey) -> str:
    return "dhw"[3 - of.spatial_dim :]


def _along(of: ConvConfig | PerfKey, name: str) -> tuple[int, ...]:
    """The field of each axis, from the outermost."""
    return tuple(getattr(of, f"{name}_{axis}") for axis in _axes(of))


def _output(key: PerfKey, axis: str) -> int:
    size, fil, pad, stride, dilation = (getattr(key, f"{name}_{axis}") for name in _LENGTHS)
    return int(max(1, (size + 2 * pad - dilation * (fil - 1) - 1) // max(1, stride) + 1))


def _smallest_input(key: PerfKey, axis: str) -> int:
    out, fil, pad, stride, dilation = (getattr(key, f"{name}_{axis}") for name in _LENGTHS)
    return int(max(1, (out - 1) * stride + dilation * (fil - 1) + 1 - 2 * pad))


def _conv(key: PerfKey, in_size: tuple[int, ...], out_size: tuple[int, ...]) -> ConvConfig:
    """The layer with the fields in `key`, which all three tensors share; sizes are those of
    MIOpen's problem."""
    if key.bias:
        raise NoKey(f"Tuna has no convolution with a bias ({key.bias})")
    if key.data_type not in _DATA_TYPES:
        raise NoKey(
            f"Tuna has no convolution with the data type {key.data_type}: use"
            f" {', '.join(_DATA_TYPES)}"
        )
    if key.spatial_dim not in LAYOUTS or key.layout not in LAYOUTS[key.spatial_dim]:
        raise NoKey(
            f"Tuna has no convolution with the layout {key.layout} in {key.spatial_dim} dimensions"
        )
    fields = {name: value for name, value in vars(key).items() if name not in ("layout", "bias")}
    size = in_size
    if key.direction != Direction.FORWARD:
        size = out_size
        fields["in_channels"], fields["out_channels"] = key.out_channels, key.in_channels
    fields["in_h"], fields["in_w"] = size[-2:]
    fields["in_d"] = size[0] if key.spatial_dim == 3 else 1
    fields["data_type"] = _DATA_TYPES[key.data_type]
    fields["in_layout"] = fields["fil_layout"] = fields["out_layout"] = key.layout
    return ConvConfig(**fields)


def key_of(config: object) -> ProblemKey | None:
    """The problem that MIOpen makes of a layer; None if it has no key that is known for certain."""
    try:
        return from_conv(config) if isinstance(config, ConvConfig) else None
    except NoKey:
        return None


def parse(text: str) -> ProblemKey:
    """The problem that a find-db key names; raises BadInput.

    One word may stand for three equal layouts that are not MIOpen's default: lists of layers have
    such keys.
    """
    words = _HYPHEN.split(text)
    dims = 3 if len(words) > 4 and words[4].count("x") == 2 else 2
    one_layout, three_layouts = 11 + 2 * dims, 13 + 2 * dims
    if len(words) not in (one_layout, three_layouts):
        raise BadInput(
            f"{text!r} is not a find-db key: {len(words)} fields, not {one_layout} or"
            f" {three_layouts}"
        )
    try:
        key = _from_words(words, dims, len(words) == one_layout)
    except ValueError as error:
        raise BadInput(f"{text!r} is not a find-db key: {error}") from None
    if text not in (key.text(), key.short_text()):
        raise BadInput(f"{text!r} is not a find-db key: MIOpen would write {key.text()!r}")
    return key


def _from_words(words: list[str], dims: int, one_layout: bool) -> ProblemKey:
    rest = iter(words)

    def number() -> int:
        return _number(next(rest))

    def sizes() -> tuple[int, ...]:
        return tuple(number() for _ in range(dims))

    def by() -> tuple[int, ...]:
        values = tuple(map(_number, next(rest).split("x")))
        if len(values) != dims:
            raise ValueError(f"{dims} numbers joined by x are expected")
        return values

    in_channels, in_size, fil_size, out_channels, out_size = (
        number(),
        sizes(),
        by(),
        number(),
        sizes(),
    )
    batchsize, pads, strides, dilations, bias = number(), by(), by(), by(), number()
    first = next(rest)
    layouts = (first, first, first) if one_layout else (first, next(rest), next(rest))
    data_type = next(rest)
    direction, groups, casts = _tail(next(rest))
    # fmt: off
    return ProblemKey(
        in_channels, in_size, fil_size, out_channels, out_size, batchsize, pads, strides, dilations,
        layouts, data_type, direction, groups, bias, casts,
    )
    # fmt: on


def _tail(text: str) -> tuple[str, int, str]:
    direction, *options = text.split("_")
    if direction not in _DIRECTIONS:
        raise ValueError(f"direction {direction!r} is not F, B or W")
    groups = 1
    if options and options[0].startswith("g"):
        groups = _number(options.pop(0)[1:])
    for option in options:
        if option[:2] not in ("ci", "cw", "co"):
            raise ValueError(f"unknown option _{option}")
    return direction, groups, "".join(f"_{option}" for option in options)


def _number(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def _by(values: tuple[int, ...]) -> str:
    return "x".join(map(str, values))


def _named(line: str) -> list[ConvConfig]:
    """Return the layer of a find-db line; only the key matters."""
    return [to_conv(parse(line.partition("=")[0].strip()))]


LINE_FORM = LineForm(
    "find-db key", recognises=lambda line: _KEY_START.match(line) is not None, read=_named
)
