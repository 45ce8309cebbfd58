"""Which answers of a built model are taken for right, and what is said where the reference is wrong
or has none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuna.errors import BadInput
from tuna_models.api import model_making
from tuna_models.api.model_making import Checked, Checks, judge

FAILED = "AxisError: axis 3 is out of bounds"


WRONG = "the output y differs by 0.5 of its largest value, more than 0.001"


def test_what_agrees_with_the_reference_is_right_whatever_others_say() -> None:
    faults = {"reference": "", "onnxruntime": WRONG}
    assert judge("17", Checked(faults, {"onnxruntime": 0.5})) == ""


def test_a_wrong_answer_names_what_was_compared_on_what() -> None:
    with pytest.raises(BadInput) as found:
        judge("17", Checked({"reference": WRONG}, {}, recorded=True))
    assert str(found.value) == (
        "The built model is wrong by ONNX's reference evaluator, on recorded inputs: the output y"
        " differs by 0.5 of its largest value, more than 0.001."
    )
    with pytest.raises(BadInput, match=r"is wrong by PyTorch's own answer"):
        judge("torch 2.13", Checked({"reference": WRONG}, {}))


@pytest.mark.parametrize("winograd", [False, True])
def test_winograd_is_named_only_where_the_model_has_such_sums(winograd: bool) -> None:
    with pytest.raises(BadInput) as found:
        judge("17", Checked({"reference": WRONG}, {}, winograd=winograd))
    assert ("--no-winograd" in found.value.hint) is winograd


def test_a_reference_with_which_no_other_runtime_agrees_is_wrong_and_said_to_be() -> None:
    found = judge("17", Checked({"reference": WRONG, "onnxruntime": ""}, {"onnxruntime": 0.5}))
    assert found == (
        f"ONNX's reference evaluator is wrong here: by it {WRONG}, on random inputs; onnxruntime"
        " agrees with the model, and not with ONNX's reference evaluator"
    )


@pytest.mark.parametrize(
    ("others", "doubts", "said"),
    [
        ({"onnxruntime": WRONG}, {}, "by onnxruntime, which agrees with it, the output y differs"),
        (
            {"onnxruntime": WRONG},
            {"onnxruntime": 0.5},
            "by onnxruntime, which differs from it by 0.5, the output y differs",
        ),
        ({"onnxruntime": ""}, {}, "by onnxruntime, which agrees with it, the model is right"),
        (
            {"onnxruntime": "", "pytorch": WRONG},
            {"onnxruntime": 0.5},
            "by pytorch, which agrees with it, the output y differs",
        ),
    ],
)
def test_a_model_is_wrong_unless_all_others_agree_with_it_and_not_with_the_reference(
    others: dict[str, str], doubts: dict[str, float], said: str
) -> None:
    with pytest.raises(BadInput, match=r"is wrong by ONNX's reference evaluator") as found:
        judge("17", Checked({"reference": WRONG, **others}, doubts))
    assert said in str(found.value)


def test_where_the_reference_has_no_answer_the_others_count() -> None:
    found = judge("17", Checked({"onnxruntime": ""}, {}, unanswered=FAILED))
    assert (
        found
        == f"ONNX's reference evaluator cannot compute the model ({FAILED}): it was compared with"
        " onnxruntime, which agrees"
    )
    with pytest.raises(
        BadInput, match=r"wrong, on random inputs: by onnxruntime the output y differs .*; ONNX's"
    ):
        judge("17", Checked({"onnxruntime": WRONG}, {}, unanswered=FAILED))
    with pytest.raises(BadInput, match="and no other runtime is here that can") as refused:
        judge("17", Checked({}, {}, unanswered=FAILED))
    assert refused.value.hint.endswith("pip install onnxruntime")


class Making:
    """A build of which the answers of runtimes, and the outcomes of its jobs, are given."""

    def __init__(self, errors: dict[str, float], unanswered: dict[str, str]) -> None:
        manifest = SimpleNamespace(opset="17", tasks=())
        self.wanted = SimpleNamespace(checks=Checks(), manifest=manifest, winograd=True)
        self.given: dict[str, Any] = {}
        self._errors, self._unanswered = errors, unanswered
        self.asked: list[str] = []

    def call(self, _op: str, *, by: str, **_: Any) -> dict[str, Any]:
        self.asked.append(by)
        rule = {"rule": "equal", "tolerance": 1e-3, "quantised": 0}
        return {"unanswered": self._unanswered.get(by, ""), **rule}

    def answers_by(self, name: str) -> Path:
        return Path(name)

    def measure(self, _plan: Any, answers: Path) -> Any:
        error = self._errors[answers.name]
        right, fault = error <= 1e-3, f"y differs by {error}"
        return SimpleNamespace(error=error, right=right, by=answers.name, report="", fault=fault)

    def difference(self, *_: Path) -> float:
        return self._errors["between"]


def judged(making: Making) -> tuple[Any, dict[str, Any]]:
    return model_making._Answers(making).judged({})  # type: ignore[arg-type]


def test_no_other_runtime_is_asked_where_the_reference_agrees() -> None:
    making = Making({"reference": 1e-6}, {})
    measured, verdict = judged(making)
    assert (making.asked, measured.by) == ([""], "reference")
    assert verdict == {
        "errors": {"reference": 1e-6},
        "remark": "",
        "rule": "equal",
        "near": 1e-3,
        "quantised": 0,
        "report": "",
    }


def test_a_runtime_that_differs_from_a_right_model_is_said_to() -> None:
    assert model_making._disagreement({"onnxruntime": 0.0069}, quantised=True) == (
        "the built model, right by its reference, differs from onnxruntime by 0.0069 of the largest"
        " value, as quantised models do from one runtime to the next"
    )


@pytest.mark.parametrize("unanswered", [FAILED, ""])
def test_onnxruntime_is_asked_where_the_reference_has_no_answer_or_another(unanswered: str) -> None:
    making = Making({"reference": 0.5, "onnxruntime": 1e-6, "between": 0.5}, {"": unanswered})
    measured, verdict = judged(making)
    assert (making.asked, measured.by) == (["", "onnxruntime"], "onnxruntime")
    assert verdict["remark"].startswith("ONNX's reference evaluator")
    compared = {"onnxruntime"} if unanswered else {"reference", "onnxruntime"}
    assert verdict["errors"].keys() == compared


def test_a_wrong_model_is_refused_whether_or_not_there_is_another_runtime() -> None:
    with pytest.raises(BadInput, match=r"by 0\.5"):
        judged(Making({"reference": 0.5}, {"onnxruntime": "Absent: not installed"}))
    with pytest.raises(BadInput, match=r"by onnxruntime, which agrees with it, y differs by 0\.4"):
        judged(Making({"reference": 0.5, "onnxruntime": 0.4, "between": 1e-6}, {}))
    with pytest.raises(BadInput, match="no other runtime is here that can"):
        judged(Making({}, {"": FAILED, "onnxruntime": "Absent: not installed"}))
