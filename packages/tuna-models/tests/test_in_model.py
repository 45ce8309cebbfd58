"""Kernels that are compared inside the model, and the runtimes that are timed beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import nets
import pytest
import tvm
from compiled import TARGET, job_of, planned, run, write, write_answers
from nets import Net

from tuna.configs import ConvConfig, GemmConfig, TaskConfig
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm.kernel_child import TvmBuilder, TvmLoader
from tuna_models.compiler import choosing, passes
from tuna_models.compiler.build import Planned, Record, TaskKernels
from tuna_models.compiler.program import Program
from tuna_models.judging import bounds, inputs, runtimes
from tuna_models.manifest import Class
from tuna_models.reading import importer
from tuna_models.work import checked_build


def records(task: TaskConfig, count: int) -> list[Record]:
    params = TvmBuilder().propose(KernelJob(task, "TvmConvTile", json.dumps(TARGET), {}, 0, count))
    return [Record("TvmConvTile", text) for text in params]


def planned_with(
    module: tvm.IRModule, known: dict[str, list[Record]], *, compare: bool = True
) -> choosing.Variants:
    target = tvm.target.Target(TARGET)
    analysis = passes.analyse(module, target)
    return choosing.variants(
        analysis, TaskKernels(target, {}), known, winograd=True, compare=compare
    )


def timed(folder: Path, module: tvm.IRModule, variants: Sequence[Planned]) -> Mapping[str, float]:
    """Milliseconds of each function of the variants, in turn in one process."""
    built = write(variants[0], TARGET, folder, *variants[1:])
    given = list(inputs.values(bounds.of(module), seed=0).values())
    job = job_of(folder, TARGET)
    write_answers(Path(job.files["answers"]), given, run(variants[0], *given))
    problem = TvmLoader().reference(job)
    assert problem is not None
    kernel = TvmLoader().load(job, built, [*problem.inputs, problem.blank()])
    kernel.run()
    assert problem.error(kernel.answer()) < 1e-6
    return kernel.parts_ms()


def test_records_and_the_prediction_are_timed_inside_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = Net((1, 8, 6, 6))
    model = net.model(net.conv(net.relu(net.conv("x", 8, 8, 1)), 8, 8, 1))
    module = importer.to_relax(model, "net")
    plain = planned_with(module, {})
    assert (len(plain.planned), plain.records) == (1, {})
    tasks = [task for task, _ in plain.planned[0].tasks()]
    task = next(task for task in tasks if task.epilogue == ("bias",))
    other = next(task for task in tasks if task.epilogue == ("bias", "relu"))
    known = {task.key: records(task, 3)[1:], other.key: records(other, 1)}
    whole = planned_with(module, known)
    # the only record of the other one is the predicted kernel
    assert whole.records == {task.key: [0, 1, None]}
    assert whole.kernels.classes[task.key] is Class.EXACT
    made = Program.of(whole.planned, None, tvm.target.Target(TARGET))
    names = [
        made.names[f"timed_{number}"][function]
        for number, plan in enumerate(whole.planned)
        for function, own in plan.functions.items()
        if own.key == task.key
    ]
    assert len(set(names)) == 3, "each kernel is a function of its own"
    parts_ms = timed(tmp_path, module, whole.planned)
    assert parts_ms.keys() == {
        *names,
        *(made.names["timed_0"][name] for name in whole.planned[0].functions),
        *("timed_0", "timed_1", "timed_2"),
    }
    assert all(0 <= time_ms < 1000 for time_ms in parts_ms.values())
    assert sum(parts_ms[name] for name in made.names["timed_0"].values()) <= parts_ms["timed_0"]
    first = planned_with(module, known, compare=False)
    assert (len(first.planned), first.kernels.classes[task.key]) == (1, Class.EXACT)


def test_kernels_of_a_product_of_two_variables_are_compared_on_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = Net((2, 4, 24))
    model = net.model(net.add("MatMul", "x", net.add("Transpose", net.relu("x"), perm=[0, 2, 1])))
    module = importer.to_relax(model, "net")
    task = TaskConfig(core=GemmConfig(4, 4, 24, batch_count=2, trans_b=True), layouts="layer")
    params = TvmBuilder().propose(KernelJob(task, "TvmGemmTile", json.dumps(TARGET), {}, 0, 2))
    found = planned_with(module, {task.key: [Record("TvmGemmTile", params[-1])]})
    assert found.records == {task.key: [0, None]}
    assert {"timed_0", "timed_1"} < timed(tmp_path, module, found.planned).keys()


@pytest.mark.parametrize(
    ("times_ms", "chosen", "left"),
    [
        ({"a": 2.0, "b": 1.0, "c": 3.0}, 1, ["second"]),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, 0, ["first"]),
        ({"a": 2.0, "b": 3.0, "c": 1.0}, None, None),
    ],
)
def test_the_fastest_kernel_inside_the_model_is_chosen(
    times_ms: dict[str, float], chosen: int | None, left: list[str] | None
) -> None:
    places: dict[str, int | None] = {"a": 0, "b": 1, "c": None}
    found = checked_build._fastest(places, times_ms)
    assert (found.times_ms, found.chosen) == (tuple(times_ms.values()), chosen)
    known = {"task": ["first", "second"], "other": ["only"]}
    wanted = {"other": ["only"]} | ({"task": left} if left else {})
    assert checked_build._with_chosen(known, {"task": chosen}) == wanted  # type: ignore[arg-type]


def test_estimates_are_of_the_families_that_have_the_core() -> None:
    target = tvm.target.Target(TARGET)
    for task, _ in planned(nets.residual()).tasks():
        found = choosing.estimates(task, target)
        assert bool(found) is (task.core is not None)
        assert all(cycles > 0 for cycles in found.values())
        assert all(
            name.startswith("TvmGemm" if task.core.kind == "gemm" else "TvmConv")
            for name in found
            if task.core
        )


def test_estimates_count_the_weights_that_a_model_reads_from_memory() -> None:
    """9 MB in direct sums, 17 and 38 MB in Winograd's: F(4 x 4) has the fewest products, but where
    vectors are long, direct sums of 9 MB take less time than its weights."""
    core = ConvConfig(1, 512, 7, 7, 512, 3, 3, pad_h=1, pad_w=1)
    places = {}
    for cpu in ("znver4", "znver3"):
        target = tvm.target.Target({**TARGET, "mcpu": cpu})
        found = choosing.estimates(TaskConfig(core=core, layouts="native"), target)
        order = sorted(found, key=found.__getitem__)
        assert order[0] == "TvmConvWinogradF2", cpu
        places[cpu] = order.index("TvmConvWinogradF4")
    assert places == {"znver4": 2, "znver3": 1}


def test_a_model_that_a_rival_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(runtimes.Absent, match="not installed"):
        runtimes.onnxruntime(nets.residual(), [], threads=1)
    net = Net((1, 8))
    with pytest.raises(runtimes.Absent, match="no PyTorch form of Softmax"):
        runtimes._Network(net.model(net.add("Softmax", "x")))
