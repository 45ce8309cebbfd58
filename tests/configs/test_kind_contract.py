"""The contract of kinds, for those that Tuna brings and for one that somebody else would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import softmax_kind
from softmax_kind import Softmax

from tuna.configs import KINDS, BatchNormConfig, ConvConfig, DataType, Direction, GemmConfig
from tuna.testing.kind_contract import KindContract, registered


class TestConvolution(KindContract):
    kind = KINDS.get("convolution")
    examples = (
        ConvConfig(1, 4, 6, 5, 8, 3, 3, 1, 1),
        ConvConfig(2, 4, 6, 6, 4, 3, 3, group_count=2, data_type=DataType.FP16),
        ConvConfig(1, 64, 56, 56, 64, 3, 3, 1, 1, direction=Direction.BACKWARD_DATA),
        ConvConfig(1, 8, 9, 9, 8, 3, 3, mode="trans"),
    )
    keys = ("46bcd07fa22455759a88fb869365e7e0f930e1cb1271e5a1a13fcd24c13bba35",)


class TestGemm(KindContract):
    kind = KINDS.get("gemm")
    examples = (
        GemmConfig(2, 3, 4, 5, trans_b=True),
        GemmConfig(4, 3, 2, data_type=DataType.INT8),
        GemmConfig(
            4,
            3,
            2,
            5,
            lda=7,
            stride_b=0,
            data_type=DataType.FP8_E4M3,
            c_type=DataType.BF16,
            scale_a="tensor",
        ),
    )
    keys = ("cda5835f537c8427029b014db4d5771fe6a60de45fae3510704af0d1a327901c",)


class TestBatchNorm(KindContract):
    kind = KINDS.get("batch_norm")
    examples = (
        BatchNormConfig(32, 64, 56, 57, mode=1, save=1),
        BatchNormConfig(2, 3, 4, 5, 6, 3, layout="NDHWC"),
    )
    keys = ("472639644a191c4c59e6b24b8060f5339fcdaeb22a72adbe1edfdb17ad636116",)


class TestSoftmax(KindContract):
    kind = softmax_kind.KIND
    examples = (Softmax(8, 16), Softmax(8, 16, DataType.FP16), Softmax(128, 1000))
    keys = ("0311284b58fe049a64df4e38963a1c5077c0c7fbf57a1f4990824cdd4e0c26c7",)

    @pytest.fixture(autouse=True)
    def _registered(self) -> Iterator[None]:
        with registered(softmax_kind.KIND):
            yield
