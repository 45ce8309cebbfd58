"""Fused mixtures of experts as configs."""

from __future__ import annotations

import pytest

from tuna.configs import KINDS, from_json
from tuna.errors import BadInput
from tuna.testing.kind_contract import KindContract
from tuna_triton.moe import MoeConfig

BLOCKS = MoeConfig(64, 512, 128, 2048, 10, scheme="fp8_w8a8", block_n=128, block_k=128)


class TestMoe(KindContract):
    kind = KINDS.get("moe")
    examples = (
        BLOCKS,
        MoeConfig(1, 8, 7168, 4096, 2),
        MoeConfig(7, 8, 32, 64, 8, scheme="int8_w8a16"),
    )


def test_the_label_and_the_operations_are_those_of_both_products() -> None:
    assert BLOCKS.label == "moe 64 tokens E512 N128 K2048 top10 bf16 fp8_w8a8 128x128"
    assert BLOCKS.flops == 2 * 64 * 10 * (2048 * 256 + 128 * 2048)


def test_products_are_in_8_bits_only_where_both_matrices_are() -> None:
    made = [
        from_json({**BLOCKS.to_json(), **change})
        for change in (
            {},
            {"block_n": 0, "block_k": 0},
            {"block_n": 0, "block_k": 0, "scheme": "int8_w8a16"},
            {"block_n": 0, "block_k": 0, "scheme": "", "data_type": "FP16"},
        )
    ]
    types = [one.product_type.value for one in made if isinstance(one, MoeConfig)]
    assert types == ["FP8_E4M3", "FP8_E4M3", "BF16", "FP16"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"topk": 513}, "topk is at most"),
        ({"scheme": "int4"}, "scheme must be"),
        ({"data_type": "INT8"}, "data_type BF16 or FP16"),
        ({"block_n": 0}, "given together"),
        ({"scheme": "", "block_n": 128}, "given together"),
        ({"hidden": 2**31 - 1, "tokens": 2**31 - 1}, "too large"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        from_json({**BLOCKS.to_json(), **change})
