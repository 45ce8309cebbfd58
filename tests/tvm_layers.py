"""Small layers for the tests of the TVM library."""

from __future__ import annotations

from typing import Any

from tuna.configs import Config, from_json

_CONV: dict[str, Any] = {
    "kind": "convolution",
    "batchsize": 1,
    "in_channels": 8,
    "in_h": 8,
    "in_w": 8,
    "out_channels": 8,
    "fil_h": 3,
    "fil_w": 3,
    "pad_h": 1,
    "pad_w": 1,
}
_DEEP = {"spatial_dim": 3, "in_d": 5, "fil_d": 3, "pad_d": 1, "conv_stride_d": 1, "dilation_d": 1}
LAST = {"in_layout": "NHWC", "fil_layout": "NHWC", "out_layout": "NHWC"}
THREE = {**_DEEP, "in_layout": "NCDHW", "fil_layout": "NCDHW", "out_layout": "NCDHW"}
THREE_LAST = {**_DEEP, "in_layout": "NDHWC", "fil_layout": "NDHWC", "out_layout": "NDHWC"}
STRIDE = {"conv_stride_h": 2, "conv_stride_w": 2}
DILATION = {"dilation_h": 2, "dilation_w": 2, "pad_h": 2, "pad_w": 2}
ODD = {
    "batchsize": 2,
    "in_channels": 5,
    "out_channels": 7,
    "in_h": 9,
    "in_w": 11,
    "fil_w": 5,
    "pad_w": 0,
}
POINT = {"fil_h": 1, "fil_w": 1, "pad_h": 0, "pad_w": 0}
GROUPS = {"group_count": 2}
DEPTHWISE = {"group_count": 8}


def conv(**changes: Any) -> Config:
    """1x8x8x8, 8 filters of 3x3, pad 1, NCHW, fp32, but for the changes."""
    return from_json({**_CONV, **changes})


def gemm(**changes: Any) -> Config:
    """17 x 33 x 20."""
    return from_json({"kind": "gemm", "m": 17, "n": 33, "k": 20, **changes})
