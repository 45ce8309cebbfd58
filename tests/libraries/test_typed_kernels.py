"""Kernels of bytes answer as the reference to the last digit, those of bfloat16 within its
rounding, whatever the layer, the epilogue, the CPU and the point."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_kernels import TUNED, convolutions, target_of

tvm = pytest.importorskip("tvm", reason="TVM is not installed: pip install '.[tvm]'")
from tvm.target import codegen

from tuna.configs import ConvConfig, GemmConfig, TaskConfig, from_json
from tuna.configs.task import ACTIVATIONS, DEQUANTIZE, QUANTIZE, RELU, RELU6, RESIDUAL
from tuna.libraries import reference
from tuna.libraries.tvm import problems
from tuna.libraries.tvm.kernels.families import FAMILIES
from tuna.libraries.tvm.kernels.shape import Mode
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
    st.tuples(PLAIN, st.sampled_from([(), (QUANTIZE,)])).map(lambda p: (DEQUANTIZE, *p[0], *p[1])),
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
