"""The sizes of a convolution as the kernels see them: channels in blocks of one vector, groups
merged into whole blocks."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TypeGuard

from tuna.configs import Config, ConvConfig
from tuna.configs.values import DataType, Direction
from tuna.libraries.tvm.kernels.instructions import WORDS
from tuna.libraries.tvm.kernels.types import TYPES

#: Maximum of channels with which a layer is the first of a network: its input is an image in its
#: own layout, never blocked
IMAGE_CHANNELS = 3
#: Number of fp32 values in a line of the cache
_LINE_FLOATS = 16


class Mode(str, enum.Enum):
    """Layouts in which a kernel reads its input and writes its answer. Weights always are packed
    ahead."""

    #: both in blocks of channels, N, C/block, H, W, block, as another kernel of these wrote it
    NATIVE = "native"
    LAYER = "layer"  #: both as the config says; the conversions are part of the kernel


@dataclass(frozen=True)
class ConvShape:
    """A 2D convolution in blocks of `block` channels: forward, or what `direction` says.

    Of backward data, `in_*` is dy and `out_*` is dx; `stride` and `pad` are the forward layer's. Of
    backward weights, they are x and dy.

    Groups are merged until the output channels of one fill whole blocks (`merged` groups make one),
    and the weights between different groups are zero: a group of 4 channels costs as much as one of
    `block`, which no vector unit does faster. The last merged group may have fewer groups.
    """

    block: int  #: number of channels in a block: fp32 values in a vector register
    batch: int
    in_channels: int
    out_channels: int
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    filter: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    merged: int
    in_layout: str
    out_layout: str
    direction: Direction = Direction.FORWARD
    #: type of the weights of which words are multiplied (`kernels.dots`), empty for single values
    word_type: str = ""
    #: rows and columns of the answer that the channels of a pixel become
    interleaved: tuple[int, int] = (1, 1)

    @property
    def word(self) -> int:
        """Number of input channels that one instruction takes at once."""
        return WORDS[self.word_type]

    @property
    def group_count(self) -> int:
        """Number of groups after merging."""
        return math.ceil(self.groups / self.merged)

    @property
    def group_in(self) -> int:
        """Input channels of a merged group."""
        return self.in_channels // self.groups * self.merged

    @property
    def in_block(self) -> int:
        """Input channels in one block of the reduction: those of the input, all of a group, what
        divides them, or of an image one word. Whole words, but for groups that have none, and
        where words are of taps."""
        if self.row_words:
            return 1
        if self.image:
            return self._in_words(1 if self.word == 1 else self.in_channels)
        if self.group_count == 1:
            return self._in_words(min(self.block, self.group_in))
        return divisors(self.group_in, self.block)[-1]

    def _in_words(self, channels: int) -> int:
        return math.ceil(channels / self.word) * self.word

    @property
    def in_words(self) -> int:
        """Words of a block of the reduction."""
        return 1 if self.row_words else self.in_block // self.word

    @property
    def row_words(self) -> int:
        """Words of taps of a row of an image's filter, whose channels fill no word; 0 where words
        are of channels."""
        wide = self.filter[1] > 2 and self.dilation[1] == 1
        words = self.image and self.word > 1 and self.groups == 1 and wide
        return math.ceil(self.filter[1] / self.word) if words else 0

    @property
    def taps(self) -> tuple[int, int]:
        """Rows and columns of the filter as the reduction takes them."""
        return self.filter[0], self.row_words or self.filter[1]

    @property
    def tap_words(self) -> int:
        """Words of four taps of a row of a depthwise filter; 0 where they are single values."""
        words = self.word == 4 and self.dilation[1] == 1
        return math.ceil(self.filter[1] / 4) if words else 0

    @property
    def in_blocks(self) -> int:
        """Blocks of input channels of a merged group; the last may be filled up with zeros."""
        return math.ceil(self.group_in / self.in_block)

    @property
    def out_blocks(self) -> int:
        """Blocks of output channels of all groups; the last may be filled up with zeros."""
        return math.ceil(self.out_channels / self.block)

    @property
    def group_out_blocks(self) -> int:
        """Blocks of output channels of a merged group; the last group may have fewer."""
        return math.ceil(self.out_channels // self.groups * self.merged / self.block)

    @property
    def even_blocks(self) -> int:
        """Blocks of output channels of which all merged groups have a multiple."""
        return math.gcd(self.group_out_blocks, self.out_blocks)

    @property
    def paired(self) -> int:
        """Blocks of output channels whose weights lie side by side: as many as fill a line of the
        cache."""
        return math.gcd(self.even_blocks, max(1, _LINE_FLOATS // self.block))

    @property
    def read_size(self) -> tuple[int, int]:
        """Rows and columns of the padded input from which the answer is computed."""
        axes = zip(self.out_size, self.stride, self.filter, self.dilation, strict=True)
        high, wide = ((out - 1) * step + (taps - 1) * gap + 1 for out, step, taps, gap in axes)
        return high, wide

    @property
    def image(self) -> bool:
        """Whether the native input is the layer's own, for it has too few channels for a block."""
        return self.in_channels <= IMAGE_CHANNELS

    @property
    def answer_channels(self) -> int:
        """Channels of the answer, of which those of a pixel may be several pixels."""
        return self.out_channels // math.prod(self.interleaved)

    @property
    def planar(self) -> bool:
        """Whether the native answer is the layer's own: interleaved, with too few channels for a
        block."""
        return self.interleaved != (1, 1) and self.answer_channels <= IMAGE_CHANNELS

    @property
    def pointwise(self) -> bool:
        """Whether the filter is 1 x 1."""
        return self.filter == (1, 1)

    def fits_native(self) -> bool:
        """Whether the blocks of all merged groups are those of the native input."""
        whole = self.group_in % self.block == 0
        blocks = self.group_count * self.group_in // self.block
        return self.group_count == 1 or (whole and blocks == self.native_input()[1])

    def native_input(self) -> tuple[int, ...]:
        """Shape of the input in `Mode.NATIVE`."""
        if self.image:
            return self.layer_input()
        return (self.batch, math.ceil(self.in_channels / self.block), *self.in_size, self.block)

    def native_output(self) -> tuple[int, ...]:
        """Shape of the sums in `Mode.NATIVE`; channels past the layer's are zero."""
        return (self.batch, self.out_blocks, *self.out_size, self.block)

    def native_answer(self) -> tuple[int, ...]:
        """Shape of the answer in `Mode.NATIVE`, with axes of their own for the rows and columns
        that channels become."""
        if self.interleaved == (1, 1):
            return self.native_output()
        (high, wide), (rows, columns) = self.interleaved, self.out_size
        pixels = (rows, high, columns, wide)
        if self.planar:
            return (self.batch, self.answer_channels, *pixels)
        return (self.batch, self.answer_channels // self.block, *pixels, self.block)

    def layer_input(self) -> tuple[int, ...]:
        """Shape of the input in `Mode.LAYER`."""
        return _laid_out(self.batch, self.in_channels, self.in_size, self.in_layout)

    def layer_output(self) -> tuple[int, ...]:
        """Shape of the answer in `Mode.LAYER`."""
        (high, wide), (rows, columns) = self.interleaved, self.out_size
        size = (high * rows, wide * columns)
        return _laid_out(self.batch, self.answer_channels, size, self.out_layout)


def divisors(number: int, most: int) -> list[int]:
    """The divisors that are at most `most`, the smallest first."""
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def supported(config: Config) -> TypeGuard[ConvConfig]:
    """Whether `config` is a 2D convolution in fp32, or a gradient of one; or a forward one of
    another type that kernels take."""
    if not isinstance(config, ConvConfig) or config.data_type not in TYPES:
        return False
    if config.data_type is not DataType.FP32 and config.direction is not Direction.FORWARD:
        return False
    return config.mode == "conv" and config.spatial_dim == 2 and min(config.output_shape) >= 1


def turned(config: ConvConfig) -> bool:
    """Whether it is backward data with stride 1, the forward convolution of dy with the filter
    turned round."""
    if config.direction is not Direction.BACKWARD_DATA:
        return False
    return config.conv_stride_h == config.conv_stride_w == 1 and min(_turned_pad(config)) >= 0


def of(
    config: ConvConfig,
    block: int,
    word_type: str = "",
    interleaved: tuple[int, int] = (1, 1),
) -> ConvShape:
    """The shape of a supported `config` in blocks of `block` channels, with weights in words of
    `word_type`; forward, for what is `turned`."""
    height, width = config.output_size
    channels = config.in_channels, config.out_channels
    size = (config.in_h, config.in_w), (height, width)
    pad = (config.pad_h, config.pad_w)
    if config.direction is Direction.BACKWARD_DATA:
        channels, size = (channels[1], channels[0]), (size[1], size[0])
    if turned(config):
        pad = _turned_pad(config)
    return ConvShape(
        block=block,
        batch=config.batchsize,
        in_channels=channels[0],
        out_channels=channels[1],
        in_size=size[0],
        out_size=size[1],
        filter=(config.fil_h, config.fil_w),
        stride=(config.conv_stride_h, config.conv_stride_w),
        pad=pad,
        dilation=(config.dilation_h, config.dilation_w),
        groups=config.group_count,
        merged=_merged(config.group_count, channels[1], block),
        in_layout=config.in_layout,
        out_layout=config.out_layout,
        direction=Direction.FORWARD if turned(config) else config.direction,
        word_type=word_type,
        interleaved=interleaved,
    )


def _merged(groups: int, channels: int, block: int) -> int:
    """Return how many groups fill whole blocks of output channels; all where none do, and of less
    than two such parts where the last one would have fewer blocks."""
    least = block // math.gcd(channels // groups, block)
    filled = math.ceil(groups / least) * least * (channels // groups)
    is_even = filled < channels + block
    return least if least < groups and (is_even or 2 * least <= groups) else groups


def _turned_pad(config: ConvConfig) -> tuple[int, int]:
    reach = (config.fil_h - 1) * config.dilation_h, (config.fil_w - 1) * config.dilation_w
    return reach[0] - config.pad_h, reach[1] - config.pad_w


def _laid_out(batch: int, channels: int, size: tuple[int, int], layout: str) -> tuple[int, ...]:
    return (batch, *size, channels) if layout.endswith("C") else (batch, channels, *size)
