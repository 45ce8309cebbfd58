"""Packing of a layer's tensors for the kernels of a family, as data that a program without Tuna can
follow. Imports no TVM.

A tensor of the layer becomes an argument of the kernel in these steps, of which `layers.json` of an
exported database has those that do something:

    order      axes         transpose to this order: channels first, or a matrix as it is multiplied
    turned     groups       weights K, C/groups, R, S of backward data: C, K/groups, R, S, both
                            filter axes reversed
    filled     extents      zeros up to these extents
    groups     [g, m]       ... where the columns of group i of g begin at (i mod m) times their
                            number
    transform  matrix G     Winograd: R, S become G w GT, in double precision; these axes lead
    split      extents      reshape
    permuted   axes         transpose to this order; the result is contiguous, in fp32

The answer of a kernel goes the way back: from `permuted` to `split` to `filled`, cut to the extents
of the layer, to `order`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig
from tuna.configs.values import Direction
from tuna.libraries.tvm.kernels import shape
from tuna.libraries.tvm.kernels.families import FAMILIES, Steps
from tuna.libraries.tvm.kernels.shape import ConvShape

_CHANNELS_FIRST = [0, 3, 1, 2]


def of(
    config: Config, family: str, arguments: Sequence[Sequence[int]]
) -> list[Steps | None] | None:
    """The steps to each argument of a family's kernel with these extents, None for one that stays;
    None if all stay.

    A task has those of its core: what its epilogue adds lies between weights and answer.
    """
    if isinstance(config, TaskConfig):
        return _task(config, family, arguments)
    if isinstance(config, GemmConfig):
        found = [None, _panels(config, arguments[1]), None]
    elif (
        isinstance(config, ConvConfig)
        and family
        and config.direction is not Direction.BACKWARD_WEIGHTS
    ):
        found = _convolution(config, family, arguments)
    else:
        return None
    return found if any(found) else None


def _task(
    config: TaskConfig, family: str, arguments: Sequence[Sequence[int]]
) -> list[Steps | None] | None:
    if config.core is None:
        return None
    x, w, *added, y = arguments
    found = of(config.core, family, [x, w, y])
    if found is None:
        return None
    if len(y) < 5:  # what is added lies as the layer says
        return [*found[:2], *(None for _ in added), found[-1]]
    steps = [_channels(extents) if len(extents) < len(y) else found[-1] for extents in added]
    return [*found[:2], *steps, found[-1]]


def _channels(extents: Sequence[int]) -> Steps:
    """A value for each channel as K/b, b."""
    blocks, size = extents
    return {"filled": [blocks * size], "split": [blocks, size], "permuted": [0, 1]}


def _panels(config: GemmConfig, extents: Sequence[int]) -> Steps | None:
    """B packed as N/b, K, b; None where it has its own extents."""
    batch = [config.batch_count] if config.batch_count > 1 else []
    if len(extents) == len(batch) + 2:
        return None
    *_, blocks, depth, size = extents
    lead = list(range(len(batch)))
    first, second, third = (len(lead) + axis for axis in range(3))
    order = {"order": [*lead, second, first]} if config.trans_b else {}
    split = [*batch, depth, blocks, size]
    return {
        **order,
        "filled": [*batch, depth, blocks * size],
        "split": split,
        "permuted": [*lead, second, first, third],
    }


def _convolution(
    config: ConvConfig, family: str, arguments: Sequence[Sequence[int]]
) -> list[Steps | None]:
    x, w, y = arguments
    native = len(y) == 5
    sizes = shape.of(config, y[-1] if native else w[-1])
    answer = _blocked(config, sizes.native_output()) if native else None
    given = _blocked(config, sizes.native_input()) if native and len(x) == 5 else None
    return [given, _weights(config, sizes, family, w), answer]


def _blocked(config: ConvConfig, extents: Sequence[int]) -> Steps:
    batch, blocks, height, width, size = extents
    order = {"order": _CHANNELS_FIRST} if config.in_layout.endswith("C") else {}
    return {
        **order,
        "filled": [batch, blocks * size, height, width],
        "split": [batch, blocks, size, height, width],
        "permuted": [0, 1, 3, 4, 2],
    }


def _weights(config: ConvConfig, sizes: ConvShape, family: str, extents: Sequence[int]) -> Steps:
    steps: Steps = {"order": _CHANNELS_FIRST} if config.fil_layout.endswith("C") else {}
    if config.direction is Direction.BACKWARD_DATA:
        steps["turned"] = config.group_count
    packing = FAMILIES[family].packing
    assert packing is not None, f"{family} has no packed weights"
    return steps | packing(sizes, extents)
