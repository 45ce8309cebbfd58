"""References of tasks of bytes and of bfloat16, against their definition written out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tuna.configs import ConvConfig, GemmConfig, TaskConfig
from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries import reference

CONV = ConvConfig(1, 3, 6, 5, 4, 3, 3, 1, 1, data_type=DataType.INT8)
PRODUCT = GemmConfig(m=7, n=5, k=9, data_type=DataType.INT8)
TWICE = ("dequantize", "quantize", "residual", "quantize")


def problem_of(core: ConvConfig | GemmConfig, *epilogue: str) -> reference.Problem:
    return reference.make(TaskConfig(core=core, layouts="native", epilogue=epilogue), 3)


def sums(x: Any, w: Any, padding: int) -> Any:
    """The convolution's, one product after the other."""
    _, rows, columns = x.shape[1:]
    found = np.zeros((1, 4, rows, columns), np.int64)
    padded = np.full((3, rows + 2, columns + 2), padding)
    padded[:, 1:-1, 1:-1] = x[0]
    for k, h, v in np.ndindex(4, rows, columns):
        for c, r, s in itertools.product(range(3), repeat=3):
            found[0, k, h, v] += int(padded[c, h + r, v + s]) * int(w[k, c, r, s])
    return found


def test_bytes_are_summed_exactly_and_padded_with_the_zero_point() -> None:
    problem = problem_of(CONV, "dequantize")
    x, w, start, factor, offset, scalars = problem.inputs
    kinds = [str(array.dtype) for array in problem.inputs]
    assert kinds == ["uint8", "int8", "int32", "float32", "float32", "float32"]
    of_channel = (slice(None), *(np.newaxis,) * 2)
    found = sums(x, w, int(scalars[0])) + start[of_channel]
    found = found * factor[of_channel] + offset[of_channel]
    np.testing.assert_array_equal(problem.expected, found)
    assert (problem.answer_type, problem.tolerance) == ("float32", 0.0)
    plain = problem_of(CONV)
    np.testing.assert_array_equal(plain.expected, sums(*plain.inputs, 0))
    assert (plain.answer_type, plain.tolerance) == ("int32", 0.0)


def test_a_sum_of_two_quantized_tensors_is_rounded_twice() -> None:
    problem, real = problem_of(CONV, *TWICE), problem_of(CONV, "dequantize").expected
    *_, scalars, other = problem.inputs
    low, high, _, first, second, offset, least, most, zero = scalars[1:].astype(float)
    once = np.clip(np.rint(real), low, high)
    twice = np.rint(once * first + other * second + offset)
    np.testing.assert_array_equal(problem.expected, np.clip(twice, least, most) + zero)
    assert (problem.answer_type, other.dtype, problem.tolerance) == ("uint8", np.uint8, 0.0)
    ties = once * first + other * second + offset
    assert (ties % 1 == 0.5).any(), "some are half way between two numbers"
    assert len(np.unique(problem.expected)) > 20


@pytest.mark.parametrize("core", [CONV, PRODUCT])
def test_fp32_computes_a_task_of_bytes_without_rounding(core: ConvConfig | GemmConfig) -> None:
    """So that a kernel, which has no more digits, can be asked for the exact answer."""
    for parts in (("relu", "residual"), ("residual",), ("quantize",)):
        problem = problem_of(core, "dequantize", *parts)
        assert problem.tolerance == 0.0
        factor, offset = problem.inputs[3:5]
        np.testing.assert_array_equal(np.log2(factor) % 1, 0.0)
        np.testing.assert_array_equal(offset / factor % 1, 0.0)


def test_one_step_is_forgiven_only_where_a_function_is_not_exact() -> None:
    exact, rounded = (
        problem_of(PRODUCT, "dequantize", function, "quantize") for function in ("relu", "silu")
    )
    for problem, steps in ((exact, 0), (rounded, 1)):
        answer = problem.expected.astype(np.uint8)
        answer.flat[3] += steps
        assert problem.error(answer) <= problem.tolerance
        answer.flat[3] += 1
        assert problem.error(answer) > problem.tolerance


def test_no_byte_of_an_unwritten_answer_is_right() -> None:
    problem = problem_of(CONV, "dequantize", "quantize")
    assert (problem.blank() != problem.expected).all()


def test_what_bf16_adds_is_fp32_by_channel_and_bf16_by_value() -> None:
    core = replace(CONV, data_type=DataType.BF16)
    problem, wide = (
        problem_of(core, "bias", "residual", "relu", *cast) for cast in ((), ("to_fp32",))
    )
    kinds = [str(array.dtype) for array in problem.inputs]
    assert kinds == ["bfloat16", "bfloat16", "float32", "bfloat16"]
    assert (problem.answer_type, wide.answer_type) == ("bfloat16", "float32")
    assert wide.tolerance == problem.tolerance == reference.TOLERANCE[DataType.BF16]
    np.testing.assert_array_equal(problem.expected, wide.expected)


@pytest.mark.parametrize(
    "core",
    [
        replace(CONV, direction="B"),
        replace(PRODUCT, scale_a="tensor"),
    ],
)
def test_a_task_of_bytes_without_a_definition_is_refused(core: ConvConfig | GemmConfig) -> None:
    with pytest.raises(BadInput, match="has no reference"):
        problem_of(core, "dequantize")
