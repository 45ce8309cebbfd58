"""Every kernel of every family answers as NumPy does, whatever the layer, the layout, the vector
width and the point."""

from __future__ import annotations

import functools
import itertools
import os
import platform
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_data import DRILLS

from tuna.configs import ConvConfig, GemmConfig, TaskConfig, from_json
from tuna.configs.task import ACTIVATIONS
from tuna.libraries import reference

if find_spec("tvm") is None:
    if os.environ.get("CI") == "true":
        pytest.fail("TVM is not installed: pip install '.[tvm]'")
    pytest.skip("TVM is not installed: pip install '.[tvm]'", allow_module_level=True)

import tvm
from tvm.target import codegen

from tuna.libraries.tvm import problems
from tuna.libraries.tvm.kernels import direct_space, shape
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.problems import FamilyProblem, layer_of, ranked

#: Direct sums in fp32 of a few hundred terms, over the largest magnitude of the answer.
ROUNDING = 5e-6
CPUS = {"x86_64": ("x86-64", "haswell", "skylake-avx512"), "aarch64": ("generic",)}
FEATURES = {"x86-64": "sse2", "haswell": "avx2", "skylake-avx512": "avx512f", "generic": "neon"}
TUNED = settings(
    max_examples=6 * DRILLS,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


def target_of(mcpu: str, **options: Any) -> Any:
    """The CPU; LLVM's optimisations, which take the longest and are not ours, are for drills."""
    known = {"kind": "llvm", "mcpu": mcpu, "num-cores": 1, "opt-level": 0 if DRILLS == 1 else 3}
    return tvm.target.Target({**known, **options})


@functools.cache
def runnable() -> list[Any]:
    """Targets of each vector width that this machine can run."""
    host = target_of(str(codegen.llvm_get_system_cpu()))
    here = {str(name) for name in codegen.llvm_get_cpu_features(host)}
    names = [name for name in CPUS.get(platform.machine(), ()) if FEATURES[name] in here]
    return [target_of(name, **{"num-cores": cores}) for name in names for cores in (1, 2)] or [host]


@st.composite
def convolutions(draw: st.DrawFn) -> ConvConfig:
    """Small layers: odd sizes, groups, dilation, stride, different padding down and across, both
    layouts."""
    small, one_or_two = st.integers(1, 3), st.integers(1, 2)
    layout = draw(st.sampled_from(("NCHW", "NHWC")))
    height, width = draw(st.integers(1, 13)), draw(st.integers(1, 19))
    fil_h, fil_w = draw(st.sampled_from(((1, 1), (3, 3), (3, 3), (1, 3), (5, 2))))
    groups = draw(st.sampled_from((1, 1, 1, 2, 4, 5)))
    channels, filters = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    dilation = draw(one_or_two)
    found = {
        "kind": "convolution",
        "batchsize": draw(one_or_two),
        "in_channels": channels * groups,
        "out_channels": filters * groups,
        "group_count": groups,
        "in_h": max(height, (fil_h - 1) * dilation + 1),
        "in_w": max(width, (fil_w - 1) * dilation + 1),
        "fil_h": fil_h,
        "fil_w": fil_w,
        "pad_h": draw(small) - 1,
        "pad_w": draw(small) - 1,
        "conv_stride_h": draw(one_or_two),
        "conv_stride_w": draw(one_or_two),
        "dilation_h": dilation,
        "dilation_w": dilation,
        **dict.fromkeys(("in_layout", "fil_layout", "out_layout"), layout),
    }
    if draw(st.booleans()):  # what Winograd takes
        found |= dict.fromkeys(
            ("conv_stride_h", "conv_stride_w", "dilation_h", "dilation_w", "group_count"), 1
        )
    elif draw(st.integers(0, 3)) == 0:  # depthwise
        found |= {
            "group_count": found["in_channels"],
            "out_channels": found["in_channels"] * draw(one_or_two),
        }
    config = from_json(found)
    assert isinstance(config, ConvConfig)
    return config


def backward_data(config: ConvConfig, dy: Any, weights: Any) -> Any:
    """dx in double precision from dy and the weights, all with the channels first: every product
    added where it came from."""
    groups, (height, width) = config.group_count, config.output_size
    found = np.zeros(
        (
            config.batchsize,
            config.in_channels,
            config.in_h + 2 * config.pad_h,
            config.in_w + 2 * config.pad_w,
        )
    )
    ins, outs = config.in_channels // groups, config.out_channels // groups
    for group, y, x in itertools.product(range(groups), range(config.fil_h), range(config.fil_w)):
        rows, columns = y * config.dilation_h, x * config.dilation_w
        filters = weights[group * outs : (group + 1) * outs, :, y, x].astype(np.float64)
        part = np.einsum(
            "nkhw,kc->nchw", dy[:, group * outs : (group + 1) * outs].astype(np.float64), filters
        )
        inside = found[
            :,
            group * ins : (group + 1) * ins,
            rows :: config.conv_stride_h,
            columns :: config.conv_stride_w,
        ]
        inside[:, :, :height, :width] += part
    inside = (
        slice(config.pad_h, config.pad_h + config.in_h),
        slice(config.pad_w, config.pad_w + config.in_w),
    )
    return found[:, :, inside[0], inside[1]]


def backward_weights(config: ConvConfig, x: Any, dy: Any) -> Any:
    """dw in double precision from x and dy, all with the channels first: each tap's product over
    the pixels."""
    groups, (height, width) = config.group_count, config.output_size
    pads = (config.pad_h, config.pad_h), (config.pad_w, config.pad_w)
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *pads])
    ins, outs = config.in_channels // groups, config.out_channels // groups
    found = np.zeros((config.out_channels, ins, config.fil_h, config.fil_w))
    for group, r, s in itertools.product(range(groups), range(config.fil_h), range(config.fil_w)):
        rows, columns = r * config.dilation_h, s * config.dilation_w
        high, wide = config.conv_stride_h, config.conv_stride_w
        part = padded[:, group * ins : (group + 1) * ins, rows::high, columns::wide][
            :, :, :height, :width
        ]
        answer = dy[:, group * outs : (group + 1) * outs].astype(np.float64)
        found[group * outs : (group + 1) * outs, :, r, s] = np.einsum("nkhw,nchw->kc", answer, part)
    return found


@TUNED
@given(data=st.data(), config=convolutions(), target=st.sampled_from(runnable()))
def test_backward_kernels_answer_as_the_definition(
    data: st.DataObject, config: ConvConfig, target: Any
) -> None:
    direction = data.draw(st.sampled_from(("B", "W")), label="direction")
    config = from_json(config.to_json() | {"direction": direction})
    assert isinstance(config, ConvConfig)
    layer = layer_of(config, data.draw(st.sampled_from(Mode), label="mode"), target)
    assert layer is not None
    points = ranked(layer)
    if not points:  # backward weights in blocks
        assert layer.mode is Mode.NATIVE
        return
    family, index = data.draw(st.sampled_from(points), label="point")
    generator = np.random.default_rng(2)
    x, w, dy = (
        generator.uniform(-1, 1, size).astype(np.float32)
        for size in (config.input_shape, config.weight_shape, config.output_shape)
    )
    first, plain = channels_first(dy, config.out_layout), channels_first(w, config.fil_layout)
    if direction == "W":
        expected = backward_weights(config, channels_first(x, config.in_layout), first)
        given, extents = (x, dy), config.weight_shape
    else:
        expected = backward_data(config, first, plain)
        given, extents = (dy, w), config.input_shape
    answer = answered(FamilyProblem(config, family, layer), index, target, *given, extents=extents)
    found = channels_first(answer, config.in_layout)
    assert np.abs(found - expected).max() <= 1e-4 * (np.abs(expected).max() + 1)


def channels_first(array: Any, layout: str) -> Any:
    return np.moveaxis(array, -1, 1) if layout.endswith("C") else array


def answered(
    made: FamilyProblem, index: int, target: Any, *given: Any, extents: tuple[int, ...]
) -> Any:
    """The answer of a point to the layer's own inputs."""
    blank = np.full(extents, np.nan, np.float32)
    arguments = [*made.inputs(*given), made.output(blank)]
    return made.answer(run(made.candidate(index).mod, target, arguments))


def run(module: Any, target: Any, arguments: list[Any]) -> Any:
    """The last argument after a run; a run on NaN went before, so that the workspace was full of
    it."""
    built = tvm.tirx.build(module, target=target)
    built["main"](*(tvm.runtime.tensor(np.full_like(array, np.nan)) for array in arguments))
    tensors = [tvm.runtime.tensor(array) for array in arguments]
    built["main"](*tensors)
    return tensors[-1].numpy()


#: In any order that a task may have.
ADDED = ((), ("bias",), ("residual",), ("bias", "residual"))
EPILOGUES = st.one_of(
    st.tuples(
        st.sampled_from(ADDED), st.sampled_from(((), *((name,) for name in ACTIVATIONS)))
    ).map(lambda p: p[0] + p[1]),
    st.sampled_from(
        [
            ("bias", "silu", "residual"),
            ("gelu", "to_fp16"),
            ("residual", "to_fp16"),
            ("bias", "to_bf16"),
        ]
    ),
)


@TUNED
@given(data=st.data(), config=convolutions(), epilogue=EPILOGUES)
def test_a_convolution_answers_as_the_reference(
    data: st.DataObject, config: ConvConfig, epilogue: tuple[str, ...]
) -> None:
    target = data.draw(st.sampled_from(runnable()), label="target")
    mode = data.draw(st.sampled_from(Mode), label="mode")
    layer = layer_of(config, mode, target)
    assert layer is not None
    families = [family.name for family in FAMILIES.values() if family.applies(layer.shape, mode)]
    if families:
        name = data.draw(st.sampled_from(families), label="family")
        answers_as_the_reference(
            data, TaskConfig(core=config, layouts=mode, epilogue=epilogue), name, target
        )


def answers_as_the_reference(
    data: st.DataObject, task: TaskConfig, family: str, target: Any
) -> None:
    problem, expected = (
        problems.with_family(task, family, Mode(task.layouts), target),
        reference.make(task),
    )
    assert problem is not None
    index = data.draw(st.integers(0, problem.count(1000) - 1), label="point")
    arguments = [*problem.inputs(*expected.inputs), problem.output(expected.blank())]
    answer = problem.answer(run(problem.candidate(index).mod, target, arguments)).astype(np.float64)
    limit = FAMILIES[family].error_bound if FAMILIES[family].outputs else ROUNDING
    if expected.answer_type != "float32":
        limit = expected.tolerance
    # A sum of 1400 products may be small itself, and ReLU leaves only that of a small layer.
    assert np.abs(answer - expected.expected).max() <= limit * (np.abs(expected.expected).max() + 1)


@pytest.mark.parametrize(("name", "sign"), [("direct", "order"), ("winograd2", "buffer_dim_align")])
def test_a_layer_that_overflows_its_caches_answers_as_the_reference(name: str, sign: str) -> None:
    """Direct sums then lie in cache between blocks of input channels; Winograd lengthens a stride
    that shares sets of L1."""
    found = {
        "kind": "convolution",
        "batchsize": 1,
        "in_channels": 32,
        "out_channels": 32,
        "in_h": 8,
        "in_w": 8,
        "fil_h": 3,
        "fil_w": 3,
    }
    config = from_json(found | {"pad_h": 1, "pad_w": 1})
    target = runnable()[-2] if len(runnable()) > 1 else runnable()[0]
    whole = layer_of(config, Mode.NATIVE, target)
    assert whole is not None
    assert isinstance(config, ConvConfig)
    layer = replace(whole, machine=replace(whole.machine, l2_bytes=1 << 10))
    family, problem = FAMILIES[name], reference.make(config)
    made = FamilyProblem(config, family, layer)
    built = made.candidate(0)
    assert "tuna_ask" in str(built.mod)
    if sign == "order":
        assert family.kernel.space(layer)[0].order == direct_space.CHANNELS_OUTSIDE
    else:
        assert sign in str(built.mod)
    answer = answered(made, 0, target, *problem.inputs, extents=problem.expected.shape)
    assert problem.error(answer) <= ROUNDING


@pytest.mark.parametrize(
    ("l2_bytes", "order"),
    [(4 << 20, direct_space.BLOCKS_OUTSIDE), (1 << 10, direct_space.CHANNELS_OUTSIDE)],
)
def test_a_sum_of_many_channels_has_the_error_of_blocks(l2_bytes: int, order: int) -> None:
    config, target = ConvConfig(1, 256, 6, 6, 32, 3, 3), runnable()[-1]
    layer, problem = layer_of(config, Mode.NATIVE, target), reference.make(config)
    assert layer is not None
    layer = replace(layer, machine=replace(layer.machine, l2_bytes=l2_bytes))
    assert direct_space.order_of(layer) == order
    made = FamilyProblem(config, FAMILIES["direct"], layer)
    answer = answered(made, 0, target, *problem.inputs, extents=problem.expected.shape)
    assert problem.error(answer) <= 8e-7


@pytest.mark.parametrize("rows", [1, 30])
def test_a_long_product_has_the_error_of_blocks(rows: int) -> None:
    config, target = GemmConfig(m=rows, n=40, k=4096), runnable()[-1]
    made, problem = (
        problems.with_family(config, "gemm", Mode.NATIVE, target),
        reference.make(config),
    )
    assert made is not None
    answer = answered(made, 0, target, *problem.inputs, extents=problem.expected.shape)
    assert problem.error(answer) <= 8e-7


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("groups", "ins", "outs", "merged"), [(5, 8, 8, 2), (3, 24, 8, 2), (3, 8, 16, 1), (5, 3, 7, 5)]
)
def test_groups_that_fill_no_block_cost_no_more_than_the_blocks_that_they_fill_together(
    mode: Mode, groups: int, ins: int, outs: int, merged: int
) -> None:
    config = ConvConfig(1, groups * ins, 6, 5, groups * outs, 3, 3, 1, 1, group_count=groups)
    assert shape.of(config, 16).merged == merged
    target = runnable()[-2] if len(runnable()) > 1 else runnable()[0]
    layer, problem = layer_of(config, mode, target), reference.make(config)
    assert layer is not None
    made = FamilyProblem(config, FAMILIES["direct"], layer)
    answer = answered(made, 0, target, *problem.inputs, extents=problem.expected.shape)
    assert problem.error(answer) <= ROUNDING


@pytest.mark.parametrize("cores", [1, 2])
def test_rows_that_stay_in_cache_together_answer_as_the_reference(cores: int) -> None:
    sizes = {
        "batchsize": 1,
        "in_channels": 16,
        "out_channels": 64,
        "in_h": 32,
        "in_w": 32,
        "fil_h": 3,
        "fil_w": 3,
    }
    steps = {"conv_stride_h": 2, "conv_stride_w": 2, "pad_h": 1, "pad_w": 1}
    config = from_json({"kind": "convolution", **sizes, **steps})
    target = next(target for target in runnable() if int(target.attrs["num-cores"]) == cores)
    whole = layer_of(config, Mode.NATIVE, target)
    assert whole is not None
    assert isinstance(config, ConvConfig)
    layer = replace(whole, machine=replace(whole.machine, l2_bytes=40 << 10))
    family, problem = FAMILIES["direct"], reference.make(config)
    assert family.kernel.space(layer)[0].order == direct_space.ROWS_OUTSIDE
    made = FamilyProblem(config, family, layer)
    built = made.candidate(0)
    loops = built.get_loops(built.get_sblock("sums_update"))
    assert int(built.get(loops[3]).extent) == 4, "rows, inside of the channels"
    answer = answered(made, 0, target, *problem.inputs, extents=problem.expected.shape)
    assert problem.error(answer) <= ROUNDING


@TUNED
@given(data=st.data(), epilogue=EPILOGUES)
def test_a_product_answers_as_the_reference(data: st.DataObject, epilogue: tuple[str, ...]) -> None:
    size = st.integers(1, 70)
    config = GemmConfig(
        m=data.draw(size, label="m"),
        n=data.draw(size, label="n"),
        k=data.draw(size | st.just(1400), label="k"),  # the last in several parts
        batch_count=data.draw(st.integers(1, 2), label="batch"),
        trans_a=data.draw(st.booleans(), label="trans_a"),
        trans_b=data.draw(st.booleans(), label="trans_b"),
    )
    target = data.draw(st.sampled_from(runnable()), label="target")
    mode = data.draw(st.sampled_from(Mode), label="mode")
    answers_as_the_reference(
        data, TaskConfig(core=config, layouts=mode, epilogue=epilogue), GEMM.name, target
    )
