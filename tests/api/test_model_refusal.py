"""Which answers of a built model are taken for right, and what is said where the reference is wrong
or has none."""

from __future__ import annotations

from typing import Any

import pytest

from tuna.api.model_building import judge
from tuna.errors import BadInput

FAILED = "AxisError: axis 3 is out of bounds"


def checked(
    errors: dict[str, float], doubts: dict[str, float] | None = None, unanswered: str = ""
) -> dict[str, Any]:
    return {"errors": errors, "doubts": doubts or {}, "unanswered": unanswered}


def test_what_agrees_with_the_reference_is_right_whatever_others_say() -> None:
    assert (
        judge("17", checked({"reference": 1e-6, "onnxruntime": 0.5}, {"onnxruntime": 0.5}), False)
        == ""
    )


def test_a_wrong_answer_names_what_was_compared_on_what() -> None:
    with pytest.raises(
        BadInput, match=r"from ONNX's reference evaluator by 0\.25 of .*, on recorded inputs\."
    ) as found:
        judge("17", checked({"reference": 0.25}), True)
    assert "--no-winograd" in found.value.hint
    with pytest.raises(BadInput, match=r"from PyTorch's own answer by 0\.5"):
        judge("torch 2.13", checked({"reference": 0.5}), False)


def test_a_reference_with_which_no_other_runtime_agrees_is_wrong_and_said_to_be() -> None:
    found = judge(
        "17", checked({"reference": 0.5, "onnxruntime": 1e-6}, {"onnxruntime": 0.5}), False
    )
    assert (
        found
        == "ONNX's reference evaluator is wrong here: the built model differs from ONNX's reference"
        " evaluator by 0.5 of the largest value, on random inputs, and so does onnxruntime,"
        " which agrees with the model"
    )


@pytest.mark.parametrize(
    ("errors", "doubts"),
    [
        ({"onnxruntime": 0.5}, {"onnxruntime": 1e-6}),
        ({"onnxruntime": 0.5}, {"onnxruntime": 0.5}),
        ({"onnxruntime": 9e-4}, {"onnxruntime": 5e-4}),  # agrees with both
        ({"onnxruntime": 1e-6, "pytorch": 0.5}, {"onnxruntime": 0.5, "pytorch": 1e-6}),
    ],
)
def test_a_model_is_wrong_unless_all_others_agree_with_it_and_not_with_the_reference(
    errors: dict[str, float], doubts: dict[str, float]
) -> None:
    with pytest.raises(
        BadInput, match=r"differs from ONNX's reference evaluator by 0\.5 of the largest value"
    ):
        judge("17", checked({"reference": 0.5, **errors}, doubts), False)


def test_where_the_reference_has_no_answer_the_others_count() -> None:
    found = judge("17", checked({"onnxruntime": 1e-6}, unanswered=FAILED), False)
    assert (
        found
        == f"ONNX's reference evaluator cannot compute the model ({FAILED}): it was compared with"
        " onnxruntime, which agrees"
    )
    with pytest.raises(
        BadInput,
        match=r"differs from onnxruntime by 0\.5 of the largest value, on random inputs; ONNX's",
    ):
        judge("17", checked({"onnxruntime": 0.5}, unanswered=FAILED), False)
    with pytest.raises(BadInput, match="and no other runtime is here that can") as refused:
        judge("17", checked({}, unanswered=FAILED), False)
    assert refused.value.hint.endswith("pip install onnxruntime")
