"""Right answers of a model: those of ONNX's reference, or of onnxruntime where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from nets import Net

from tuna.libraries.tvm import whole_models
from tuna.models import child, onnx_reference, runtimes


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """Arguments of `child.answer` for a small model."""
    net = Net((4, 9))
    onnx.save(net.model(net.relu("x")), tmp_path / "net.onnx")
    inputs = [{"name": "x", "shape": [4, 9], "dtype": "float32"}]
    given = {"inputs": inputs, "seed": 3, "recorded": ""}
    output = str(tmp_path / "answers.npz")
    return {
        "path": str(tmp_path / "net.onnx"),
        "shapes": {},
        "values": {},
        "given": given,
        "output": output,
    }


def test_the_answers_are_those_of_the_reference(asked: dict[str, Any]) -> None:
    assert child.answer(**asked, by="") == {"unanswered": ""}
    (x,), (y,) = whole_models.read_answers(asked["output"])
    assert np.array_equal(y, np.maximum(x, 0))
    problem = whole_models.problem(asked["output"])
    assert problem.error(problem.vector([y])) == 0
    added = problem.error(problem.vector([y + 2e-3]))
    assert added == pytest.approx(2e-3 / (y.max() + 1e-3), rel=1e-3)
    assert problem.error(problem.vector([np.full_like(y, np.nan)])) == float("inf")
    with pytest.raises(ValueError, match="answers with tensors of the shapes"):
        problem.vector([y, y])


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
    assert child.answer(**asked, by="onnxruntime") == {"unanswered": ""}
    other = str(Path(asked["output"]).with_name("other.npz"))
    whole_models.write_answers(Path(other), [right], [right + 0.5])
    found = child.difference(found=asked["output"], expected=other)
    assert found["error"] == pytest.approx(0.5 / 1.501)
