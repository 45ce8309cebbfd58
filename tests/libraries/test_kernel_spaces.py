"""The spaces of the CPU kernels: made from the target, the same each time, and recorded as TVM's
own traces."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tvm_layers import DEPTHWISE, POINT, STRIDE, THREE, conv

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig

if find_spec("tvm") is None:
    if os.environ.get("CI") == "true":
        pytest.fail("TVM is not installed: pip install '.[tvm]'")
    pytest.skip("TVM is not installed: pip install '.[tvm]'", allow_module_level=True)

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm_ffi import structural_equal

from tuna.common.cpu import data_caches
from tuna.libraries.tvm import workloads
from tuna.libraries.tvm.kernels import direct, gemm, machine, winograd
from tuna.libraries.tvm.kernels.cook_toom import transforms
from tuna.libraries.tvm.kernels.epilogue import constant_count
from tuna.libraries.tvm.kernels.families import FAMILIES, GEMM
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.stages import Layer
from tuna.libraries.tvm.problems import FamilyProblem, estimate, layer_of, ranked

RESNET = {"in_channels": 64, "out_channels": 64, "in_h": 56, "in_w": 56}
TARGETS = {
    "avx512": {"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 1},
    "znver4": {"kind": "llvm", "mcpu": "znver4", "num-cores": 1},
    "avx2": {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1},
    "neon": {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1", "num-cores": 1},
}
#: The widest register, its number, and what a fused multiply-add of it looks like in assembly.
WIDTHS = {
    "avx512": (64, 32, r"vfmadd\d+ps\b.*%zmm"),
    "znver4": (64, 32, r"vfmadd\d+ps\b.*%zmm"),
    "avx2": (32, 16, r"vfmadd\d+ps\b.*%ymm"),
    "neon": (16, 32, r"fmla\tv\d+\.4s"),
}
SPILL = r"(?:vmovups|vmovaps)\t%[yz]mm\d+, -?\d*\(%rsp\)|str\tq\d+, \[sp|stp\tq\d+, q\d+, \[sp"

#: From a prefetch to the end of its loop, and what stores a vector.
LOOP = re.compile(r"\t(?:prefetch|prfm).*?\n\t(?:j[a-z]+|b\.[a-z]+|cbn?z|tbn?z)\t", re.DOTALL)
STORE = r"\tvmov[au]ps\t%[yz]mm\d+, .*\)\n|\tst[rpu]+\tq\d+"


def target_of(name: str) -> Any:
    return tvm.target.Target(TARGETS[name])


def layer_for(target: Any, config: Config, mode: Mode = Mode.NATIVE) -> Layer:
    layer = layer_of(config, mode, target)
    assert layer is not None
    return layer


@pytest.mark.parametrize(
    "changes",
    [{"mode": "trans"}, {"direction": "B", "mode": "trans"}, {"data_type": "FP16"}, THREE],
)
def test_what_is_no_convolution_in_fp32_has_no_kernel(changes: dict[str, Any]) -> None:
    assert layer_of(conv(**changes), Mode.LAYER, target_of("avx2")) is None


def assembly(target: Any, module: Any) -> str:
    return str(tvm.tirx.build(module, target=target).inspect_source("asm"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_tile_fills_the_registers_of_its_target_and_is_not_spilled(name: str) -> None:
    """A spilled sum is a vector that is stored on the stack; TVM itself stores one there when it
    calls for memory."""
    target = target_of(name)
    cpu = machine.from_target(target)
    vector_bytes, registers, pattern = WIDTHS[name]
    assert (cpu.vector_bytes, cpu.registers) == (vector_bytes, registers)
    layer = layer_for(target, conv(**RESNET))
    family, index = ranked(layer, [FAMILIES["direct"]])[0]
    point = family.kernel.space(layer)[index]
    text = assembly(target, FamilyProblem(conv(**RESNET), family, layer).candidate(index).mod)
    sums = point.rows * point.columns * point.blocks
    assert 8 <= sums <= registers - 2
    assert len(re.findall(pattern, text)) >= sums
    assert len(re.findall(SPILL, text)) <= 1


SMALL = {"in_channels": 32, "out_channels": 32, "in_h": 16, "in_w": 16}
#: A small layer for each family.
CROSS = {
    "direct": {**SMALL, **STRIDE},
    "depthwise": {**SMALL, "group_count": 32},
    "pointwise": {**SMALL, **POINT},
    "winograd2": SMALL,
    "backward_data": {**SMALL, **STRIDE, "direction": "B"},
    "backward_weights": {**SMALL, "direction": "W"},
}


def _targets_and_kinds() -> list[object]:
    """All pairs; each kind with one target, the targets in turn, in the short suite."""
    names, kinds = ["avx512", "avx2", "neon"], [*CROSS, "gemm"]
    return [
        pytest.param(
            name, kind, marks=[] if at % len(names) == place else pytest.mark.drill(only=True)
        )
        for at, kind in enumerate(kinds)
        for place, name in enumerate(names)
    ]


@pytest.mark.parametrize(("name", "kind"), _targets_and_kinds())
def test_every_family_uses_the_widest_vectors_of_a_cpu_that_is_not_this_one(
    name: str, kind: str
) -> None:
    """Cross-built and disassembled: multiply-adds of that width, and fewer values stored on the
    stack than those."""
    target = target_of(name)
    if kind == "gemm":
        config = GemmConfig(m=24, n=128, k=64)
        product = gemm.Product(config, Mode.NATIVE, machine.from_target(target))
        module = FamilyProblem(config, GEMM, product).candidate(0).mod
    else:
        mode = Mode.LAYER if kind in ("pointwise", "backward_weights") else Mode.NATIVE
        layer = layer_for(target, conv(**CROSS[kind]), mode)
        module = FamilyProblem(conv(**CROSS[kind]), FAMILIES[kind], layer).candidate(0).mod
    text = assembly(target, module)
    products = len(re.findall(WIDTHS[name][2], text))
    assert products >= 8
    assert len(re.findall(SPILL, text)) < products
    if kind.startswith("winograd"):
        loop = LOOP.search(text)
        assert loop is not None, "weights are asked for ahead"
        assert len(re.findall(WIDTHS[name][2], loop[0])) >= 8
        assert not re.search(STORE, loop[0]), "the sums stay in registers"


FEW = {"in_channels": 64, "out_channels": 64, "in_h": 7, "in_w": 7}


def on_cores(target: Any, config: Config, cores: int, mode: Mode = Mode.NATIVE) -> Layer:
    layer = layer_for(target, config, mode)
    return replace(layer, machine=replace(layer.machine, cores=cores, l2_bytes=1 << 20))


@pytest.mark.parametrize("name", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize(("kind", "changes"), [("winograd2", {}), ("direct", POINT)])
def test_on_two_cores_sums_stay_in_registers_beside_a_prefetch(
    name: str, kind: str, changes: dict[str, Any]
) -> None:
    """In a function for threads LLVM does not know that the weights are not the sums: a prefetch
    that may read the sums would have them stored at each step."""
    target, config = target_of(name), conv(**FEW, **changes)
    problem = FamilyProblem(config, FAMILIES[kind], on_cores(target, config, 2))
    text = assembly(target, problem.candidate(0).mod)
    loops = [loop for loop in LOOP.findall(text) if len(re.findall(WIDTHS[name][2], loop)) >= 8]
    assert loops, "weights are asked for ahead"
    assert not any(re.search(STORE, loop) for loop in loops), "the sums stay in registers"


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("direct", conv(**FEW)),
        ("direct", conv(**RESNET)),
        ("direct", conv(**RESNET, **STRIDE)),
        ("winograd2", conv(**FEW)),
        ("winograd4", conv(**RESNET)),
        ("depthwise", conv(in_channels=48, out_channels=48, group_count=48)),
    ],
)
def test_cores_share_a_convolution_in_one_parallel_region(kind: str, config: ConvConfig) -> None:
    """Each core copies and transforms the input that it needs: none waits for another one, and
    nothing crosses from core to core."""
    layer = on_cores(target_of("avx512"), config, 2)
    text = str(FamilyProblem(config, FAMILIES[kind], layer).candidate(0).mod)
    assert text.count("T.parallel") == 1


def test_the_last_of_merged_groups_may_have_fewer_blocks() -> None:
    """37 groups of 24 channels are 18 pairs of three blocks and one of two, not one of all: a block
    has products with 48 channels instead of 888."""
    layer = layer_for(target_of("avx512"), conv(in_channels=888, out_channels=888, group_count=37))
    sizes = layer.shape
    assert (sizes.merged, sizes.group_count, sizes.out_blocks) == (2, 19, 56)
    assert {point.blocks for point in FAMILIES["direct"].kernel.space(layer)} == {1}


def test_cores_share_the_rows_of_few_images() -> None:
    config = conv(in_channels=16, out_channels=16, group_count=16, in_h=56, in_w=56)
    kernel = FAMILIES["depthwise"].kernel
    one, two = (on_cores(target_of("avx512"), config, cores) for cores in (1, 2))
    cycles = [kernel.work(layer, kernel.space(layer)[0]).cycles() for layer in (one, two)]
    assert cycles[0] == 2 * cycles[1]


def test_cores_share_the_only_row_of_a_sound() -> None:
    row = {"in_h": 1, "in_w": 6400, "pad_h": 0, "fil_h": 1, "fil_w": 11, "pad_w": 5}
    config = conv(in_channels=16, out_channels=16, **row)
    kernel = FAMILIES["direct"].kernel
    one, two = (on_cores(target_of("avx512"), config, cores) for cores in (1, 2))
    cycles = [kernel.work(layer, kernel.space(layer)[0]).cycles() for layer in (one, two)]
    assert 0.45 < cycles[1] / cycles[0] < 0.6


def test_a_core_asks_for_the_weights_that_it_reads_next() -> None:
    """Winograd's next product has 32 panels, of which each of two cores reads 16; direct sums read
    all channels of a block group before the next group."""
    config = conv(in_channels=512, out_channels=512, in_h=7, in_w=7)
    layer = on_cores(target_of("avx512"), config, 2)
    ahead = FAMILIES["winograd2"].kernel.space(layer)[0].blocks
    assert winograd.groups_of(layer, 2) == 2
    for panel, following in ((0, ahead), (16 - ahead, 32), (16, 16 + ahead), (32 - ahead, 32 + 16)):
        assert place(winograd._following(layer, 2, numbers(0, 0, panel)))[2] == following
    groups = FAMILIES["direct"].kernel.space(layer)[0].blocks
    for channel, following in ((0, (4, 1)), (30, (4, 31)), (31, (4 + groups - 1, 32))):
        assert place(direct._following(layer, numbers(4, channel)))[:2] == following


def test_tiles_of_a_product_ask_for_all_lines_of_the_next_panels() -> None:
    """Each of the first tiles of rows asks for its part of the panel in the next group's place."""
    product = on_cores(target_of("avx512"), GemmConfig(128, 768, 384), 2)
    point, asked = gemm.space(product)[0], set[tuple[int, ...]]()
    for row in range(0, product.config.m, point.rows):
        for step in range(0, product.steps, point.unroll):
            condition, index = gemm._following(product, numbers(row, 0, step))
            assert tvm.sym.Analyzer().can_prove(condition)
            asked.add(place(index))
    assert asked == {(point.blocks * point.group, line, 0) for line in range(product.steps)}


def numbers(*values: int) -> list[Any]:
    return [tvm.tirx.const(value, "int64") for value in values]


def place(index: list[Any]) -> tuple[int, ...]:
    return tuple(int(tvm.sym.Analyzer().simplify(value)) for value in index)


@pytest.mark.parametrize("size", [7, 56])
def test_estimates_of_all_families_are_of_the_busiest_core(size: int) -> None:
    """In one currency: else the family that is divided by the number of cores looks better."""
    config = conv(in_channels=64, out_channels=64, in_h=size, in_w=size)
    one, two = (on_cores(target_of("avx512"), config, cores) for cores in (1, 2))
    for name in ("direct", "winograd2", "winograd4"):
        family = FAMILIES[name]
        least = [
            min(estimate(family, layer, point) for point in family.kernel.space(layer))
            for layer in (one, two)
        ]
        assert 0.45 < least[1] / least[0] < 0.65


@pytest.mark.parametrize(("rows", "columns"), [(1500, 384), (3136, 96), (49, 96), (1, 4096)])
def test_two_cores_share_a_product_evenly_whatever_its_columns(rows: int, columns: int) -> None:
    one, two = (on_cores(target_of("avx512"), GemmConfig(rows, columns, 1536), n) for n in (1, 2))
    least, best = (estimate(GEMM, each, gemm.space(each)[0]) for each in (two, one))
    assert 0.45 < least / best < 0.55


def test_more_cores_halve_sums_and_streams_until_the_memory_is_full() -> None:
    """Half of the shorter of both is hidden; what streams from memory does not from L3 too."""
    work = machine.Work(sums=1000.0, around=100.0, streamed=2400.0)
    assert work.cycles() == 1000 + 200 / 2 + 100
    assert work.cycles(cold_bytes=4000.0) == 1000 + 500 / 2 + 100
    assert work.cycles(cold_bytes=16000.0) == 2000 + 1000 / 2 + 100
    assert work.cycles(cold_bytes=16000.0, cores=2) == 1000 + 1000 / 2 + 100
    assert work.cycles(16000.0, cores=64) == work.cycles(16000.0, cores=4)


def test_caches_of_a_cpu_that_is_not_this_one_are_small() -> None:
    found = machine.from_target(target_of("neon"))
    assert (found.l1_bytes, found.l2_bytes) == (32 << 10, 512 << 10)


@pytest.mark.parametrize("changes", [{}, POINT, STRIDE], ids=["3x3", "1x1", "3x3/2"])
@pytest.mark.parametrize("size", [7, 14, 28, 56])
def test_avx2_has_a_tile_that_hides_latency_whatever_the_width(
    size: int, changes: dict[str, Any]
) -> None:
    """Ten or twelve sums in two blocks: fewer wait for the multiply-adds before them, one block for
    its loads."""
    family = FAMILIES["direct"]
    best = family.kernel.space(
        layer_for(target_of("avx2"), conv(**RESNET | {"in_h": size, "in_w": size}, **changes))
    )[0]
    assert best.blocks == 2
    assert 10 <= best.rows * best.columns * best.blocks <= 12


def test_sums_of_bytes_leave_registers_for_the_numbers_of_their_epilogue() -> None:
    layer = conv(**RESNET | {"out_channels": 256, "data_type": "INT8"}, **POINT)
    epilogue = ("dequantize", "quantize", "residual", "quantize")
    task = TaskConfig(core=layer, layouts="native", epilogue=epilogue)
    best = direct.space(layer_for(target_of("znver4"), task))[0]
    assert best.rows * best.columns * best.blocks + constant_count(epilogue) <= 32


@pytest.mark.parametrize("mode", Mode)
def test_a_space_is_small_and_the_same_each_time(mode: Mode) -> None:
    for config in (conv(**RESNET), conv(**RESNET, **POINT), conv(**DEPTHWISE)):
        layer = layer_for(target_of("avx512"), config, mode)
        for family in FAMILIES.values():
            if family.applies(layer.shape, mode):
                points = family.kernel.space(layer)
                assert points == family.kernel.space(layer)
                assert 1 <= len(points) <= 16
                assert len(set(points)) == len(points)


def test_the_ranking_begins_with_the_best_of_each_family() -> None:
    layer = layer_for(target_of("avx512"), conv(**RESNET))
    order = ranked(layer)
    assert {(family.name, index) for family, index in order[:3]} == {
        (f"winograd{m}", 0) for m in (2, 4, 6)
    }
    assert {family.name for family, _ in order} == {"direct", "winograd2", "winograd4", "winograd6"}
    assert {family.name for family, _ in ranked(layer, [FAMILIES["direct"]])} == {"direct"}


def test_weights_that_come_from_memory_make_smaller_ones_worth_more_products() -> None:
    """On 512@7 F(4 x 4) has half of F(2 x 2)'s products and 2.25 times its bytes."""
    layer = layer_for(target_of("avx2"), conv(in_channels=512, out_channels=512, in_h=7, in_w=7))
    assert ranked(layer)[0][0].name == "winograd4"
    assert ranked(layer, cold_weights=True)[0][0].name == "winograd2"


def test_a_record_of_a_candidate_builds_it_again(tmp_path: Path) -> None:
    """Without this package: the trace and the workload are TVM's own JSON."""
    target, layer = target_of("avx512"), layer_for(target_of("avx512"), conv())
    family = FAMILIES["winograd2"]
    schedule = FamilyProblem(conv(), family, layer).candidate(2)
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    workload = database.commit_workload(family.kernel.workload(layer))
    arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod)
    database.commit_tuning_record(
        ms.database.TuningRecord(schedule.trace, workload, [1e-3], target, arguments)
    )
    again = ms.database.JSONDatabase(work_dir=str(tmp_path)).query_schedule(
        family.kernel.workload(layer), target, "main"
    )
    assert again is not None
    assert structural_equal(again.mod, schedule.mod)
    (record,) = (tmp_path / "database_tuning_record.json").read_text().splitlines()
    instructions, decisions = json.loads(record)[1][0]
    assert instructions[0][0] == "SampleCategorical"
    assert decisions[0] == [0, 2]


@pytest.mark.parametrize("outputs", [2, 4, 6])
def test_the_transforms_compute_a_convolution_exactly(outputs: int) -> None:
    """In fractions: y = AT [(G g) * (BT d)] is the sum over the taps, with no error at all."""
    found, size = transforms(outputs, 3), outputs + 2
    data = [Fraction(7 * i * i - 3 * i + 2, 5) for i in range(size)]
    taps = [Fraction(2), Fraction(-3, 7), Fraction(11)]

    def times(matrix: Any, vector: list[Fraction]) -> list[Fraction]:
        return [
            sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in matrix
        ]

    products = [
        a * b for a, b in zip(times(found.filter, taps), times(found.input, data), strict=True)
    ]
    assert times(found.output, products) == [
        sum(data[i + j] * taps[j] for j in range(3)) for i in range(outputs)
    ]


def test_there_are_points_for_tiles_of_six_at_most() -> None:
    with pytest.raises(ValueError, match=r"F\(7, 3\) needs 8 points"):
        transforms(7, 3)


def test_caches_are_read_as_linux_tells_them(tmp_path: Path) -> None:
    for index, facts in enumerate(
        (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M"))
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in zip(("level", "type", "size"), facts, strict=True):
            (folder / name).write_text(value + "\n")
    assert data_caches(tmp_path) == {1: 48 << 10, 2: 2 << 20}
    assert data_caches(tmp_path / "none") == {}


def test_only_cpu_targets_have_kernels() -> None:
    with pytest.raises(ValueError, match="llvm target, got c"):
        machine.from_target(tvm.target.Target({"kind": "c"}))


def test_a_bare_layer_is_the_same_function_as_in_a_model() -> None:
    """So that a record of the layer is found for it: Relax writes its shapes with 64 bits."""
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 8, 8, 8), "float32"))
    w = relax.Var("w", relax.TensorType((8, 8, 3, 3), "float32"))
    with builder.function("main", [x, w]):
        builder.emit_func_output(builder.emit(relax.op.nn.conv2d(x, w, padding=1)))
    model = relax.transform.LegalizeOps()(builder.get())
    (function,) = (f for name, f in model.functions.items() if name.name_hint != "main")
    bare = workloads.make("TvmConvDirectNCHW", conv())["main"]
    assert structural_equal(
        function.with_attr("global_symbol", "main").with_attr("tirx.noalias", True), bare
    )
