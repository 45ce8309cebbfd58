"""Which answers of a built model are taken for right, and what is said where the reference is wrong
or has none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuna.api import model_making
from tuna.api.model_making import Checks, judge
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


class Making:
    """A build of which the answers of runtimes, and the outcomes of its jobs, are given."""

    def __init__(self, errors: dict[str, float], unanswered: dict[str, str]) -> None:
        self.wanted = SimpleNamespace(checks=Checks(), manifest=SimpleNamespace(opset="17"))
        self.given: dict[str, Any] = {}
        self._errors, self._unanswered = errors, unanswered
        self.asked: list[str] = []

    def call(self, _op: str, *, by: str, **_: Any) -> dict[str, str]:
        self.asked.append(by)
        return {"unanswered": self._unanswered.get(by, "")}

    def answers_by(self, name: str) -> Path:
        return Path(name)

    def measure(self, _plan: Any, answers: Path) -> Any:
        error = self._errors[answers.name]
        return SimpleNamespace(error=error, right=error <= 1e-3, by=answers.name)

    def difference(self, *_: Path) -> float:
        return self._errors["between"]


def judged(making: Making) -> tuple[Any, dict[str, Any]]:
    return model_making._Answers(making).judged({})  # type: ignore[arg-type]


def test_no_other_runtime_is_asked_where_the_reference_agrees() -> None:
    making = Making({"reference": 1e-6}, {})
    measured, verdict = judged(making)
    assert (making.asked, measured.by) == ([""], "reference")
    assert verdict == {"errors": {"reference": 1e-6}, "remark": ""}


@pytest.mark.parametrize("unanswered", [FAILED, ""])
def test_onnxruntime_is_asked_where_the_reference_has_no_answer_or_another(unanswered: str) -> None:
    making = Making({"reference": 0.5, "onnxruntime": 1e-6, "between": 0.5}, {"": unanswered})
    measured, verdict = judged(making)
    assert (making.asked, measured.by) == (["", "onnxruntime"], "onnxruntime")
    assert verdict["remark"].startswith("ONNX's reference evaluator")
    compared = {"onnxruntime"} if unanswered else {"reference", "onnxruntime"}
    assert verdict["errors"].keys() == compared


def test_a_wrong_model_is_refused_whether_or_not_there_is_another_runtime() -> None:
    with pytest.raises(BadInput, match=r"by 0\.5 of the largest value"):
        judged(Making({"reference": 0.5}, {"onnxruntime": "Absent: not installed"}))
    with pytest.raises(BadInput, match=r"from onnxruntime by 0\.4"):
        judged(Making({"reference": 0.5, "onnxruntime": 0.4, "between": 1e-6}, {}))
    with pytest.raises(BadInput, match="no other runtime is here that can"):
        judged(Making({}, {"": FAILED, "onnxruntime": "Absent: not installed"}))
