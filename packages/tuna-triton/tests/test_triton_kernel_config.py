"""Kernels of one's own as configs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tuna.configs import KINDS, from_json
from tuna.configs.similarity import differ_in_batch, size_distance
from tuna.errors import BadInput
from tuna.testing.kind_contract import KindContract
from tuna_triton.triton_kernel import TritonKernelConfig

BODY = "0123456789abcdef" * 4
SOFTMAX = TritonKernelConfig("softmax", (("rows", 4096), ("columns", 1024)), BODY)


class TestTritonKernel(KindContract):
    kind = KINDS.get("triton_kernel")
    examples = (
        SOFTMAX,
        TritonKernelConfig("softmax", (("rows", 4096), ("columns", 1024)), BODY[::-1]),
        TritonKernelConfig(
            "attention", (("causal", True), ("scale", 0.125), ("mode", "x-1")), BODY
        ),
    )
    keys = ("e01272f27a8f9052b66cc2157dbc77cc4ba80ba280c3f1d8f139fbde84ec7856",)

    def test_its_work_is_counted(self) -> None:
        """It is not: nobody says what a kernel computes."""
        assert SOFTMAX.flops == 0


def test_a_shape_is_the_same_in_any_order() -> None:
    other = from_json({**SOFTMAX.to_json(), "shape": {"rows": 4096, "columns": 1024}})
    assert (other, other.key) == (SOFTMAX, SOFTMAX.key)
    assert SOFTMAX.label == "softmax columns=1024 rows=4096"


def test_one_and_true_are_two_shapes() -> None:
    one, true = (TritonKernelConfig("f", (("causal", value),), BODY) for value in (1, True))
    assert len({one, true}) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": []}, "shape must be an object"),
        ({"shape": {}}, "one size or more"),
        ({"shape": {"rows": None}}, "rows must be a number, a word"),
        ({"shape": {"rows": [1]}}, "rows must be a number, a word"),
        ({"shape": {"rows": 2**63}}, "does not fit in 64 bits"),
        ({"shape": {"mode": "two words"}}, "mode must be a word"),
        ({"shape": {"a b": 1}}, "not a name of a kernel or of a size"),
        ({"shape": {f"name_{number}": 10**18 for number in range(12)}}, "more than 255"),
        ({"function": "soft max"}, "not a name of a kernel"),
        ({"function": 1}, "function must be a text"),
        ({"body": "0" * 63}, "SHA-256"),
    ],
)
def test_a_kernel_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        from_json({**SOFTMAX.to_json(), **change})


def test_a_kernel_at_shapes_that_differ_in_numbers_alone_is_alike() -> None:
    def at(function: str = "softmax", body: str = "a", **shape: int | str) -> TritonKernelConfig:
        return TritonKernelConfig(function, tuple(shape.items()), body * 64)

    one = at(rows=8, columns=64, mode="fast", causal=True)
    assert size_distance(one, replace(one, shape=(*one.shape[:-1], ("rows", 16)))) == math.log(2)
    for other in (
        at(rows=8, columns=64, mode="slow", causal=True),
        at(rows=8, columns=64, mode="fast", causal=False),
        at(body="b", rows=9, columns=64, mode="fast", causal=True),
        at("norm", rows=9, columns=64, mode="fast", causal=True),
        at(rows=8, mode="fast", causal=True),
        at(rows=0, columns=64, mode="fast", causal=True),
    ):
        assert size_distance(one, other) is None


def test_no_size_of_a_kernel_is_known_to_be_that_of_a_batch() -> None:
    one, two = (TritonKernelConfig("f", (("rows", rows),), BODY) for rows in (8, 16))
    assert not differ_in_batch(one, two)
