"""Right answers of a model: those of ONNX's reference, or of onnxruntime where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from compiled import TARGET, check, write_answers
from nets import Net
from onnx import TensorProto

from tuna.libraries.tvm import model_answers
from tuna.libraries.tvm.model_answers import Run
from tuna_models import child
from tuna_models.judging import edges, inputs, runtimes
from tuna_models.reading import onnx_reference


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """Arguments of `child.answer` for a small model."""
    net = Net((4, 9))
    onnx.save(net.model(net.relu("x")), tmp_path / "net.onnx")
    inputs = [{"name": "x", "shape": [4, 9], "dtype": "float32"}]
    given = {"inputs": inputs, "seed": 3, "recorded": ""}
    output = str(tmp_path / "answers.npz")
    return {
        "model": {"path": str(tmp_path / "net.onnx"), "shapes": {}, "values": {}},
        "given": given,
        "output": output,
    }


def answered(path: Any) -> model_answers.Case:
    return model_answers.Answers.read(Path(path)).cases[0]


def test_the_answers_are_those_of_the_reference(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = child.answer(**asked, by="")
    known = {"unanswered": "", "rule": RULE, "tolerance": 1e-3, "quantised": 0, "promise": None}
    assert verdict == known
    monkeypatch.setattr(edges, "_LONG_S", -1.0)  # from here on with random inputs alone
    child.answer(**asked, by="")
    case = answered(asked["output"])
    (x,), (y,) = case.inputs, (answer.values for answer in case.outputs)
    assert np.array_equal(y, np.maximum(x, 0))
    problem = model_answers.problem(asked["output"])
    assert problem.error([Run([y])]) == 0
    assert problem.report([Run([y])]) == ""
    wrong = [Run([y + np.float32(2e-3)])]
    assert problem.error(wrong) == pytest.approx(2e-3 / (y.max() + 1e-3), rel=1e-3)
    assert problem.report([Run([np.full_like(y, np.nan)])]) == (
        "the output v0 has infinities or NaN in other places than it should"
    )
    for others in ([Run([y, y])], [Run([])]):
        assert problem.error(others) == float("inf")
        assert "outputs and should return 1" in problem.report(others)


def test_an_input_of_no_axes_is_given_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's ascontiguousarray gives it an axis, which the built model refuses."""
    monkeypatch.chdir(tmp_path)
    net = Net((3,))
    y = net.add("Mul", "x", "factor")
    given = [("x", TensorProto.FLOAT, [3]), ("factor", TensorProto.FLOAT, [])]
    model = net.model(y, inputs=given)
    problem, runs = check(tmp_path, TARGET, model, model)
    assert problem.inputs[1].shape == ()
    assert problem.error(runs) < 1e-6
    recorded = tmp_path / "recorded.npz"
    np.savez(recorded, x=np.ones(3, np.float32), factor=np.float32(2))
    wanted = [
        {"name": "x", "shape": [3], "dtype": "float32"},
        {"name": "factor", "shape": [], "dtype": "float32"},
    ]
    assert inputs.read(wanted, recorded)["factor"].shape == ()


INPUTS = "random, silent, extreme, lowest, sparse, highest and large inputs"
RULE = f"v0 (float32) to 0.001 of its largest value; on {INPUTS}"


def test_a_reference_that_fails_says_why_and_a_runtime_answers_in_its_place(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise np.exceptions.AxisError(3, 3)

    monkeypatch.setattr(onnx_reference, "run", fail)
    unanswered = child.answer(**asked, by="")["unanswered"]
    assert unanswered.startswith("AxisError: axis 3 is out of bounds")
    assert not Path(asked["output"]).exists()
    right = np.ones((4, 9), np.float32)
    known = {"onnxruntime": lambda *_: [lambda: [right]]}
    monkeypatch.setattr(runtimes, "ALL", known)
    assert child.answer(**asked, by="onnxruntime")["unanswered"] == ""
    other = str(Path(asked["output"]).with_name("other.npz"))
    write_answers(Path(other), [right], [right + 0.5])
    found = child.difference(found=asked["output"], expected=other)
    assert found["error"] == pytest.approx(0.5 / 1.501)
