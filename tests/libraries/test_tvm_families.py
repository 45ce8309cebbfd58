"""The families of kernels as solvers: where they apply, what is proposed, that the real builder and
loader answer rightly, and that a family changes only with the version of the kernels."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_kernels import TUNED, convolutions
from tvm_bench import Bench
from tvm_layers import DEPTHWISE, GROUPS, LAST, ODD, POINT, STRIDE, THREE, conv, gemm

from tuna.configs import AttentionConfig, Config, ConvConfig, GemmConfig, TaskConfig, from_json
from tuna.configs.attention import MASKS
from tuna.configs.task import BIAS, RESIDUAL
from tuna.configs.values import Direction
from tuna.libraries import measuring, reference
from tuna.libraries.base import Environment
from tuna.libraries.kernels import KernelJob
from tuna.libraries.steps import command_line
from tuna.libraries.tvm import TvmLibrary, kernels, problems, solvers
from tuna.libraries.tvm.kernel_child import TvmBuilder, TvmLoader
from tuna.libraries.tvm.kernels import shape, signature
from tuna.libraries.tvm.kernels.attention import Attention
from tuna.libraries.tvm.kernels.families import (
    DIRECT_ERROR,
    FAMILIES,
    Family,
)
from tuna.libraries.tvm.kernels.gemm import Product
from tuna.libraries.tvm.kernels.machine import Machine
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.vocabulary import Cause

pytestmark = [pytest.mark.keeps_processes, pytest.mark.usefixtures("forked_children")]

CPU = json.dumps({"kind": "llvm", "mcpu": "x86-64", "num-cores": 1})
TILE, DEPTH, POINTWISE, GEMM = "TvmConvTile", "TvmConvDepthwise", "TvmConvPointwise", "TvmGemmTile"
F2, F4, F6, UNTUNED = "TvmConvWinogradF2", "TvmConvWinogradF4", "TvmConvWinogradF6", "TvmUntuned"
NCHW, NHWC, BLOCKED = "TvmConvDirectNCHW", "TvmConvDirectNHWC", "TvmConvNCHWc"
DATA, WEIGHTS = "TvmConvBackwardData", "TvmConvBackwardWeights"
ATTEND = "TvmAttention"
ATTENTION = AttentionConfig(1, 2, 18, 37, 10, 12, 2, 0.5, mask="QK")
NATIVE, DIRECT = {"layouts": "native"}, {"winograd": "no"}
EXAMPLES = 50 if os.environ.get("TUNA_TEST_DRILLS") == "3" else 2
#: Version of the kernels, and for each family the digest of its points, in order, and of its packed
#: weights: both are what a record or an exported database relies on.
VERSION = 15
DIGESTS = {
    "direct": "28731125761d4a52",
    "depthwise": "75c6c708d86f1762",
    "pointwise": "3d7320052e1220e2",
    "winograd2": "6bca80351cc2009d",
    "winograd4": "839cd7cd9e64ef91",
    "winograd6": "8420b0cde85555f0",
    "backward_data": "84186c62db1f33da",
    "backward_weights": "949abcb5b636c782",
    "gemm": "cd88b0b77a17847d",
    "attention": "555bbe7bdb53bb61",
}
#: Winograd's transforms have thirds, which other machines may round otherwise: times this, no value
#: is half way between two digits.
_NO_TIES = 1.618


@pytest.mark.parametrize(
    ("config", "conditions", "names"),
    [
        (conv(), {}, {TILE, F2, F4, F6, UNTUNED}),
        (conv(**LAST), {}, {TILE, F2, F4, F6, UNTUNED}),
        (conv(), DIRECT, {TILE, UNTUNED}),
        (conv(), NATIVE, {TILE, F2, F4, F6, UNTUNED}),
        (conv(in_h=5, in_w=5), {}, {TILE, F2, F4, UNTUNED}),
        (conv(in_channels=3), {}, {TILE, UNTUNED}),
        (conv(**STRIDE), {}, {TILE, UNTUNED}),
        (conv(**ODD), {}, {TILE, UNTUNED}),
        (conv(**POINT), {}, {TILE, POINTWISE, UNTUNED}),
        (conv(**POINT), NATIVE, {TILE, UNTUNED}),
        (conv(**POINT, **LAST), {}, {TILE, UNTUNED}),
        (conv(**POINT, in_h=7), {}, {TILE, UNTUNED}),  # 56 pixels are no vectors of 16
        (conv(**DEPTHWISE), {}, {TILE, DEPTH, UNTUNED}),
        (conv(**DEPTHWISE), NATIVE, {TILE, DEPTH, UNTUNED}),
        (conv(**DEPTHWISE, out_channels=16), NATIVE, {TILE, DEPTH, UNTUNED}),
        (conv(**GROUPS), {}, {TILE, UNTUNED}),
        (conv(direction="B"), {}, {TILE, F2, F4, F6}),
        (conv(direction="B", **STRIDE), {}, {DATA}),
        (conv(direction="W"), {}, {WEIGHTS}),
        (conv(direction="W"), NATIVE, set()),
        (conv(direction="W", data_type="FP16"), {}, set()),
        (conv(**THREE), {}, {NCHW, UNTUNED}),
        (conv(data_type="FP16"), {}, {NCHW, NHWC, BLOCKED, "TvmConvIm2colGemm", UNTUNED}),
        # 19 GFLOP untuned: 10 s
        (conv(in_h=512, in_w=512, in_channels=64, out_channels=64), {}, {TILE, F2, F4, F6}),
        (gemm(), {}, {GEMM, UNTUNED}),
        (gemm(), NATIVE, {GEMM, UNTUNED}),
        (gemm(data_type="INT8"), {}, {"TvmGemmDirect", UNTUNED}),
        (ATTENTION, {}, {ATTEND}),
        (ATTENTION, NATIVE, set()),
    ],
)
def test_metaschedule_is_left_to_what_no_family_covers(
    config: Config, conditions: dict[str, str], names: set[str]
) -> None:
    environment = Environment("tvm", "1", "x86", 1, "t", target=CPU, conditions=conditions)
    ((same, found),) = TvmLibrary().applicable([config], environment)
    assert same is config
    assert set(found) == names
    assert len(found) == len(names)


def test_a_family_is_a_solver_and_states_its_error() -> None:
    assert {row.family: row.name for row in solvers.TILED} == {
        name: family.solver for name, family in FAMILIES.items()
    }
    bounds = {row.family: row.solver.error_bound for row in solvers.TILED}
    assert bounds == {name: family.error_bound for name, family in FAMILIES.items()}
    assert all(
        0 < (bound or 0) <= reference.TOLERANCE[conv().data_type] for bound in bounds.values()
    )
    assert solvers.error_bound(TILE, conv()) == DIRECT_ERROR
    # grows as the root of the terms
    assert solvers.error_bound(GEMM, gemm(k=4 * 18432)) == 2 * DIRECT_ERROR
    assert solvers.error_bound(NCHW, conv()) == float("inf")
    assert [row.name for row in solvers.TABLE if row.solver.baseline] == [UNTUNED]


def test_the_first_points_of_a_space_are_proposed_whatever_the_seed() -> None:
    for name, config in ((F4, conv()), (TILE, conv(**GROUPS)), (GEMM, gemm()), (UNTUNED, conv())):
        all_of_it = TvmBuilder().propose(KernelJob(config, name, CPU, seed=1, count=99))
        assert len(set(all_of_it)) == len(all_of_it)
        assert len(all_of_it) == 1 if name == UNTUNED else 2 < len(all_of_it) <= 16
        assert TvmBuilder().propose(KernelJob(config, name, CPU, seed=2, count=2)) == all_of_it[:2]


def test_a_family_without_a_kernel_for_the_target_proposes_nothing(bench: Bench) -> None:
    """A wide session's job may come from a table that knew another width."""
    result = bench.compile(conv(**POINT, in_h=7, in_w=7), POINTWISE)
    assert (result.ok, result.cause) == (False, Cause.NOT_APPLICABLE)


def test_the_example_takes_a_folder_with_one_database_and_says_what_it_wants_else(
    example: ModuleType, tmp_path: Path
) -> None:
    def made(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        for file in ("database_workload.json", "database_tuning_record.json", "layers.json"):
            (tmp_path / name / file).touch()
        return tmp_path / name

    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(
            SystemExit, match="holds no database for TVM; one is made by: tuna export"
        ):
            example.main(place)
    assert list(tmp_path.iterdir()) == [], "TVM makes the files that it looks for"
    first = made("a.tvm")
    assert example.database_folder(first) == example.database_folder(tmp_path) == first
    made("b.tvm")
    with pytest.raises(SystemExit, match=r"several databases; name one of: .*a\.tvm, .*b\.tvm"):
        example.main(tmp_path)


@st.composite
def attentions(draw: st.DrawFn) -> AttentionConfig:
    """A small attention: any extents, masks and orders of axes, and heads that share keys."""
    size, times = st.integers(1, 40), draw(st.integers(1, 2))
    kv_heads, batch = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    names = ("queries", "keys", "width", "value_width")
    orders = st.sampled_from(("BHSD", "BSHD", "SBHD", "BSNHD"))
    return AttentionConfig(
        batch_count=batch,
        heads=times * kv_heads,
        kv_heads=kv_heads,
        scale=draw(st.sampled_from((0.25, 1.0))),
        mask=draw(st.sampled_from(MASKS)),
        zero_rows=draw(st.booleans()),
        causal=draw(st.booleans()),
        q_layout=draw(orders),
        k_layout=draw(st.sampled_from(("BHSD", "BHDS", "BSHD", "SHBND"))),
        v_layout=draw(orders),
        y_layout=draw(st.sampled_from(("BHSD", "BSHD", "SBHD"))),
        **{name: draw(size) for name in names},
    )


@st.composite
def layers(draw: st.DrawFn, solver: str) -> Config:
    """A small layer, changed until it is one for the solver: odd sizes, groups, dilation, one
    channel, uneven padding."""
    found, size = draw(convolutions()).to_json(), st.integers(1, 70)
    plain = dict.fromkeys(
        ("conv_stride_h", "conv_stride_w", "dilation_h", "dilation_w", "group_count"), 1
    )
    if solver == GEMM or (solver == UNTUNED and draw(st.booleans())):
        flags = {name: draw(st.booleans()) for name in ("trans_a", "trans_b")}
        return gemm(
            m=draw(size), n=draw(size), k=draw(size), batch_count=draw(st.integers(1, 2)), **flags
        )
    if solver == ATTEND:
        return draw(attentions())
    if "Winograd" in solver:
        least = st.integers(int(solver[-1]) + 2, 17)  # one tile without padding
        sizes = {"in_channels": draw(st.integers(4, 40)), "in_h": draw(least), "in_w": draw(least)}
        found |= plain | sizes | {"out_channels": draw(size), "fil_h": 3, "fil_w": 3}
    if solver == POINTWISE:
        layout = dict.fromkeys(("in_layout", "fil_layout", "out_layout"), "NCHW")
        sizes = {"in_h": 4 * draw(st.integers(1, 4)), "in_w": 4 * draw(st.integers(1, 4))}
        found |= plain | POINT | layout | sizes
    if solver == DEPTH:
        channels = draw(st.integers(2, 40))
        found |= dict.fromkeys(("in_channels", "out_channels", "group_count"), channels)
    elif "Backward" in solver:
        found |= {"direction": "W"} if solver == WEIGHTS else {"direction": "B", "conv_stride_h": 2}
    elif solver != UNTUNED and draw(st.booleans()):
        found |= {"direction": "B", "conv_stride_h": 1, "conv_stride_w": 1}
    return from_json(found)


@st.composite
def jobs(draw: st.DrawFn, solver: str, target: str) -> KernelJob:
    """A layer and conditions under which the solver applies."""
    config, count = draw(layers(solver)), draw(st.integers(1, 8))
    modes = [{"layouts": mode.value} for mode in Mode]
    fit = [each for each in modes if solver in solvers.applicable(config, target, each)]
    assume(fit)  # more padding than the filter reaches has no gradient of ours
    return KernelJob(config, solver, target, count=count, conditions=draw(st.sampled_from(fit)))


@pytest.fixture(scope="module")
def target(tvm_here: None, home: Path) -> str:
    """This machine's."""
    return TvmLibrary().environment().target


@pytest.mark.parametrize("solver", [row.name for row in (*solvers.TILED, solvers.UNTUNED)])
def test_what_is_built_and_loaded_answers_as_the_reference(
    target: str, example: ModuleType, tmp_path_factory: pytest.TempPathFactory, solver: str
) -> None:
    """Outputs and workspaces were full of NaN."""
    folder = tmp_path_factory.mktemp("built")

    @settings(TUNED, max_examples=EXAMPLES)
    @given(job=jobs(solver, target))
    def check(job: KernelJob) -> None:
        builder, loader, problem = TvmBuilder(), TvmLoader(), reference.make(job.config)
        params = builder.propose(job)[-1]
        path = folder / f"{len(list(folder.iterdir()))}.so"
        builder.build(job, params, path)
        arrays = [*problem.inputs, problem.blank()]
        poisoned = loader.load(job, path, [np.full_like(array, np.nan) for array in arrays])
        poisoned.run()
        kernel = loader.load(job, path, arrays)
        del poisoned
        kernel.run()
        assert problem.error(kernel.answer()) <= min(problem.tolerance, loader.error_bound(job))
        check_packing(job, json.loads(params), problem, example)

    check()


def check_packing(
    job: KernelJob, record: Any, problem: reference.Problem, example: ModuleType
) -> None:
    """What an exported database says of the arguments is what the loader does."""
    extents = [extents for *_, extents in record[3]]
    steps = signature.packing_for(job.config, solvers.BY_NAME[job.solver].family, record[3]) or [
        None
    ] * len(extents)
    made = problems.of(job)
    if made is None:
        assert not any(steps)
        return
    packed = made.inputs(*problem.inputs)
    types = [kind for _, kind, _ in record[3]]
    ours = example.arguments(problem.inputs, json.loads(json.dumps(steps)), types)
    for found, expected, how in zip(ours, packed, steps, strict=False):
        # both in double precision, rounded once, summed in another order
        if how and "transform" in how:
            np.testing.assert_array_max_ulp(found, expected, maxulp=1)
        else:
            np.testing.assert_array_equal(found, expected)
    y = problem.expected.astype(np.float32)
    np.testing.assert_array_equal(example.unpack(example.pack(y, steps[-1]), steps[-1], y.shape), y)
    assert [list(array.shape) for array in (*packed, made.output(y))] == extents
    if isinstance(job.config, ConvConfig):
        command, flags = example.parse(job.config.driver())
        assert example.extents(command, flags) == [array.shape for array in (*problem.inputs, y)]


def test_an_answer_beyond_the_solvers_own_bound_is_wrong(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TvmLoader, "error_bound", lambda self, job: 1e-12)
    job, path = KernelJob(conv(), TILE, target), tmp_path / "built.so"
    TvmBuilder().build(job, TvmBuilder().propose(job)[0], path)
    facts = {"config": conv().to_json(), "solver": TILE, "target": target}
    found = measuring.measure("tuna.libraries.tvm.kernel_child:TvmLoader", facts, str(path), 1.0)
    assert found["timing"] is None
    assert 1e-12 < found["error"] < 1e-5
    assert found["tolerance"] == 1e-12


@pytest.mark.parametrize(
    ("config", "solver", "conditions"),
    [(conv(**LAST, in_channels=12, out_channels=20), F4, NATIVE), (gemm(), GEMM, {})],
)
def test_a_worker_builds_checks_and_measures_them(
    bench: Bench, config: Config, solver: str, conditions: dict[str, str]
) -> None:
    item = bench.item(config, solver).model_copy(update={"conditions": conditions})
    built = bench.run(item)
    assert [trial.cause for trial in built.trials] == [None, None]
    measured = bench.run(bench.eval_item(item, [trial.artifact for trial in built.trials]))
    assert [trial.output_tail for trial in measured.trials] == ["", ""]
    assert all(0 < (trial.max_error or 0) < 1e-4 and trial.time_ms for trial in measured.trials)
    assert ("--condition layouts=native" in command_line(bench.library, item)) == bool(conditions)


def digest_of(family: Family) -> str:
    facts = [
        [asdict(point) for point in family.kernel.space(layer)] + [packed]
        for layer, packed in samples(family)
    ]
    assert facts, f"no sample is a layer for the family {family.name}"
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def samples(family: Family) -> Iterator[tuple[problems.AnyLayer, str]]:
    """Layers for a family in each mode, for a CPU with AVX2, with a digest of their packed
    weights."""
    cpu = Machine(32, 16, 32 << 10, 512 << 10, 1, "none")
    if family.kind == "attention":
        yield Attention(ATTENTION, Mode.LAYER, cpu), ""
        return
    if family.kind == "gemm":
        b = np.arange(36 * 40, dtype=np.float32).reshape(36, 40)
        for mode in Mode:
            product = Product(GemmConfig(24, 40, 36), mode, cpu)
            arguments = signature.of(product.config, family, Mode.NATIVE, cpu.floats)
            yield product, digest(problems.packed(b, arguments[1].steps))
        return
    plain = ConvConfig(1, 16, 12, 12, 16, 3, 3, 1, 1)
    strided = replace(plain, conv_stride_h=2, conv_stride_w=2)
    others = (
        replace(plain, out_channels=32),
        ConvConfig(1, 16, 12, 12, 16, 1, 1),
        replace(plain, group_count=16),
        *(replace(strided, direction=direction) for direction in Direction),
    )
    for config, mode in itertools.product(others, Mode):
        sizes = shape.of(config, cpu.floats)
        if family.direction is sizes.direction and family.applies(sizes, mode):
            layer = Layer(sizes, mode, cpu)
            yield layer, packed_weights(family, config, layer)


def packed_weights(family: Family, config: ConvConfig, layer: Layer) -> str:
    if family.packing is None:
        return ""
    count = np.prod(config.weight_shape)
    weights = np.arange(count, dtype=np.float32).reshape(config.weight_shape) % 251
    steps = problems.FamilyProblem(config, family, layer).packing()
    packed = problems.packed(weights, steps[1])
    return digest(np.round(packed * _NO_TIES, 1))


def digest(array: np.ndarray) -> str:
    text = repr(array.shape).encode() + np.ascontiguousarray(array + 0.0).tobytes()
    return hashlib.sha256(text).hexdigest()[:16]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_points_and_packed_weights_change_only_with_the_version(family: Family) -> None:
    assert (kernels.VERSION, digest_of(family)) == (VERSION, DIGESTS.get(family.name)), (
        "the order of a space or of packed weights has changed: raise"
        " tuna.libraries.tvm.kernels.VERSION, and write both here; a new family has a line here"
    )


@pytest.mark.parametrize(
    ("task", "solver", "packed"),
    [
        (TaskConfig(core=conv(), layouts="layer", epilogue=(BIAS, RESIDUAL)), TILE, 1),
        (TaskConfig(core=gemm(), layouts="native", epilogue=(BIAS,)), GEMM, 1),
        (TaskConfig(core=conv(), layouts="native", epilogue=(BIAS, RESIDUAL)), TILE, 5),
    ],
)
def test_what_an_epilogue_adds_is_packed_where_the_answer_is(
    task: TaskConfig, solver: str, packed: int
) -> None:
    (params,) = TvmBuilder().propose(KernelJob(task, solver, CPU))
    arguments = json.loads(params)[3]
    steps = signature.packing_for(task, solvers.BY_NAME[solver].family, arguments)
    assert steps is not None
    assert len(steps) == len(arguments)
    assert sum(step is not None for step in steps) == packed
