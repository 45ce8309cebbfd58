"""Which answers of a built model are taken for right, and what is said where the reference is wrong
or has none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuna.errors import BadInput
from tuna_models.child_answers import ChildAnswer, Contenders, Plan
from tuna_models.judging.checks import Checked, Checks, judge
from tuna_models.limits import ModelLimits
from tuna_models.manifest import Precision
from tuna_models.work import checked_build
from tuna_models.work.checked_build import BuildFacts, Verdict
from tuna_models.work.model_job import MeasuredModel

PLAN = Plan(classes={}, functions={}, calls={}, places={}, refused_records={}, operations=0)
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
    with pytest.raises(
        BadInput, match=r"nor can onnxruntime, which is installed \(Fail: rows\)"
    ) as refused:
        judge("17", Checked({}, {}, unanswered=FAILED, rival_unanswered="Fail: rows"))
    assert refused.value.hint.startswith("correct that operator, or give inputs")


class Scene:
    """A build of which the answers of runtimes, and the outcomes of its jobs, are given."""

    limits = ModelLimits(memory_mib=1, cpu_s=1)

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        errors: dict[str, float],
        unanswered: dict[str, str] | None = None,
    ) -> None:
        self._errors, self._unanswered = errors, unanswered or {}
        self.asked: list[str] = []
        monkeypatch.setattr(checked_build, "measure", self._measured)

    def call(self, kind: type[ChildAnswer], op: str, *, by: str = "", **_: Any) -> ChildAnswer:
        """The child's answer."""
        if op == "difference":
            return kind(error=self._errors["between"])
        if op == "begin_answer":
            return kind()
        if op == "operators":
            return kind(sentence="The first operator that is wrong alone is Erf (e): so and so.")
        self.asked.append(by)
        return kind(unanswered=self._unanswered.get(by, ""), rule="equal")

    def _measured(self, _work: Any, _model: Any, _folder: Path, answers: Path, _: int) -> Any:
        error = self._errors[answers.stem]
        right, fault = error <= 1e-3, "" if error <= 1e-3 else f"y differs by {error}"
        figures = {"times_ms": [1.0], "time_ms": 1.0, "low_ms": 1.0, "high_ms": 1.0, "clock": "cpu"}
        facts = {"functions": answers.stem, "parts_ms": {}, "device": "", "noisy": False}
        return MeasuredModel(1, **figures, **facts, error=error, right=right, report=fault)

    def judged(self, folder: Path = Path("folder")) -> Verdict:
        """The verdict on the model's answer, of a build in the folder."""
        facts = {"opset": "17", "tasks": (), "inputs": (), "shapes": {}, "values": {}}
        known = {"in_fp32": (), "source": {}}
        manifest = SimpleNamespace(**facts, **known, precision=Precision.FP32)
        workspace = SimpleNamespace(file_of=lambda _: folder / "net.onnx")
        work = SimpleNamespace(workspace=workspace)
        build = SimpleNamespace(
            checks=Checks(), manifest=manifest, winograd=True, work=work, model=None
        )
        draft = checked_build._Draft(build, self, folder)  # type: ignore[arg-type]
        return draft.judged(PLAN)


def test_no_other_runtime_is_asked_where_the_reference_agrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch, {"reference": 1e-6})
    verdict = scene.judged()
    assert (scene.asked, verdict.measured.functions) == ([""], "reference")
    assert verdict.model_dump(exclude={"measured"}) == {
        "errors": {"reference": 1e-6},
        "remark": "",
        "rule": "equal",
        "tolerance": 1e-3,
        "quantised": 0,
        "report": "",
    }


def test_a_runtime_that_differs_from_a_right_model_is_said_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict = Scene(monkeypatch, {"reference": 1e-6}).judged()
    facts = BuildFacts(
        plan=PLAN,
        verdict=verdict.model_copy(update={"quantised": 2}),
        compared={},
        contenders=Contenders(errors={"onnxruntime": 0.0069}),
        made_at="",
    )
    assert facts.remark == (
        "the built model, right by its reference, differs from onnxruntime by 0.0069 of the largest"
        " value, as quantised models do from one runtime to the next"
    )
    assert facts.errors == {"reference": 1e-6, "onnxruntime": 0.0069}
    near = facts.model_copy(update={"contenders": Contenders(errors={"onnxruntime": 1e-4})})
    assert near.remark == ""


def test_a_build_that_begins_again_is_judged_by_the_answers_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has time for fewer inputs on a busy machine: the job was another one then."""
    monkeypatch.setenv("TUNA_HOME", str(tmp_path / "home"))
    judged_by = []

    class Timed(Scene):
        def call(self, kind: type[ChildAnswer], op: str, **arguments: Any) -> ChildAnswer:
            if op == "answer":
                Path(arguments["output"]).write_text(f"inputs of the build {len(judged_by)}")
            return super().call(kind, op, **arguments)

        def _measured(self, *given: Any) -> Any:
            judged_by.append(given[3].read_text())
            return super()._measured(*given)

    scene, rules = Timed(monkeypatch, {"reference": 1e-6}), set()
    for name in ("killed", "again"):
        (tmp_path / name).mkdir()
        rules.add(scene.judged(tmp_path / name).rule)
    assert (judged_by, scene.asked, rules) == (2 * ["inputs of the build 0"], [""], {"equal"})


@pytest.mark.parametrize("unanswered", [FAILED, ""])
def test_onnxruntime_is_asked_where_the_reference_has_no_answer_or_another(
    unanswered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"reference": 0.5, "onnxruntime": 1e-6, "between": 0.5}
    scene = Scene(monkeypatch, errors, {"": unanswered})
    verdict = scene.judged()
    assert (scene.asked, verdict.measured.functions) == (["", "onnxruntime"], "onnxruntime")
    assert verdict.remark.startswith("ONNX's reference evaluator")
    compared = {"onnxruntime"} if unanswered else {"reference", "onnxruntime"}
    assert verdict.errors.keys() == compared


def test_a_wrong_model_is_refused_whether_or_not_there_is_another_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = {"onnxruntime": "Absent: not installed"}
    with pytest.raises(BadInput, match=r"by 0\.5.* wrong alone is Erf \(e\): so and so\."):
        Scene(monkeypatch, {"reference": 0.5}, absent).judged()
    with pytest.raises(BadInput, match=r"by onnxruntime, which agrees with it, y differs by 0\.4"):
        Scene(monkeypatch, {"reference": 0.5, "onnxruntime": 0.4, "between": 1e-6}).judged()
    monkeypatch.setattr(checked_build, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match="no other runtime is here that can"):
        Scene(monkeypatch, {}, {"": FAILED, **absent}).judged()
