"""Recurrent layers whose rows have lengths of their own, known when compiling or an input."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from compiled import TARGET, planned
from test_operators import answers, of_onnxruntime, same
from test_recurrent import BOTH, recurrent

from tuna_models.compiler.program import machine_of
from tuna_models.judging import bounds
from tuna_models.reading import importer, onnx_reference

CASES: list[dict[str, Any]] = [
    {"kind": "LSTM", "peepholes": True, **BOTH},
    {"kind": "LSTM", "states": "", "direction": "reverse"},
    {"kind": "GRU", "linear_before_reset": 1, **BOTH},
    {"kind": "RNN", "direction": "reverse"},
]


def ragged(case: dict[str, Any], lengths: list[int], **more: Any) -> tuple[Any, dict[str, Any]]:
    """A layer whose lengths, and all else, are inputs."""
    return recurrent(**case, batch=len(lengths), lengths=lengths, trained="inputs", **more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-{len(case)}")
def test_lengths_of_sequences_may_be_an_input(case: dict[str, Any]) -> None:
    model, given = ragged(case, [5, 1, 3])
    main = machine_of(planned(model), tvm.target.Target(TARGET))["main"]

    def run() -> list[Any]:
        return [value.numpy() for value in main(*map(tvm.runtime.tensor, given.values()))]

    right = of_onnxruntime(model, given)  # of RNN it is up to 7e-7 off itself
    same(run(), right, 3e-6)
    same(onnx_reference.run(model, given), right, 3e-6)
    # onnxruntime has no row of no steps; a length beyond the sequence is the sequence's
    given["lengths"] = np.array([0, 9, 4], np.int32)
    within = {**given, "lengths": np.array([0, 5, 4], np.int32)}
    same(run(), onnx_reference.run(model, within), 3e-6)


def test_known_lengths_are_those_of_the_reference_too() -> None:
    model, given = recurrent("GRU", lengths=[2, 0], layout=0, **BOTH)
    same(answers(model, given), onnx_reference.run(model, given), 1e-6)
    model, given = recurrent("LSTM", lengths=[2, 5], layout=1)
    same(answers(model, given), onnx_reference.run(model, given), 1e-6)


def test_drawn_lengths_are_from_one_step_to_the_whole_sequence() -> None:
    model, _ = ragged(CASES[0], [5, 1, 3])
    drawn = {value["name"]: value for value in bounds.of(importer.to_relax(model, "net"))}
    assert drawn["lengths"]["bounds"] == (1, 5)
    assert drawn["x"]["bounds"] is None


def test_a_reference_without_lengths_is_that_of_onnx() -> None:
    model, given = recurrent("LSTM", **BOTH)
    right = onnx_reference.ReferenceEvaluator(model).run(None, given)
    same(onnx_reference.run(model, given), right, 0.0)


def test_free_offsets_of_buffers_are_numbered_in_the_order_of_their_use() -> None:
    """TVM's own numbers differ from process to process, and with them a model's version."""
    model, _ = recurrent("LSTM", **BOTH)
    text = planned(model).text
    used = re.findall(r"elem_offset=(\w+)", text)
    assert [*dict.fromkeys(used)] == re.findall(r"(\w+) = TypeVar", text) != []
