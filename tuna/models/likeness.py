"""How much one task is like another, to try the params of a kernel where nothing was measured."""

from __future__ import annotations

import math

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig

#: Fields of a convolution that must be equal, and those whose ratio counts.
_EQUAL = (
    *("fil_h", "fil_w", "conv_stride_h", "conv_stride_w", "dilation_h", "dilation_w", "pad_h", "pad_w"),
    *("direction", "data_type", "in_layout", "spatial_dim", "mode"),
)
_SIZES = ("batchsize", "in_channels", "out_channels", "in_h", "in_w")
_PRODUCT_EQUAL, _PRODUCT_SIZES = ("trans_a", "trans_b", "data_type"), ("m", "n", "k", "batch_count")


def likeness(task: TaskConfig, other: TaskConfig) -> float | None:
    """The sum of the logarithms of the ratios of all sizes, above 0; None for tasks that are not alike, and for the same one.

    Alike are tasks with the same layouts and epilogue, and the same layer but for sizes; of grouped layers only depthwise ones.
    """
    if task == other or (task.layouts, task.epilogue) != (other.layouts, other.epilogue):
        return None
    mine, theirs = task.core, other.core
    if isinstance(mine, ConvConfig) and isinstance(theirs, ConvConfig):
        if _grouping(mine) != _grouping(theirs) or _grouping(mine) is None or not _same(mine, theirs, _EQUAL):
            return None
        return _distance(mine, theirs, _SIZES)
    if isinstance(mine, GemmConfig) and isinstance(theirs, GemmConfig) and _same(mine, theirs, _PRODUCT_EQUAL):
        return _distance(mine, theirs, _PRODUCT_SIZES)
    return None


def _grouping(config: ConvConfig) -> str | None:
    if config.group_count == 1:
        return "none"
    return "depthwise" if config.group_count == config.in_channels == config.out_channels else None


def _same(mine: Config, theirs: Config, names: tuple[str, ...]) -> bool:
    return all(getattr(mine, name) == getattr(theirs, name) for name in names)


def _distance(mine: Config, theirs: Config, names: tuple[str, ...]) -> float:
    return sum(abs(math.log(getattr(mine, name) / getattr(theirs, name))) for name in names)
