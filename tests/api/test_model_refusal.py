"""A built model that is not right is refused with what it was compared with."""

from __future__ import annotations

import sys

from tuna.api.model_building import refusal


def test_a_right_model_is_not_refused() -> None:
    assert refusal("17", {"reference": 1e-6, "onnxruntime": 0.5}) is None


def test_a_refusal_says_what_was_compared_on_which_inputs() -> None:
    found = refusal("17", {"reference": 1e-6, "reference on recorded inputs": 0.25, "onnxruntime": 0.5})
    assert str(found) == (
        "The built model differs from ONNX's reference evaluator by 0.25 of the largest value, on recorded inputs; "
        "from onnxruntime by 0.5."
    )
    assert found is not None
    assert "--no-winograd" in found.hint


def test_a_refusal_says_who_agrees_with_the_model() -> None:
    found = refusal("torch 2.13.0", {"reference": sys.float_info.max, "onnxruntime": 1e-6})
    assert found is not None
    assert "PyTorch's own answer" in str(found)
    assert found.hint == "onnxruntime agrees with the built model: PyTorch's own answer may be wrong"
