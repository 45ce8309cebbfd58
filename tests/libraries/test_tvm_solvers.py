"""Where MetaSchedule's solvers apply, and that their scheduled kernels answer as NumPy does."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from shared_data import DRILLS
from tvm_bench import Bench
from tvm_layers import (
    DEPTHWISE,
    DILATION,
    GROUPS,
    LAST,
    ODD,
    POINT,
    STRIDE,
    THREE,
    THREE_LAST,
    conv,
    gemm,
)

from tuna.configs import Config, ConvConfig, GemmConfig
from tuna.libraries import reference
from tuna.libraries.base import Environment
from tuna.libraries.tvm import TvmLibrary
from tuna.libraries.tvm.solvers import TABLE

pytestmark = [pytest.mark.keeps_processes, pytest.mark.usefixtures("forked_children")]

#: No CPU, for which there are kernels of our own: `test_tvm_families.py`.
ANYWHERE = Environment("tvm", "1", "x86", 1, "t")
NCHW, NHWC, BLOCKED = "TvmConvDirectNCHW", "TvmConvDirectNHWC", "TvmConvNCHWc"
IM2COL, POINTWISE, GEMM = "TvmConvIm2colGemm", "TvmConv1x1Gemm", "TvmGemmDirect"


@pytest.mark.parametrize(
    ("config", "solvers"),
    [
        (conv(), {NCHW, NHWC, BLOCKED, IM2COL}),
        (conv(**LAST), {NCHW, NHWC, BLOCKED, IM2COL}),
        (conv(**STRIDE), {NCHW, NHWC, BLOCKED, IM2COL}),
        (conv(**DILATION), {NCHW, NHWC, BLOCKED, IM2COL}),
        (conv(**ODD), {NCHW, NHWC, IM2COL}),
        (conv(**POINT), {NCHW, NHWC, BLOCKED, IM2COL, POINTWISE}),
        (conv(**POINT, **STRIDE), {NCHW, NHWC, BLOCKED, IM2COL}),
        (conv(**GROUPS), {NCHW}),
        (conv(**DEPTHWISE), {NCHW}),
        (conv(**THREE), {NCHW}),
        (conv(data_type="FP16"), {NCHW, NHWC, BLOCKED, IM2COL}),
        (conv(data_type="INT8"), {NCHW, NHWC, BLOCKED, IM2COL}),
        (conv(direction="B"), set()),
        (conv(direction="W"), set()),
        (conv(mode="trans"), set()),
        (gemm(), {GEMM}),
        (gemm(ldb=999), set()),
        (gemm(data_type="FP8_E4M3"), set()),
    ],
    ids=lambda value: value.label if isinstance(value, ConvConfig | GemmConfig) else "",
)
def test_a_solver_applies_where_its_rule_says(config: Config, solvers: set[str]) -> None:
    ((same, names),) = TvmLibrary().applicable([config], ANYWHERE)
    assert same is config
    assert set(names) == solvers


def test_the_table_names_each_solver_once_and_only_kinds_of_the_library() -> None:
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names)
    assert {kind for row in TABLE for kind in row.solver.kinds} == set(TvmLibrary.kinds)
    assert [solver.name for solver in TvmLibrary().solvers()] == names


def test_the_library_is_there_without_importing_tvm_or_numpy() -> None:
    program = (
        "import sys; from tuna.libraries.tvm import TvmLibrary; library = TvmLibrary();"
        " library.solvers()\nlist(library.applicable([], None)); library.close();"
        " print(sorted({'tvm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def by_definition(config: ConvConfig, x: Any, w: Any) -> Any:
    """A convolution as the textbook has it, one multiplication at a time, in NC(D)HW."""
    axes = "dhw"[-config.spatial_dim :]
    stride, pad, dilation = (
        [getattr(config, f"{name}_{axis}") for axis in axes]
        for name in ("conv_stride", "pad", "dilation")
    )
    sizes, outs = (
        config.in_channels // config.group_count,
        config.out_channels // config.group_count,
    )
    y = np.zeros((config.batchsize, config.out_channels, *config.output_size))
    for n, k, *place in itertools.product(*map(range, y.shape)):
        for c, *tap in itertools.product(*map(range, w.shape[1:])):
            at = [
                p * s + t * d - q
                for p, s, t, d, q in zip(place, stride, tap, dilation, pad, strict=True)
            ]
            if all(0 <= a < size for a, size in zip(at, x.shape[2:], strict=True)):
                y[(n, k, *place)] += x[(n, k // outs * sizes + c, *at)] * w[(k, c, *tap)]
    return y


SMALL = {"in_channels": 4, "out_channels": 4, "in_h": 5, "in_w": 6}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        STRIDE,
        DILATION,
        GROUPS,
        {"group_count": 4},
        POINT,
        {"fil_w": 2, "pad_w": 0, "batchsize": 2},
        THREE,
    ],
    ids=str,
)
def test_the_reference_is_the_definition(changes: dict[str, Any]) -> None:
    config = conv(**{**SMALL, **changes, **({"in_d": 3} if changes is THREE else {})})
    assert isinstance(config, ConvConfig)
    problem = reference.make(config)
    expected = by_definition(config, *(array.astype(np.float64) for array in problem.inputs))
    np.testing.assert_allclose(problem.expected, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("layouts", "axes"), [(LAST, (0, 2, 3, 1)), (THREE_LAST, (0, 2, 3, 4, 1))])
def test_the_reference_is_the_same_in_every_layout(
    layouts: dict[str, Any], axes: tuple[int, ...]
) -> None:
    first = conv(**{**SMALL, **(THREE if "in_d" in layouts else {})})
    last = conv(**{**SMALL, **layouts})
    assert isinstance(first, ConvConfig)
    assert isinstance(last, ConvConfig)
    x, w = (array.astype(np.float64) for array in reference.make(first).inputs)
    answer = reference.convolve(last, x.transpose(axes), w.transpose(axes))
    np.testing.assert_allclose(answer, reference.convolve(first, x, w).transpose(axes))


@pytest.mark.parametrize("data_type", ["FP32", "FP16", "BF16", "INT8"])
def test_an_answer_with_one_number_missing_or_wrong_is_not_right(data_type: str) -> None:
    problem = reference.make(conv(data_type=data_type))
    answer = problem.expected.astype(problem.blank().dtype)
    assert problem.error(answer) <= problem.tolerance
    for wrong in (problem.blank().ravel()[0], answer.ravel()[5] + 1):
        spoiled = answer.copy()
        spoiled.ravel()[5] = wrong
        assert not problem.error(spoiled) <= problem.tolerance


CASES: list[tuple[str, Config]] = [
    (NCHW, conv(**DILATION)),
    (NCHW, conv(**ODD)),
    (NCHW, conv(**GROUPS, **STRIDE)),
    (NCHW, conv(**DEPTHWISE)),
    (NCHW, conv(**LAST, **GROUPS)),
    (NCHW, conv(**THREE)),
    (NCHW, conv(**{**THREE, "group_count": 2, "in_channels": 4, "out_channels": 4})),
    (NCHW, conv(**THREE_LAST)),
    (NCHW, conv(data_type="FP16")),
    (NCHW, conv(data_type="BF16")),
    (NCHW, conv(data_type="INT8")),
    (NHWC, conv(**LAST, **DILATION)),
    (NHWC, conv(**{**LAST, **ODD})),
    (NHWC, conv(data_type="FP16")),
    (BLOCKED, conv(**{**LAST, **DILATION, "in_channels": 16, "out_channels": 16})),
    (BLOCKED, conv(data_type="INT8")),
    (IM2COL, conv(**DILATION)),
    (IM2COL, conv(**{**LAST, **ODD})),
    (IM2COL, conv(data_type="BF16")),
    (POINTWISE, conv(**{**POINT, **ODD, "fil_w": 1, "fil_h": 1})),
    (GEMM, gemm(trans_b=True, batch_count=3)),
    (GEMM, gemm(data_type="FP16", trans_a=True, trans_b=True)),
    (GEMM, gemm(data_type="INT8")),
]


#: A larger layer runs on NaN first, which fills TVM's workspace: a read of what nobody wrote then
#: shows in the answer.
POISONED = """
import json, sys
import numpy as np
import tvm
from tuna.configs import from_json
from tuna.libraries import reference
from tuna.libraries.tvm import workloads
def kernel(solver, config):
    target = tvm.target.Target({"kind": "llvm"})
    return tvm.tirx.build(workloads.make(solver, config), target=target)["main"]
big, *configs = map(from_json, json.loads(sys.argv[1]))
problem, problems = reference.make(big), [reference.make(config) for config in configs]
for solver in sys.argv[2:]:
    poison = kernel(solver, big)
    for config, checked in zip(configs, problems):
        run = kernel(solver, config)
        blanks = (np.full_like(a, np.nan) for a in (*problem.inputs, problem.blank()))
        poison(*map(tvm.runtime.tensor, blanks))
        arguments = [tvm.runtime.tensor(a) for a in (*checked.inputs, checked.blank())]
        run(*arguments)
        print(checked.error(arguments[-1].numpy()) <= checked.tolerance)
"""


@pytest.mark.drill(only=True)
def test_no_kernel_reads_what_it_did_not_write(tvm_here: None) -> None:
    """TOPI's winograd did where the output is not whole tiles: right as long as small numbers lay
    in that memory."""
    checked = ((7, 7),) if DRILLS == 1 else ((8, 8), (7, 7), (9, 10), (11, 14))
    sizes = [conv(in_h=h, in_w=w) for h, w in ((32, 32), *checked)]
    layers = json.dumps(
        [
            config.to_json()
            for config in (*sizes, conv(**{**LAST, "in_h": 7, "in_w": 9, "pad_w": 0}))
        ]
    )
    solvers = [NCHW, NHWC, BLOCKED, IM2COL]
    command = [sys.executable, "-c", POISONED, layers, *solvers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True"] * len(solvers) * (len(checked) + 1)


def _sample(cases: list[tuple[str, Config]]) -> list[tuple[str, Config]]:
    """The last case of each solver, which are of several data types and layouts, and one in 3D; all
    with TUNA_TEST_DRILLS."""
    return cases if DRILLS > 1 else [cases[6], *dict(cases).items()]


@pytest.mark.parametrize(
    ("solver", "config"),
    _sample(CASES),
    ids=[f"{solver}: {config.label}" for solver, config in _sample(CASES)],
)
def test_scheduled_kernels_answer_as_the_reference(
    bench: Bench, solver: str, config: Config
) -> None:
    ((_, applicable),) = bench.library.applicable([config], ANYWHERE)
    assert solver in applicable
    count = min(DRILLS, 2)
    built = bench.compile(config, solver, candidates=count)
    assert built.ok, built.output_tail
    assert [trial.cause for trial in built.trials] == [None] * count
    measured = bench.evaluate(config, solver, [trial.artifact for trial in built.trials])
    assert [trial.output_tail for trial in measured.trials] == [""] * count
    for trial in measured.trials:
        assert trial.max_error is not None
        assert trial.time_ms is not None
        assert trial.time_ms > 0
