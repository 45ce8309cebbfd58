"""Kernels of bytes answer as the reference to the last digit, those of bfloat16 within its
rounding, whatever the layer, the epilogue, the CPU and the point."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_kernels import TUNED, convolutions, target_of
from tvm_bench import Bench

tvm = pytest.importorskip("tvm", reason="TVM is not installed: pip install '.[tvm]'")
from tvm.target import codegen

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig, from_json
from tuna.configs.task import (
    ACTIVATIONS,
    DEQUANTIZE,
    QUANTIZE,
    RELU,
    RELU6,
    RESIDUAL,
    WEIGHT_ZERO,
)
from tuna.configs.values import DataType
from tuna.libraries import reference
from tuna.libraries.base import Environment
from tuna.libraries.tvm import problems, schedules, solvers, toolchain
from tuna.libraries.tvm.kernels import gemm, machine
from tuna.libraries.tvm.kernels.families import FAMILIES
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.signature import packing_for
from tuna.libraries.tvm.library import TvmLibrary
from tuna.libraries.tvm.problems import FamilyProblem

#: CPUs, and LLVM's feature of each that others have not: for each type an instruction of each width
CPUS = {
    "haswell": "avx2",
    "alderlake": "avxvnni",
    "skylake-avx512": "avx512bw",
    "cooperlake": "avx512bf16",
}
PLAIN = st.sampled_from([(), (RELU,), (RESIDUAL, RELU), (RESIDUAL,), (RELU, RESIDUAL)])
OF_BYTES = st.one_of(
    st.just(()),
    st.tuples(st.sampled_from([(), (WEIGHT_ZERO,)]), PLAIN, st.sampled_from([(), (QUANTIZE,)])).map(
        lambda p: (*p[0], DEQUANTIZE, *p[1], *p[2])
    ),
    st.just((DEQUANTIZE, QUANTIZE, RESIDUAL, QUANTIZE)),
    st.sampled_from([RELU6, *ACTIVATIONS]).map(lambda name: (DEQUANTIZE, name)),
)
OF_BF16 = st.tuples(
    st.sampled_from([(), ("bias",)]),
    st.one_of(PLAIN, st.sampled_from(ACTIVATIONS).map(lambda name: (name,))),
    st.sampled_from([(), ("to_fp32",)]),
).map(lambda p: (*p[0], *p[1], *p[2]))


@functools.cache
def runnable() -> list[Any]:
    """Targets whose instructions this machine has, on one core and on two."""
    host = target_of(str(codegen.llvm_get_system_cpu()))
    here = {str(name) for name in codegen.llvm_get_cpu_features(host)}
    names = [name for name, feature in CPUS.items() if feature in here]
    found = [target_of(name, **{"num-cores": cores}) for name in names for cores in (1, 2)]
    if not found:
        pytest.skip("this CPU multiplies no words")
    return found


def run(made: FamilyProblem, index: int, target: Any, problem: reference.Problem) -> Any:
    """The answer of a point to the problem, after a run on other values, which are left where its
    workspace is."""
    arguments = [*made.inputs(*problem.inputs), made.output(problem.blank())]
    built = tvm.tirx.build(made.candidate(index).mod, target=target)
    built["main"](*(tvm.runtime.tensor(_other(array)) for array in arguments))
    tensors = [tvm.runtime.tensor(array) for array in arguments]
    built["main"](*tensors)
    return made.answer(tensors[-1].numpy())


def _other(array: Any) -> Any:
    value = 0x55 if np.issubdtype(array.dtype, np.integer) else np.nan
    return np.full_like(array, value)


def check(data: st.DataObject, task: TaskConfig) -> None:
    target = data.draw(st.sampled_from(runnable()), label="target")
    made = {name: problems.with_family(task, name, Mode(task.layouts), target) for name in FAMILIES}
    fit = {name: problem for name, problem in made.items() if problem and problem.count(1)}
    assume(fit)
    name = data.draw(st.sampled_from(sorted(fit)), label="family")
    found, problem = fit[name], reference.make(task)
    index = data.draw(st.integers(0, found.count(1000) - 1), label="point")
    error = problem.error(run(found, index, target, problem))
    assert error <= problem.tolerance
    assert problem.tolerance > 0 or task.core.data_type.value == "INT8"


@TUNED
@given(data=st.data(), config=convolutions(), epilogue=OF_BYTES)
def test_a_convolution_of_bytes_is_exact(
    data: st.DataObject, config: ConvConfig, epilogue: tuple[str, ...]
) -> None:
    core = from_json(config.to_json() | {"data_type": "INT8"})
    check(data, TaskConfig(core=core, layouts="native", epilogue=epilogue))


@TUNED
@given(data=st.data(), config=convolutions(), epilogue=OF_BF16)
def test_a_convolution_of_bf16_rounds_its_answer_once(
    data: st.DataObject, config: ConvConfig, epilogue: tuple[str, ...]
) -> None:
    core = from_json(config.to_json() | {"data_type": "BF16"})
    check(data, TaskConfig(core=core, layouts="native", epilogue=epilogue))


@st.composite
def products(draw: st.DrawFn, data_type: str) -> GemmConfig:
    size, flag = st.integers(1, 70), st.booleans()
    return GemmConfig(
        m=draw(size),
        n=draw(size),
        k=draw(size | st.just(1400)),
        batch_count=draw(st.integers(1, 2)),
        trans_a=draw(flag),
        trans_b=draw(flag),
        data_type=data_type,
    )


@TUNED
@given(data=st.data(), core=products("INT8"), epilogue=OF_BYTES)
def test_a_product_of_bytes_is_exact(
    data: st.DataObject, core: GemmConfig, epilogue: tuple[str, ...]
) -> None:
    check(data, TaskConfig(core=core, layouts="native", epilogue=epilogue))


@TUNED
@given(data=st.data(), core=products("BF16"), epilogue=OF_BF16, layouts=st.sampled_from(Mode))
def test_a_product_of_bf16_rounds_its_answer_once(
    data: st.DataObject, core: GemmConfig, epilogue: tuple[str, ...], layouts: Mode
) -> None:
    check(data, TaskConfig(core=core, layouts=layouts.value, epilogue=epilogue))


@pytest.mark.parametrize("columns", [64, 65])
def test_a_kernel_rounds_ties_to_even_and_keeps_nan(columns: int) -> None:
    """In vectors of 64 columns with one instruction, of 65 by arithmetic."""
    targets = [target for target in runnable() if "bf16" in machine.from_target(target).words]
    if not targets:
        pytest.skip("this CPU has no avx512_bf16")
    random, sizes = np.random.default_rng(5), (64, columns)
    bits = random.integers(1 << 23, 255 << 23, sizes, np.uint32)
    bits[:32] &= 0xFFFF0000
    bits[:32] |= 1 << 15
    bits[0, :4] = 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000
    x = bits.view(np.float32)
    core = GemmConfig(m=1, n=columns, k=2, data_type=DataType.BF16)
    task = TaskConfig(core=core, layouts="native", epilogue=("bias",))
    made = problems.with_family(task, "gemm", Mode.NATIVE, targets[0])
    assert made is not None
    built = tvm.tirx.build(made.candidate(0).mod, target=targets[0])
    problem = reference.make(task)
    zeros = [np.zeros_like(array) for array in problem.inputs[:2]]
    for row in x:
        given = [*made.inputs(*zeros, row), made.output(problem.blank())]
        tensors = [tvm.runtime.tensor(array) for array in given]
        built["main"](*tensors)
        found = made.answer(tensors[-1].numpy()).astype(np.float32).reshape(-1)
        exact = np.abs(row) < 3.3895e38
        expected = row.astype(problem.blank().dtype).astype(np.float32)
        np.testing.assert_array_equal(found[exact], expected[exact])
        np.testing.assert_array_equal(np.isnan(found), np.isnan(row))
        np.testing.assert_array_equal(found[np.isinf(row)], row[np.isinf(row)])


@pytest.mark.parametrize("columns", [64, 65])
def test_sums_of_a_product_alone_round_ties_to_even(columns: int) -> None:
    targets = [target for target in runnable() if "bf16" in machine.from_target(target).words]
    if not targets:
        pytest.skip("this CPU has no avx512_bf16")
    core = GemmConfig(m=2, n=columns, k=2, data_type=DataType.BF16)
    task = TaskConfig(core=core, layouts="layer")
    made, problem = problems.with_family(task, "gemm", Mode.LAYER, targets[0]), reference.make(task)
    assert made is not None
    a = np.array([[1, 2**-8], [1 + 2**-7, 2**-8]], problem.inputs[0].dtype)
    given = [*made.inputs(a, np.ones_like(problem.inputs[1])), made.output(problem.blank())]
    tensors = [tvm.runtime.tensor(array) for array in given]
    tvm.tirx.build(made.candidate(0).mod, target=targets[0])["main"](*tensors)
    found = made.answer(tensors[-1].numpy()).astype(np.float32).reshape(2, columns)
    np.testing.assert_array_equal(found, np.repeat([[1], [1 + 2**-6]], columns, axis=1))


PLAIN_CONV = ConvConfig(1, 24, 6, 6, 40, 3, 3, 1, 1)
DEPTHWISE = ConvConfig(1, 40, 6, 5, 40, 3, 1, 1, 0, group_count=40)
PRODUCT = GemmConfig(m=7, n=40, k=30)


def task_of(core: ConvConfig | GemmConfig, data_type: DataType, *epilogue: str) -> TaskConfig:
    return TaskConfig(replace(core, data_type=data_type), layouts="native", epilogue=epilogue)


@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.INT8])
@pytest.mark.parametrize("cpu", ["haswell", "cooperlake"])
@pytest.mark.parametrize(
    ("core", "family"),
    [
        (PLAIN_CONV, "direct"),
        (DEPTHWISE, "depthwise"),  # one tap wide: as many words as single values
        (PLAIN_CONV, "winograd4"),
        (PRODUCT, "gemm"),
        (replace(PRODUCT, k=2), "gemm"),  # one word, of bytes or of numbers of 16 bits
        (replace(PLAIN_CONV, in_channels=2, fil_h=1, fil_w=1), "direct"),
    ],
)
def test_the_arguments_of_a_record_tell_how_the_weights_are_packed(
    core: ConvConfig | GemmConfig, family: str, cpu: str, data_type: DataType
) -> None:
    parts = ("bias", "residual")
    if data_type is DataType.INT8:
        parts = ("dequantize", "quantize", "residual", "quantize")
    task = task_of(core, data_type, *parts)
    made = problems.with_family(task, family, Mode.NATIVE, target_of(cpu))
    assert made is not None
    if not made.count(1):
        lacks = data_type is DataType.BF16 and cpu != "cooperlake" and family in ("direct", "gemm")
        assert lacks or (family, data_type) == ("winograd4", DataType.INT8)
        return
    record = json.loads(schedules.to_params(made.workload(), target_of(cpu), made.candidate(0)))
    assert packing_for(task, family, record[3]) == made.packing()


def test_a_product_of_two_instructions_is_estimated_to_take_longer() -> None:
    def cycles(cpu: str) -> float:
        task = task_of(replace(PRODUCT, k=64), DataType.INT8, DEQUANTIZE)
        layer = problems.with_family(task, "gemm", Mode.NATIVE, target_of(cpu)).layer
        return sum(gemm.work(layer, point).sums / layer.steps for point in gemm.space(layer)[:1])

    assert cycles("skylake-avx512") > cycles("cooperlake")


@pytest.mark.parametrize("cpu", ["cooperlake", "znver3", "nehalem"])
@pytest.mark.parametrize("data_type", [DataType.BF16, DataType.INT8])
def test_a_solver_that_applies_has_a_kernel_for_the_cpu(
    cpu: str, data_type: DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "cached_probe", lambda _name, _key, find: find())
    monkeypatch.setattr(toolchain, "_ask", lambda _, asked: toolchain.words(asked["target"]))
    library, target = TvmLibrary(), target_of(cpu)
    here = Environment("tvm", "", cpu, 1, "", target=json.dumps({"kind": "llvm", "mcpu": cpu}))
    parts = ("dequantize",) if data_type is DataType.INT8 else ("bias",)
    tasks = [task_of(core, data_type, *parts) for core in (PLAIN_CONV, DEPTHWISE, PRODUCT)]
    for task, names in library.applicable(tasks, here):
        for row in solvers.TILED:
            problem = problems.with_family(task, row.family, Mode.NATIVE, target)
            count = 0 if problem is None else problem.count(1)
            assert (row.name in names) == bool(count), (task.label, row.name)
        assert bool(names) is not bool(problems.refusal(task, target)), task.label
        if not names:
            lacks = {DataType.BF16: "BF16 on a CPU without avx512_bf16"}
            lacks[DataType.INT8] = "INT8 on a CPU without avx2"
            assert library.unsupported(task) == lacks[data_type]


def test_solvers_take_bytes_and_bf16_in_blocks_alone() -> None:
    target = json.dumps({"kind": "llvm", "mcpu": "cooperlake", "num-cores": 1})

    def names(config: Config, **conditions: str) -> set[str]:
        return set(solvers.applicable(config, target, conditions))

    winograd = {"TvmConvWinogradF2", "TvmConvWinogradF4", "TvmConvWinogradF6"}
    for kind, transformed in ((DataType.INT8, set()), (DataType.BF16, winograd)):
        assert names(task_of(PLAIN_CONV, kind)) == {"TvmConvTile", *transformed}
        assert names(replace(task_of(PLAIN_CONV, kind), layouts="layer")) == set()
        assert names(task_of(DEPTHWISE, kind)) == {"TvmConvTile", "TvmConvDepthwise"}
        assert names(task_of(PRODUCT, kind)) == {"TvmGemmTile"}
        assert solvers.error_bound("TvmConvTile", task_of(PLAIN_CONV, kind)) == float("inf")
    searched = {"TvmConvDirectNCHW", "TvmConvNCHWc", "TvmConvIm2colGemm", "TvmUntuned"}
    # an instruction of words is not in every CPU
    for kind, tiled in (
        (DataType.INT8, {"TvmConvTile"}),
        (DataType.BF16, {"TvmConvTile", *winograd}),
    ):
        layer = replace(PLAIN_CONV, data_type=kind)
        assert names(layer) - {"TvmConvDirectNHWC"} == searched
        assert names(layer, layouts="native") - {"TvmConvDirectNHWC"} == searched | tiled
    signed = replace(PRODUCT, data_type=DataType.INT8)
    assert names(signed, layouts="native") == {"TvmGemmTile", "TvmGemmDirect", "TvmUntuned"}
    batch = replace(signed, batch_count=2)
    assert names(batch, layouts="native") == {"TvmGemmDirect", "TvmUntuned"}


@pytest.mark.parametrize("family", ["direct", "gemm"])
def test_rounding_leaves_whole_vectors_on_cpus_for_which_llvm_prefers_halves(family: str) -> None:
    """TIR's own rounding makes a loop serial, and half a vector is what LLVM makes of it there."""
    core = replace(PRODUCT, n=48) if family == "gemm" else PLAIN_CONV
    task = task_of(core, DataType.INT8, "dequantize", "quantize", "residual", "quantize")
    target = target_of("icelake-server")
    made = problems.with_family(task, family, Mode.NATIVE, target)
    assert made is not None
    built = tvm.tirx.build(made.candidate(0).mod, target=target)
    lines = built.inspect_source("asm").splitlines()
    converted = [line for line in lines if "vcvtdq2ps" in line]
    assert converted
    assert all("%zmm" in line for line in converted)
    assert not [line for line in lines if "vround" in line]


@pytest.mark.keeps_processes
@pytest.mark.usefixtures("forked_children")
def test_a_worker_builds_checks_and_measures_typed_tasks(bench: Bench) -> None:
    assert runnable()
    item = bench.item(task_of(PLAIN_CONV, DataType.INT8, "dequantize", "quantize"), "TvmConvTile")
    built = bench.run(item)
    assert [trial.cause for trial in built.trials] == [None, None]
    measured = bench.run(bench.eval_item(item, [trial.artifact for trial in built.trials]))
    assert [trial.output_tail for trial in measured.trials] == ["", ""]
    assert all((trial.max_error or 0) < 1e-2 and trial.time_ms for trial in measured.trials)
