"""Convolutions: validation, shapes, FLOPs and normal form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from configs_strategies import convs
from hypothesis import given

from tuna.configs import ConvConfig, DataType, Direction, from_json
from tuna.errors import BadInput

LAYER = ConvConfig(2, 64, 56, 48, 128, 3, 5, pad_h=1, pad_w=2, conv_stride_h=2)
CUBE = ConvConfig(
    *(1, 4, 9, 10, 6, 3, 3),
    spatial_dim=3,
    in_d=8,
    fil_d=2,
    conv_stride_d=1,
    dilation_d=2,
    in_layout="NDHWC",
    fil_layout="NDHWC",
    out_layout="NDHWC",
    group_count=2,
)


def _count_positions(size: int, fil: int, pad: int, stride: int, dilation: int) -> int:
    """Output extent by brute force: every start at which the whole filter lies within the padded
    input."""
    reach = dilation * (fil - 1) + 1
    return sum(1 for start in range(0, size + 2 * pad, stride) if start + reach <= size + 2 * pad)


@given(convs())
def test_the_output_size_equals_the_counted_filter_positions(config: ConvConfig) -> None:
    axes = "dhw"[3 - config.spatial_dim :]
    for axis, size in zip(axes, config.output_size, strict=True):
        fil, pad, stride, dilation, before = (
            getattr(config, f"{name}_{axis}")
            for name in ("fil", "pad", "conv_stride", "dilation", "in")
        )
        if config.mode == "conv":
            assert size == _count_positions(before, fil, pad, stride, dilation)
        else:
            # A transposed convolution undoes the sizes of the convolution with the same filter.
            assert _count_positions(size, fil, pad, stride, dilation) == before


def test_shapes_follow_the_layout() -> None:
    assert LAYER.output_size == (28, 48)
    assert LAYER.input_shape == (2, 64, 56, 48)
    assert LAYER.weight_shape == (128, 64, 3, 5)
    assert LAYER.output_shape == (2, 128, 28, 48)
    last = replace(LAYER, in_layout="NHWC", fil_layout="NHWC", out_layout="NHWC")
    assert last.input_shape == (2, 56, 48, 64)
    assert last.weight_shape == (128, 3, 5, 64)
    assert last.output_shape == (2, 28, 48, 128)


def test_shapes_of_a_grouped_dilated_three_dimensional_layer() -> None:
    assert CUBE.output_size == (6, 7, 8)
    assert CUBE.input_shape == (1, 8, 9, 10, 4)
    assert CUBE.weight_shape == (6, 2, 3, 3, 2)
    assert CUBE.output_shape == (1, 6, 7, 8, 6)
    assert CUBE.flops == 2 * (6 * 7 * 8) * 6 * 2 * (2 * 3 * 3)


def test_a_transposed_layer_has_its_channels_swapped_in_the_weights() -> None:
    config = ConvConfig(
        *(1, 8, 7, 7, 16, 3, 3, 1, 1, 2, 2),
        group_count=2,
        mode="trans",
        trans_output_pad_h=1,
        trans_output_pad_w=1,
    )
    assert config.output_size == (14, 14)
    assert config.weight_shape == (8, 8, 3, 3)
    assert config.flops == 2 * 8 * 7 * 7 * 8 * 9


def test_flops_are_two_for_each_multiply_add_and_the_same_in_every_direction() -> None:
    assert LAYER.flops == 2 * 2 * 128 * 28 * 48 * 64 * 3 * 5
    assert {LAYER.facing(direction).flops for direction in Direction} == {LAYER.flops}


@given(convs())
def test_facing_another_direction_changes_nothing_else(config: ConvConfig) -> None:
    keys = {config.key}
    for direction in Direction:
        turned = config.facing(direction)
        assert turned == replace(config, direction=direction)
        assert turned.key == replace(config, direction=direction).key
        keys.add(turned.key)
    assert len(keys) == 3


def test_labels_say_what_differs_from_the_ordinary() -> None:
    assert (
        ConvConfig(1, 64, 56, 56, 64, 3, 3, 1, 1).label
        == "conv 1x64x56x56 k64 3x3 s1 p1 NCHW fp32 F"
    )
    assert LAYER.label == "conv 2x64x56x48 k128 3x5 s2x1 p1x2 NCHW fp32 F"
    assert CUBE.label == "conv 1x4x8x9x10 k6 2x3x3 s1 p0 d2x1x1 g2 NDHWC fp32 F"


def test_plain_text_is_accepted_for_the_enums() -> None:
    config = replace(LAYER, direction="B", data_type="BF16")  # type: ignore[arg-type]
    assert config.direction is Direction.BACKWARD_DATA
    assert config.data_type is DataType.BF16
    assert f"{config.direction}{config.data_type}" == "BBF16"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"in_h": 0}, "in_h must be at least 1, got 0"),
        ({"batchsize": -8}, "batchsize must be at least 1, got -8"),
        ({"pad_h": -1}, "pad_h must be at least 0"),
        ({"in_w": 2**31}, "in_w must be at most 2147483647"),
        ({"in_w": 48.0}, "in_w must be a whole number"),
        ({"in_w": True}, "in_w must be a whole number"),
        ({"group_count": 3}, "group_count 3 must divide in_channels 64 and out_channels 128"),
        ({"group_count": 0}, "group_count must be at least 1"),
        (
            {"fil_h": 59},
            "the filter does not fit along h: it reaches over 59, the padded input has 58",
        ),
        (
            {"fil_w": 3, "dilation_w": 26},
            "does not fit along w: it reaches over 53, the padded input has 52",
        ),
        ({"mode": "full"}, "mode must be conv or trans"),
        ({"pad_mode": "same"}, "must be resolved"),
        ({"in_layout": "NHWC"}, "must have the same layout"),
        ({"in_layout": "NCDHW"}, "does not fit spatial_dim 2"),
        ({"in_layout": "CHWN"}, "does not fit spatial_dim 2: use NCHW or NHWC"),
        ({"spatial_dim": 3}, "does not fit spatial_dim 3"),
        ({"spatial_dim": 1}, "spatial_dim must be 2 or 3"),
        ({"in_d": 2}, "a two-dimensional convolution has in_d 1"),
        ({"conv_stride_d": 1}, "a two-dimensional convolution has"),
        ({"trans_output_pad_h": 1}, "only a transposed convolution"),
        ({"mode": "trans", "trans_output_pad_w": 1}, "must be less than the stride 1"),
        ({"mode": "trans", "in_w": 1, "pad_w": 3}, "the output has size -1 along w"),
        ({"batchsize": 2**31 - 1, "in_channels": 2**31 - 1, "in_h": 2**20}, "too large"),
    ],
)
def test_an_impossible_layer_is_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        replace(LAYER, **changes)


def test_three_dimensions_need_a_stride_and_a_dilation_in_depth() -> None:
    with pytest.raises(BadInput, match="conv_stride_d must be at least 1"):
        replace(CUBE, conv_stride_d=0)


def test_json_of_a_two_dimensional_layer_has_miopens_depth_fields() -> None:
    fields = LAYER.to_json()
    names = ("in_d", "fil_d", "pad_d", "conv_stride_d", "dilation_d", "trans_output_pad_d")
    assert [fields[name] for name in names] == [1, 1, 0, 0, 0, 0]
    assert (
        from_json(fields | {"in_d": 32, "fil_d": 3, "conv_stride_d": 1, "dilation_d": 1}) == LAYER
    )
