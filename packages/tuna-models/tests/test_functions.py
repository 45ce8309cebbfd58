"""Functions without a core get a schedule that computes the same."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from compiled import HERE, TARGET
from tvm import te, tirx, topi
from tvm.s_tir.meta_schedule.arg_info import ArgInfo

from tuna.configs.task import DEFINITIONS
from tuna.libraries.task_reference import FUNCTIONS
from tuna.libraries.tvm import function_costs, functions
from tuna.libraries.tvm.kernels import epilogue, machine
from tuna.libraries.tvm.kernels.epilogue import TIR
from tuna_models.compiler import blocked

#: NumPy's definition of each activation of a value alone
RIGHT = {name: functools.partial(one, FUNCTIONS) for name, one in DEFINITIONS.items()}


def target(cores: int = 1) -> Any:
    return tvm.target.Target({**HERE, "num-cores": cores})


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


def instance_norm(*size: int) -> Any:
    given, scale, shift = x(2, 3, *size), te.placeholder((3,), name="G"), te.placeholder((3,))
    made = topi.nn.instance_norm(given, scale, shift, 1, [2, 3], 1e-5)
    return function([given, scale, shift, made])


def group_norm(*size: int) -> Any:
    given, scale, shift = x(1, 6, *size), te.placeholder((6,), name="G"), te.placeholder((6,))
    made = topi.nn.group_norm(given, scale, shift, 2, 1, [2, 3], 1e-5)
    return function([given, scale, shift, made])


def applied(operator: Any, *shape: int, **options: Any) -> Any:
    given = x(*shape)
    return function([given, operator(given, **options)])


def gated(*places: int) -> Any:
    """Channels in blocks times a sigmoid for each."""
    given, gate = x(1, 3, *places, 16), te.placeholder((1, 3, 1, 1, 16), name="G")
    return function([given, gate, topi.multiply(given, topi.sigmoid(topi.divide(gate, 3.0)))])


CASES = {
    "gates": (lambda: gated(9, 8), "vectorized"),
    "softmax": (lambda: softmax(2, 3, 64), "vectorized"),
    "softmax of channels": (lambda: softmax(1, 5, 4, 16, axis=1), "vectorized"),
    "softmax of an odd row": (lambda: softmax(3, 7), ""),
    "layer norm": (lambda: normalised(64), "vectorized"),
    "mean": (lambda: applied(topi.sum, 1, 4, 4, 64, axis=[2, 3]), "vectorized"),
    "of rows that are not neighbours": (
        lambda: applied(topi.max, 64, 4, 64, axis=[0]),
        "vectorized",
    ),
    "softmax of 37 values": (lambda: softmax(2, 3, 37), "vectorized"),
    "softmax of channels of 21 values": (lambda: softmax(1, 5, 3, 21, axis=1), "vectorized"),
    "layer norm of 50 values": (lambda: normalised(50), "vectorized"),
    "instance norm": (lambda: instance_norm(9, 11), "vectorized"),
    "group norm": (lambda: group_norm(8, 8), "vectorized"),
    "mean of planes": (lambda: applied(topi.sum, 2, 3, 9, 11, axis=[2, 3]), "vectorized"),
    "minimum of 49 values": (lambda: applied(topi.min, 7, 49, axis=[1]), "vectorized"),
    "product of 130 values": (lambda: applied(topi.prod, 7, 130, axis=[1]), "vectorized"),
    "of 300 rows of 50": (lambda: applied(topi.max, 2, 300, 50, axis=[1]), "vectorized"),
    "of 300 rows of 3": (lambda: applied(topi.sum, 2, 300, 3, axis=[1]), ""),
    "of every other row": (lambda: applied(topi.sum, 4, 16, 40, axis=[0, 2]), "vectorized"),
    "tanh": (lambda: applied(topi.tanh, 3, 5, 7), ""),
    "tanh of 21 values": (lambda: applied(topi.tanh, 3, 21), "vectorized"),
    "transpose": (lambda: applied(topi.transpose, 2, 3, 32, axes=(1, 0, 2)), "vectorized"),
}


@pytest.mark.parametrize(("places", "stages"), [((9, 8), 2), ((3, 5), 1)])
def test_few_values_that_many_read_are_computed_once(places: Any, stages: int) -> None:
    sch = functions.schedule(gated(*places), machine.from_target(target()))
    assert sch is not None
    assert len(sch.get_child_blocks(sch.get_sblock("root"))) == stages


def test_few_values_that_follow_from_a_reduction_are_computed_behind_it() -> None:
    sch = functions.schedule(instance_norm(9, 11), machine.from_target(target()))
    assert sch is not None
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        assert not functions._is_repeated(sch, block)


ODD = np.array([np.inf, -np.inf, np.nan, 0.0, 100.0, -200.0, 88.5, -5.0], np.float32)


def of_odd_values(function: Any, values: Any) -> Any:
    """Its answer, scheduled by rule, to values that are not finite or whose powers are not."""
    sch = functions.schedule(function, machine.from_target(target()))
    made = functions.in_vectors(function if sch is None else sch.mod["main"])
    (shape, kind) = functions._arguments(tvm.IRModule({"main": function}))[-1]
    found = tvm.runtime.tensor(np.zeros(shape, kind))
    run = tvm.tirx.build(tvm.IRModule({"main": made}), target=target())["main"]
    run(tvm.runtime.tensor(values), found)
    return found.numpy()


@pytest.mark.parametrize("size", [len(ODD), 64], ids=["alone", "in vectors"])
@pytest.mark.parametrize(
    ("operator", "right"),
    [
        (topi.exp, np.exp),
        (topi.sigmoid, RIGHT["sigmoid"]),
        (topi.tanh, np.tanh),
        (topi.erf, np.vectorize(math.erf)),
        (topi.nn.relu, RIGHT["relu"]),
        (lambda x: topi.clip(x, -1.0, 6.0), lambda x: np.clip(x, -1.0, 6.0)),
        (lambda x: topi.maximum(x, -x), lambda x: np.maximum(x, -x)),
    ],
    ids=["exp", "sigmoid", "tanh", "erf", "relu", "clip", "maximum"],
)
def test_infinite_values_and_nan_are_treated_as_by_ieee(
    operator: Any, right: Any, size: int
) -> None:
    values = np.resize(ODD, size)
    with np.errstate(all="ignore"):
        expected = right(values.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(
        of_odd_values(applied(operator, size), values), expected, rtol=3e-7, atol=1e-38
    )


@pytest.mark.parametrize("size", [7, 64])
def test_softmax_of_infinite_values_is_that_of_ieee(size: int) -> None:
    rows = np.random.default_rng(0).standard_normal((5, size)).astype(np.float32)
    rows[0], rows[1, 1:3], rows[2, 0], rows[3, 0] = -np.inf, -np.inf, np.nan, np.inf
    rows[4, 0] = rows[4].max() + 95.0
    with np.errstate(all="ignore"):
        powers = np.exp(rows.astype(np.float64) - rows.max(axis=-1, keepdims=True))
        expected = powers / powers.sum(axis=-1, keepdims=True)
    found = of_odd_values(softmax(5, size), rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-44)
    assert np.isfinite(np.log(found[4])).all(), "as far as -103"


def test_a_maximum_over_infinite_values_is_infinite() -> None:
    rows = np.full((2, 32), -np.inf, np.float32)
    assert np.all(of_odd_values(applied(topi.max, 2, 32, axis=[1]), rows) == -np.inf)
    assert np.all(of_odd_values(applied(topi.min, 2, 32, axis=[1]), -rows) == np.inf)


def test_pooling_in_blocks_keeps_infinite_values_and_nan() -> None:
    extents, pool = (1, 1, 6, 6, 8), blocked.Pooling((3, 3), (1, 1), (1, 1, 1, 1))
    x = np.full(extents, -np.inf, np.float32)
    x[0, 0, 0, 0, 1], x[0, 0, 5, 5, 1] = np.nan, 2.0
    function = blocked.max_pool(extents, (6, 6), pool).with_attr("global_symbol", "main")
    found = tvm.runtime.tensor(np.zeros(extents, np.float32))
    run = tvm.tirx.build(tvm.IRModule({"main": function}), target=target())["main"]
    run(tvm.runtime.tensor(x), found)
    expected = np.full(extents, -np.inf, np.float32)
    expected[0, 0, :2, :2, 1], expected[0, 0, 4:, 4:, 1] = np.nan, 2.0
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("name", RIGHT)
def test_an_epilogue_keeps_infinite_values_and_nan(name: str) -> None:
    given = te.placeholder((len(ODD),), name="X")
    made = te.compute((len(ODD),), lambda i: TIR[name](given[i]), name="Y")
    run = tvm.tirx.build(tvm.IRModule({"main": function([given, made])}), target=target())["main"]
    found = tvm.runtime.tensor(np.zeros(len(ODD), np.float32))
    run(tvm.runtime.tensor(ODD), found)
    with np.errstate(all="ignore"):
        expected = RIGHT[name](ODD.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(found.numpy(), expected, rtol=3e-7, atol=3e-7)


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


@pytest.mark.parametrize(
    ("name", "cores"), [*((name, 2) for name in CASES), ("softmax", 1), ("mean", 1)]
)
def test_a_function_with_a_schedule_answers_as_without_one(
    name: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_REGION_CYCLES", 0.0)
    plain, sign = CASES[name][0](), CASES[name][1]
    sch = functions.schedule(plain, machine.from_target(target(cores)))
    assert sch is not None
    made = functions.in_vectors(sch.mod["main"])
    text = str(made.script())
    assert sign in text
    assert "T.where" not in text, "a condition on each value"
    assert ("T.parallel" in text) == (cores > 1)
    expected = answer(plain, tvm.target.Target(TARGET))
    error = np.abs(answer(made, target(cores)) - expected).max()
    assert error < 1e-6 * (np.abs(expected).max() + 1)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3, 20011), [1]), ((2, 3, 141, 142), [2, 3]), ((3137, 16), [0]), ((3137, 3), [0])],
    ids=["neighbours", "planes", "rows", "rows of few"],
)
def test_sums_of_many_values_are_as_close_as_those_of_blocks(
    shape: tuple[int, ...], axes: list[int]
) -> None:
    values = np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32)
    right = values.sum(axis=tuple(axes), dtype=np.float64)
    found = of_odd_values(applied(topi.sum, *shape, axis=axes), values)
    assert np.abs(found / right - 1).max() < 3e-7


def test_a_global_average_in_blocks_is_as_close_as_sums_of_blocks() -> None:
    extents = (1, 2, 56, 57, 16)
    values = np.random.default_rng(0).uniform(0, 1, extents).astype(np.float32)
    function = blocked.global_average(extents, 32).with_attr("global_symbol", "main")
    found = tvm.runtime.tensor(np.zeros((1, 32, 1, 1), np.float32))
    run = tvm.tirx.build(tvm.IRModule({"main": function}), target=target())["main"]
    run(tvm.runtime.tensor(values), found)
    right = values.mean(axis=(2, 3), dtype=np.float64).reshape(1, 32, 1, 1)
    assert np.abs(found.numpy() / right - 1).max() < 4e-7


def test_a_reshape_and_what_has_no_schedule_stay_as_they_are() -> None:
    here = machine.from_target(target())
    assert functions.schedule(applied(topi.reshape, 2, 6, newshape=(3, 4)), here) is None
    assert functions.schedule(applied(topi.cumsum, 2, 64, axis=1), here) is None


def test_exp_becomes_arithmetic_for_fp32_alone() -> None:
    assert "T.exp(" not in str(functions.in_vectors(softmax(2, 8)).script())
    given = te.placeholder((4,), name="X", dtype="float64")
    assert "T.exp(" in str(functions.in_vectors(function([given, topi.exp(given)])).script())


def test_rounding_is_in_vectors() -> None:
    """TVM's vectors have no `nearbyint`: the whole loop would be one of single values."""
    made = functions.in_vectors(applied(topi.round, 2, 64))
    assert "llvm.nearbyint" in str(made.script())
    values = np.resize(np.float32([0.5, 1.5, -0.5, -2.5, 2.4999998, 1e9]), (2, 64))
    assert np.array_equal(of_odd_values(made, values), np.rint(values))


def test_padding_that_is_rounded_to_bfloat16_is_in_vectors() -> None:
    padded = topi.reshape(topi.nn.pad(x(1, 438), [0, 127], [0, 128]), (1, 1, 693))
    answer = te.compute(padded.shape, lambda *at: epilogue.rounded(padded[at], "bfloat16"))
    given = padded.op.input_tensors[0].op.input_tensors[0]
    sch = functions.schedule(function([given, answer]), machine.from_target(target()))
    assert sch is not None
    assert "vectorized" in str(sch.mod.script())
    run = tvm.tirx.build(sch.mod, target=target())["main"]
    values = np.random.default_rng(0).standard_normal((1, 438)).astype(np.float32)
    made = tvm.runtime.tensor(np.full((1, 1, 693), 1, ml_dtypes.bfloat16))
    run(tvm.runtime.tensor(values), made)
    right = np.pad(values, ((0, 0), (127, 128))).astype(ml_dtypes.bfloat16)
    assert np.array_equal(made.numpy(), right[None])


def test_exp_of_truth_values_is_in_vectors() -> None:
    made = applied(lambda given: topi.exp(topi.cast(topi.greater(given, 0.0), "float32")), 2, 64)
    values = np.resize(ODD, (2, 64))
    right = np.where(values > 0, np.float32(np.e), 1)
    np.testing.assert_allclose(of_odd_values(made, values), right, rtol=3e-7)


def most_names_within_another(found: Any) -> int:
    counts = [0]
    tvm_ffi.structural_walk(
        found.body, (tirx.Let, lambda node: counts.append(len(functions._names(node.value))))
    )
    return max(counts)


@pytest.mark.parametrize("inlined", [False, True])
def test_functions_of_functions_have_few_names_within_each_other(*, inlined: bool) -> None:
    given = x(4, 64)
    if inlined:  # as a search of TVM's makes it
        found = te.compute(given.shape, lambda *at: chained(given[at], tirx.sigmoid))
    else:
        found = chained(given, topi.sigmoid)
    plain = function([given, found])
    sch = functions.schedule(plain, machine.from_target(target()))
    assert sch is not None
    made = functions.in_vectors(sch.mod["main"])
    one = functions._names(functions.in_vectors(applied(topi.sigmoid, 4, 64)).body)
    assert 0 < most_names_within_another(made) <= len(one)
    assert np.abs(answer(made, target()) - answer(plain, target())).max() < 1e-6


def chained(value: Any, operator: Any) -> Any:
    for _ in range(12):
        value = operator(value)
    return value


@pytest.mark.parametrize(("rows", "shared"), [(2, False), (2000, True)])
def test_cores_share_what_takes_long_alone(rows: int, shared: bool) -> None:
    plain = softmax(rows, 48)
    sch = functions.schedule(plain, machine.from_target(target(2)))
    assert sch is not None
    made = functions.in_vectors(sch.mod["main"])
    assert ("T.parallel" in str(made.script())) == shared
    assert np.array_equal(answer(made, target(2)), answer(functions.in_sequence(made), target()))


def test_a_table_counts_as_the_rows_that_are_read() -> None:
    table, ids = x(30_000, 64), te.placeholder((8,), "int64", "I")
    cost = function_costs.of_function(function([table, ids, topi.take(table, ids, axis=0)]))
    assert cost.moved_bytes == 8 * 8 + 2 * 8 * 64 * 4
