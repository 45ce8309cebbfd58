"""Models of which the check can say little: their answers are not finite, there are none, or they
call no function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compiled
import numpy as np
import pytest
from test_broken_models import ADD, filled, made, node

from tuna.errors import BadInput
from tuna_models import child
from tuna_models.judging import not_finite, right_answers
from tuna_models.reading import onnx_reference

ONES = {"x": filled(2, 3)}
#: Models without a finite answer to ones, and where that comes from.
NOT_FINITE = {
    "a constant": (
        made(node("Relu", "x", "a"), node("MatMul", "a w"), w=np.full((3, 4), np.nan, np.float32)),
        "NaN, on random inputs, and agree with whatever is built: MatMul (n) reads the constant"
        " 'w', of which 12 of 12 values are NaN.",
        "the weights are damaged",
    ),
    "infinite ones": (
        made(node("Mul", "x w"), w=np.full(3, -np.inf, np.float32)),
        "infinite, on random inputs, and agree with whatever is built: Mul (n) reads the constant"
        " 'w', of which 3 of 3 values are infinite.",
        "the weights are damaged",
    ),
    "an operator": (
        made(node("Neg", "x", "a"), node("Sqrt", "a", "b"), node("Relu", "b")),
        "NaN, on random inputs, and agree with whatever is built: Sqrt (n) makes NaN of finite"
        " numbers.",
        "--input FILE.npz",
    ),
}


@pytest.mark.parametrize(("model", "reason", "advice"), NOT_FINITE.values(), ids=list(NOT_FINITE))
def test_answers_without_a_finite_value_are_refused_with_their_origin(
    model: Any, reason: str, advice: str
) -> None:
    with np.errstate(all="ignore"):
        right = right_answers.of(model, ONES, 1e-3).outputs
    with pytest.raises(BadInput) as refused:
        not_finite.refuse("net.onnx", model, ONES, right, "random inputs")
    assert str(refused.value) == f"All answers of net.onnx are {reason}"
    assert advice in refused.value.hint


def test_answers_of_which_some_are_nan_are_built_and_said_to_be() -> None:
    model = made(ADD, w=np.array([1, np.nan, 2], np.float32))
    right = right_answers.of(model, ONES, 1e-3).outputs
    not_finite.refuse("net.onnx", model, ONES, right, "random inputs")
    assert "NaN in 33.33% of its places; on" in right_answers.line(
        right, 1e-3, "", 0, "random inputs"
    )
    mask = made(node("Relu", "x"), outputs="w", w=np.full(3, -np.inf, np.float32))
    not_finite.refuse(
        "net.onnx", mask, ONES, right_answers.of(mask, ONES, 1e-3).outputs, "random inputs"
    )


def test_a_model_that_calls_nothing_is_compiled(tmp_path: Path) -> None:
    target = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}
    model = made(node("Identity", "x"))
    plan = compiled.planned(model, target=target)
    assert not plan.calls
    assert compiled.write(plan, target, tmp_path).stat().st_size


def test_an_operator_that_the_reference_does_not_compute_is_named() -> None:
    model = made(node("DepthToSpace", "x", blocksize=2), x=(1, 3, 8, 8))
    with pytest.raises(onnx_reference.ReferenceFault) as refused:
        onnx_reference.run(model, {"x": filled(1, 3, 8, 8)})
    assert str(refused.value).startswith("the operator DepthToSpace (n): cannot reshape array of")
    assert child._reason(refused.value) == str(refused.value)
    text = "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Conv node."
    found = child._reason(RuntimeError(f"{text} Name:'c' Status Message: kernels differ"))
    assert found == "the operator Conv (c): kernels differ"
    assert child._reason(ValueError("[ONNXRuntimeError] : 2 : FAIL : rows")) == "ValueError: rows"
