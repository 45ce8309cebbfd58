"""Layers of signed bytes and of bf16 that are no tasks of a model: exact, and packed as an exported
database says."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from test_typed_kernels import DEPTHWISE, PLAIN_CONV, PRODUCT, run, runnable

tvm = pytest.importorskip("tvm", reason="TVM is not installed: pip install '.[tvm]'")

from tuna.configs import ConvConfig, GemmConfig
from tuna.configs.values import DataType
from tuna.libraries import reference
from tuna.libraries.tvm import problems, schedules
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.signature import packing_for

NHWC = {"in_layout": "NHWC", "fil_layout": "NHWC", "out_layout": "NHWC"}
IMAGE = ConvConfig(1, 3, 9, 9, 20, 3, 3, 1, 1, conv_stride_h=2, conv_stride_w=2)
#: Of its taps, not of its channels, there are whole words
TAPS = ConvConfig(2, 2, 9, 8, 20, 5, 7, 2, 3, conv_stride_w=2, **NHWC)
GROUPS = replace(PLAIN_CONV, in_channels=32, out_channels=64, group_count=2, **NHWC)


@pytest.mark.parametrize("data_type", [DataType.INT8, DataType.BF16])
@pytest.mark.parametrize(
    ("layer", "family"),
    [
        (PLAIN_CONV, "direct"),
        (IMAGE, "direct"),
        (TAPS, "direct"),
        (replace(IMAGE, dilation_w=2), "direct"),
        (GROUPS, "direct"),
        (DEPTHWISE, "depthwise"),
        (PRODUCT, "gemm"),
        (replace(PRODUCT, trans_a=True, trans_b=True), "gemm"),
    ],
)
def test_a_layer_answers_as_the_reference_and_is_packed_as_its_export_says(
    example: ModuleType, layer: ConvConfig | GemmConfig, family: str, data_type: DataType
) -> None:
    layer = replace(layer, data_type=data_type)
    problem, target = reference.make(layer), runnable()[-1]
    made = problems.with_family(layer, family, Mode.NATIVE, target)
    if made is None or not made.count(1):
        pytest.skip("this CPU multiplies no words of bf16")
    error = problem.error(run(made, 0, target, problem))
    assert error <= (0.0 if data_type is DataType.INT8 else 1e-2)
    record = json.loads(schedules.to_params(made.workload(), target, made.candidate(0)))
    steps = json.loads(json.dumps(packing_for(layer, family, record[3])))
    types = [kind for _, kind, _ in record[3]]
    for ours, theirs in zip(
        example.arguments(problem.inputs, steps, types), made.inputs(*problem.inputs), strict=True
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_a_batch_of_signed_products_has_no_kernel() -> None:
    batch = replace(PRODUCT, data_type=DataType.INT8, batch_count=2)
    assert problems.with_family(batch, "gemm", Mode.NATIVE, runnable()[0]) is None


#: Instructions that must be in the code for a CPU, by type; none where no kernel may be made
INSTRUCTIONS = {
    "haswell": {DataType.INT8: "vpmaddwd", DataType.BF16: ""},
    "alderlake": {DataType.INT8: "vpdpbusd", DataType.BF16: ""},
    "skylake-avx512": {DataType.INT8: "vpmaddwd", DataType.BF16: ""},
    "icelake-server": {DataType.INT8: "vpdpbusd", DataType.BF16: ""},
    "znver4": {DataType.INT8: "vpdpbusd", DataType.BF16: "vdpbf16ps"},
    "x86-64": {DataType.INT8: "", DataType.BF16: ""},
}


@pytest.mark.parametrize("data_type", [DataType.INT8, DataType.BF16])
@pytest.mark.parametrize("cpu", INSTRUCTIONS)
def test_a_cpu_gets_only_instructions_that_it_has(cpu: str, data_type: DataType) -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    layer = replace(PLAIN_CONV, data_type=data_type)
    made = problems.with_family(layer, "direct", Mode.NATIVE, target)
    assert made is not None
    instruction = INSTRUCTIONS[cpu][data_type]
    assert made.count(1) == bool(instruction)
    if instruction:
        text = str(tvm.tirx.build(made.candidate(0).mod, target=target).inspect_source("asm"))
        assert instruction in text
        assert "tuna_dpbf16" not in text  # inlined
