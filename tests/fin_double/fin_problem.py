"""Parses the convolution in a job of fin's input file, with fin's checks, and derives MIOpen's keys
of it."""

from __future__ import annotations

from typing import Any, NamedTuple

#: fin's commands -> MIOpen's name of the data type, its number in `miopenDataType_t`, bytes per
#: element.
COMMANDS = {
    "conv": ("FP32", 1, 4),
    "convfp16": ("FP16", 0, 2),
    "convbfp16": ("BF16", 5, 2),
    "convint8": ("INT8", 3, 1),
}
BATCH_NORM_COMMANDS = ("bnorm", "bnormfp16")
_LAYOUTS = {
    2: ("NCHW", "NHWC", "CHWN", "NCHWc4", "NCHWc8", "CHWNc4", "CHWNc8"),
    3: ("NCDHW", "NDHWC"),
}
_DEVICES = {
    "gfx900": (56, 64),
    "gfx906": (60, 64),
    "gfx908": (120,),
    "gfx1030": (72, 36),
    "gfx90a": (110, 104),
    "gfx940": (228,),
    "gfx942": (304, 228),
}
_SIZES = ("batchsize", "in_channels", "out_channels", "group_count")
_ALONG = ("in", "fil", "pad", "conv_stride", "dilation")
_WORDS = ("mode", "pad_mode", "direction", "in_layout", "wei_layout", "out_layout")
_BATCH_NORM_SIZES = ("batchsize", "in_channels", "in_h", "in_w", "mode", "save", "run")


class FinError(Exception):
    """Stands for an exception that fin throws, which aborts the process."""


class Device(NamedTuple):
    """The device of a job."""

    arch: str  #: without target features
    num_cu: int
    features: str

    @property
    def basename(self) -> str:
        """The stem of MIOpen's database files for this device."""
        off = self.arch in ("gfx906", "gfx908") and (
            "sramecc-" in self.features or "sram-ecc-" in self.features
        )
        name = self.arch + "_nosramecc" * off + "_xnack" * ("xnack+" in self.features)
        return name + (f"_{self.num_cu}" if self.num_cu <= 64 else f"{self.num_cu:x}")


def device_of(job: dict[str, Any]) -> Device:
    """The device of a job with a config; raises FinError where `VerifyDevProps` of a debug build of
    fin aborts."""
    arch, _, features = word(job, "arch").partition(":")
    num_cu = number(job, "num_cu")
    if arch not in _DEVICES:
        raise FinError("Invalid Arch Name")
    if num_cu not in _DEVICES[arch]:
        raise FinError(f"Assertion failed: {arch} has {_DEVICES[arch]} compute units, not {num_cu}")
    return Device(arch, num_cu, features)


def number(values: dict[str, Any], key: str) -> int:
    """A required integer field."""
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise FinError(
            f"[json.exception.type_error.302] type must be number, but {key} is {value!r}"
        )
    return int(value)


def word(values: dict[str, Any], key: str) -> str:
    """A required string field."""
    value = values.get(key)
    if not isinstance(value, str):
        raise FinError(
            f"[json.exception.type_error.302] type must be string, but {key} is {value!r}"
        )
    return value


def read_fields(config: dict[str, Any]) -> tuple[Any, ...]:
    """The values that fin reads from a convolution's config; equal tuples are the same problem."""
    dims = number(config, "spatial_dim")
    if dims not in _LAYOUTS:
        raise FinError("unsupported convolution dimension")
    numbers = [number(config, name) for name in _SIZES]
    numbers += [number(config, f"{name}_{axis}") for name in _ALONG for axis in "dhw"[3 - dims :]]
    return word(config, "cmd"), dims, *numbers, *(word(config, name) for name in _WORDS)


class Problem:
    """A convolution. `x` is the input and `y` the output of the *forward* layer, each as channels
    and (D,) H, W."""

    dims: int
    batch: int
    filter: tuple[int, ...]
    pads: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]

    def __init__(self, config: dict[str, Any]) -> None:
        command, self.dims, self.batch, in_channels, out_channels, groups, *rest = read_fields(
            config
        )
        self.data_type, self.data_type_number, self.element_bytes = COMMANDS[command]
        sizes = [tuple(rest[i * self.dims : (i + 1) * self.dims]) for i in range(len(_ALONG))]
        in_size, self.filter, self.pads, self.strides, self.dilations = sizes
        mode, pad_mode, direction, *layouts = rest[len(_ALONG) * self.dims :]
        for layout in layouts:
            if layout not in _LAYOUTS[self.dims]:
                raise FinError(f"Layout {layout} does not fit {self.dims} dimensions")
        self.groups: int = max(groups, 1)
        if (
            in_channels % self.groups
            or out_channels % self.groups
            or min(in_channels, out_channels, self.batch) < 1
        ):
            raise FinError("Channels do not match for the filter")
        #: fin treats any other value as backward weights.
        self.direction = direction if direction in ("F", "B") else "W"
        #: of x, weights, y
        self.layouts: tuple[str, str, str] = (layouts[0], layouts[1], layouts[2])
        self._resolve_pads(pad_mode, in_size)
        self.x: tuple[int, ...] = (in_channels, *in_size)
        self.y: tuple[int, ...] = (
            out_channels,
            *(self._output(axis, in_size, mode == "trans") for axis in range(self.dims)),
        )
        if min(self.y) < 1:
            raise FinError("Insufficient dimensions for convolution")

    def _resolve_pads(self, pad_mode: str, in_size: tuple[int, ...]) -> None:
        if pad_mode == "valid":
            self.pads = (0,) * self.dims
        elif pad_mode == "same":
            steps = zip(in_size, self.filter, self.strides, strict=True)
            self.pads = tuple(
                max(fil - (size % stride or stride), 0) // 2 for size, fil, stride in steps
            )

    def _output(self, axis: int, in_size: tuple[int, ...], transposed: bool) -> int:
        size, pad, stride = in_size[axis], self.pads[axis], self.strides[axis]
        reach = self.dilations[axis] * (self.filter[axis] - 1) + 1
        if stride < 1:
            raise FinError("Invalid stride")
        return (
            (size - 1) * stride + reach - 2 * pad
            if transposed
            else (size + 2 * pad - reach) // stride + 1
        )

    @property
    def is_default_layout(self) -> bool:
        """Channels first for all three tensors."""
        default = "NCHW" if self.dims == 2 else "NCDHW"
        return self.layouts == (default,) * 3

    @property
    def multiplications(self) -> int:
        """Multiply-adds of one run, the same in every direction."""
        count: int = self.batch * self.x[0] // self.groups
        for size in (*self.y, *self.filter):
            count *= size
        return count

    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
        """The "in" and "out" of MIOpen's problem and its layouts: for B and W "in" is the forward
        output."""
        return (
            (self.x, self.y, self.layouts)
            if self.direction == "F"
            else (self.y, self.x, self.layouts[::-1])
        )

    def db_key(self) -> str:
        """The key of a find db."""
        source, target, layouts = self.sides()
        words = layouts[:1] if self.is_default_layout else layouts
        shape = (
            *source,
            _by(self.filter),
            *target,
            self.batch,
            _by(self.pads),
            _by(self.strides),
            _by(self.dilations),
        )
        group = "" if self.groups == 1 else f"_g{self.groups}"
        return "-".join(map(str, (*shape, 0, *words, self.data_type, self.direction))) + group

    def network_config(self) -> str:
        """MIOpen's key of a prepared convolution, as fin reports it."""
        source, target, layouts = self.sides()
        words = layouts[:1] if self.is_default_layout else layouts
        fields = (*source, *self.filter, *target, self.batch, *words, self.data_type)
        shape = (*self.pads, *self.strides, *self.dilations, self.groups, self.direction, "Default")
        return "x".join(map(str, (*fields, *shape)))

    def perf_key(self) -> str:
        """The key of a text perf db."""
        source, target, layouts = self.sides()

        def hwd(values: tuple[int, ...], flat_depth: int) -> tuple[int, ...]:
            depth = values[-3] if self.dims == 3 else flat_depth
            return (*values[-2:], depth)

        # fmt: off
        fields = (
            self.dims, source[0], *hwd(source[1:], 1), *hwd(self.filter, 1), target[0], self.batch,
            *hwd(self.pads, 0),
            *hwd(self.strides, 0), *hwd(self.dilations, 0), 0, self.groups, layouts[0],
            self.data_type, self.direction,
        )
        # fmt: on
        return "x".join(map(str, fields))


def check_batch_norm(config: dict[str, Any]) -> None:
    """Raise FinError for a batch norm config on which fin aborts."""
    for name in _BATCH_NORM_SIZES:
        number(config, name)
    if word(config, "in_layout") != "NCHW":
        raise FinError("batch norm only supports NCHW")


def _by(values: tuple[int, ...]) -> str:
    return "x".join(map(str, values))
