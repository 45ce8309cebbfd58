"""Functions without a core get a schedule that computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, topi
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.target import codegen

from tuna.libraries.tvm import functions
from tuna.libraries.tvm.kernels import machine


def target(cores: int = 1) -> Any:
    return tvm.target.Target(
        {"kind": "llvm", "mcpu": str(codegen.llvm_get_system_cpu()), "num-cores": cores}
    )


def function(arguments: list[Any]) -> Any:
    made = te.create_prim_func(arguments, index_dtype_override="int64").with_attr(
        "global_symbol", "main"
    )
    return made.with_attr("tirx.noalias", True)


def x(*shape: int) -> Any:
    return te.placeholder(shape, name="X")


def softmax(*shape: int, axis: int = -1) -> Any:
    given = x(*shape)
    return function([given, topi.nn.softmax(given, axis=axis)])


def normalised(size: int) -> Any:
    given, scale, shift = (
        x(2, 3, size),
        te.placeholder((size,), name="G"),
        te.placeholder((size,), name="B"),
    )
    return function([given, scale, shift, topi.nn.layer_norm(given, scale, shift, [2], 1e-5)])


def applied(operator: Any, *shape: int, **options: Any) -> Any:
    given = x(*shape)
    return function([given, operator(given, **options)])


CASES = {
    "softmax": (lambda: softmax(2, 3, 64), "vectorized"),
    "softmax of channels": (lambda: softmax(1, 5, 4, 16, axis=1), "vectorized"),
    "softmax of an odd row": (lambda: softmax(3, 7), ""),
    "layer norm": (lambda: normalised(64), "vectorized"),
    "mean": (lambda: applied(topi.sum, 1, 4, 4, 64, axis=[2, 3]), "vectorized"),
    "of rows that are not neighbours": (
        lambda: applied(topi.max, 64, 4, 64, axis=[0]),
        "vectorized",
    ),
    "tanh": (lambda: applied(topi.tanh, 3, 5, 7), ""),
    "transpose": (lambda: applied(topi.transpose, 2, 3, 32, axes=(1, 0, 2)), "vectorized"),
}


def answer(function: Any, given: Any) -> Any:
    facts = ArgInfo.from_entry_func(tvm.IRModule({"main": function}), remove_preproc=True)
    generator = np.random.default_rng(3)
    tensors = [
        tvm.runtime.tensor(
            generator.standard_normal([int(n) for n in fact.shape]).astype(fact.dtype)
        )
        for fact in facts
    ]
    tvm.tirx.build(tvm.IRModule({"main": function}), target=given)["main"](*tensors)
    return tensors[-1].numpy()


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_function_with_a_schedule_answers_as_without_one(name: str, cores: int) -> None:
    plain, sign = CASES[name][0](), CASES[name][1]
    sch = functions.schedule(plain, machine.from_target(target(cores)))
    assert sch is not None
    found = sch.mod["main"]
    text = str(found.script())
    assert sign in text
    assert ("T.parallel" in text) == (cores > 1)
    expected = answer(plain, target())
    assert np.abs(answer(functions.in_vectors(found), target(cores)) - expected).max() < 1e-6 * (
        np.abs(expected).max() + 1
    )


def test_a_reshape_and_what_has_no_schedule_stay_as_they_are() -> None:
    here = machine.from_target(target())
    assert functions.schedule(applied(topi.reshape, 2, 6, newshape=(3, 4)), here) is None
    assert functions.schedule(applied(topi.argmax, 2, 64, axis=-1), here) is None


def test_exp_becomes_arithmetic_for_fp32_alone() -> None:
    assert "T.exp(" not in str(functions.in_vectors(softmax(2, 8)).script())
    given = te.placeholder((4,), name="X", dtype="float64")
    assert "T.exp(" in str(functions.in_vectors(function([given, topi.exp(given)])).script())
