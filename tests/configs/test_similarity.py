"""Which task lends its params to which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuna.configs import ConvConfig, GemmConfig, TaskConfig
from tuna.configs.similarity import size_distance

CORE = ConvConfig(1, 64, 28, 28, 64, 3, 3, 1, 1)
TASK = TaskConfig(core=CORE, layouts="native", epilogue=("bias",))


def with_core(**fields: int) -> TaskConfig:
    return replace(TASK, core=replace(CORE, **fields))


def test_the_nearer_in_size_the_more_alike() -> None:
    distances = [size_distance(TASK, with_core(batchsize=batch)) for batch in (2, 4, 8)]
    assert None not in distances
    assert distances == sorted(distances)  # type: ignore[type-var]
    assert size_distance(TASK, with_core(batchsize=2)) == size_distance(
        with_core(batchsize=2), TASK
    )


@pytest.mark.parametrize(
    "other",
    [
        TASK,
        replace(TASK, epilogue=("bias", "relu")),
        replace(TASK, layouts="layer"),
        with_core(fil_h=1, fil_w=1, pad_h=0, pad_w=0),
        with_core(conv_stride_h=2, conv_stride_w=2),
        with_core(group_count=64),
        with_core(group_count=2),
        replace(TASK, core=GemmConfig(8, 8, 8), epilogue=("bias",)),
    ],
)
def test_other_layers_are_not_alike_whatever_their_sizes(other: TaskConfig) -> None:
    assert size_distance(TASK, other) is None


def test_grouped_layers_are_alike_only_if_both_are_depthwise() -> None:
    depthwise = with_core(group_count=64)
    assert size_distance(depthwise, with_core(group_count=32, in_channels=32, out_channels=32))
    assert size_distance(with_core(group_count=2), with_core(group_count=2, batchsize=2)) is None


def test_depths_of_convolutions_in_3d_count() -> None:
    deep = {
        "spatial_dim": 3,
        "in_d": 8,
        "fil_d": 3,
        "pad_d": 1,
        "conv_stride_d": 1,
        "dilation_d": 1,
    }
    layouts = dict.fromkeys(("in_layout", "fil_layout", "out_layout"), "NCDHW")
    layer = replace(CORE, **deep, **layouts)
    assert size_distance(layer, replace(layer, in_d=16)) == size_distance(
        layer, replace(layer, in_d=4)
    )
    assert size_distance(layer, replace(layer, fil_d=1, pad_d=0)) is None
