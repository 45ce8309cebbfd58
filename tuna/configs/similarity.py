"""Similarity of layers and tasks, to try a kernel's params where nothing was measured."""

from __future__ import annotations

import math

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig
from tuna.configs.moe import MoeConfig
from tuna.configs.triton_kernel import TritonKernelConfig

#: Fields of a convolution that must be equal, and those whose ratio counts.
_EQUAL = (
    *("fil_h", "fil_w", "conv_stride_h", "conv_stride_w"),
    *("dilation_h", "dilation_w", "pad_h", "pad_w"),
    *("fil_d", "conv_stride_d", "dilation_d", "pad_d", "direction"),
    *("data_type", "in_layout", "spatial_dim", "mode"),
)
_SIZES = ("batchsize", "in_channels", "out_channels", "in_d", "in_h", "in_w")
_PRODUCT_EQUAL = (
    *("trans_a", "trans_b", "data_type", "b_type", "c_type"),
    *("compute_type", "scale_a", "scale_b", "scale_c"),
)
_PRODUCT_SIZES = ("m", "n", "k", "batch_count")
_EXPERTS_EQUAL = ("data_type", "scheme", "block_n", "block_k")
_EXPERTS_SIZES = ("tokens", "experts", "intermediate", "hidden", "topk")


def family(config: Config) -> tuple[object, ...] | None:
    """Return a key that is equal for similar configs; None for one that has no similar ones.

    Similar are layers that differ in sizes alone (among grouped ones only depthwise ones), and
    tasks with such cores, the same layouts and the same epilogue; a kernel of one's own at shapes
    that differ in numbers alone.
    """
    if isinstance(config, TaskConfig):
        core = None if config.core is None else family(config.core)
        return None if core is None else ("task", config.layouts, config.epilogue, *core)
    if isinstance(config, ConvConfig):
        grouping = _grouping(config)
        if grouping is None:
            return None
        return ("convolution", grouping, *(getattr(config, name) for name in _EQUAL))
    if isinstance(config, GemmConfig):
        return ("gemm", *(getattr(config, name) for name in _PRODUCT_EQUAL))
    if isinstance(config, MoeConfig):
        return ("moe", *(getattr(config, name) for name in _EXPERTS_EQUAL))
    if isinstance(config, TritonKernelConfig):
        modes = [(name, value) for name, value in config.shape if not _is_size(value)]
        names = [name for name, value in config.shape if _is_size(value)]
        return (config.kind, config.function, config.body, *names, *modes)
    return None


def size_distance(config: Config, other: Config) -> float | None:
    """Return the summed logarithms of the ratios of all sizes; None unless similar and distinct."""
    if config == other or family(config) is None or family(config) != family(other):
        return None
    mine, theirs = _sizes(config), _sizes(other)
    return sum(abs(math.log(one / two)) for one, two in zip(mine, theirs, strict=True))


def log_sizes(config: Config) -> tuple[float, ...]:
    """Return the logarithms of the sizes of a config that has a family: as many for each of it."""
    return tuple(map(math.log, _sizes(config)))


def differ_in_batch(config: Config, other: Config) -> bool:
    """True if nothing but the batch size differs: images, tokens or, of a product, rows of A."""
    if isinstance(config, TritonKernelConfig):
        return False  # none of its sizes is known to be that of a batch
    alike = size_distance(config, other) is not None
    return alike and _sizes(config)[1:] == _sizes(other)[1:]


def _sizes(config: Config) -> tuple[float, ...]:
    """The sizes, the batch size first."""
    if isinstance(config, TritonKernelConfig):
        return tuple(float(value) for _, value in config.shape if _is_size(value))
    core = _core(config)
    of_products = _EXPERTS_SIZES if isinstance(core, MoeConfig) else _PRODUCT_SIZES
    names = _SIZES if isinstance(core, ConvConfig) else of_products
    return tuple(getattr(core, name) for name in names)


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _core(config: Config) -> Config:
    return config.core if isinstance(config, TaskConfig) and config.core is not None else config


def _grouping(config: ConvConfig) -> str | None:
    if config.group_count == 1:
        return "none"
    return "depthwise" if config.group_count == config.in_channels == config.out_channels else None
