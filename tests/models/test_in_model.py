"""Kernels that are compared inside the model, and the runtimes that are timed beside it."""

from __future__ import annotations

import json
from typing import Any

import nets
import pytest
import tvm
from nets import Net
from test_plan import TARGET

from tuna.configs import ConvConfig, GemmConfig, TaskConfig
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm.kernel_child import TvmBuilder
from tuna.models import build, choosing, importer, inputs, runtimes
from tuna.models.build import Record
from tuna.models.manifest import Class


def records(task: TaskConfig, count: int) -> list[Record]:
    params = TvmBuilder().propose(KernelJob(task, "TvmConvTile", json.dumps(TARGET), {}, 0, count))
    return [Record("TvmConvTile", text) for text in params]


def drawn(module: tvm.IRModule) -> list[Any]:
    return list(inputs.values(inputs.of(module), seed=0).values())


def test_the_fastest_inside_the_model_is_chosen_among_records_and_the_prediction() -> None:
    net, target = Net((1, 8, 6, 6)), tvm.target.Target(TARGET)
    model = net.model(net.conv(net.relu(net.conv("x", 8, 8, 1)), 8, 8, 1))
    module = importer.to_relax(model, "net")
    plain, none = choosing.choose(module, {}, target, winograd=True, compare_on=drawn(module))
    assert none == {}
    planned = build.plan(module, plain, target)
    task = next(task for task, _ in planned.tasks() if task.epilogue == ("bias",))
    other = next(task for task, _ in planned.tasks() if task.epilogue == ("bias", "relu"))
    known = {task.key: records(task, 3)[1:], other.key: records(other, 1)}
    kernels, compared = choosing.choose(
        module, known, target, winograd=True, compare_on=drawn(module)
    )
    assert list(compared) == [task.key]  # the only record of the other one is the predicted kernel
    found = compared[task.key]
    assert len(found.times_ms) == 3
    assert all(0 < time_ms < 1000 for time_ms in found.times_ms)
    fastest = found.times_ms.index(min(found.times_ms))
    assert found.chosen == (fastest if fastest < 2 else None)
    kernels(task)
    assert kernels.classes[task.key] is (
        Class.EXACT if found.chosen is not None else Class.PREDICTED
    )
    first, nothing = choosing.choose(module, known, target, winograd=True, compare_on=None)
    first(task)
    assert (first.classes[task.key], nothing) == (Class.EXACT, {})


def test_kernels_of_a_product_of_two_variables_are_compared_on_both() -> None:
    net, target = Net((2, 4, 24)), tvm.target.Target(TARGET)
    model = net.model(net.add("MatMul", "x", net.add("Transpose", net.relu("x"), perm=[0, 2, 1])))
    module = importer.to_relax(model, "net")
    task = TaskConfig(core=GemmConfig(4, 4, 24, batch_count=2, trans_b=True), layouts="layer")
    params = TvmBuilder().propose(KernelJob(task, "TvmGemmTile", json.dumps(TARGET), {}, 0, 2))
    known = {task.key: [Record("TvmGemmTile", params[-1])]}
    _, compared = choosing.choose(module, known, target, winograd=True, compare_on=drawn(module))
    assert len(compared[task.key].times_ms) == 2


def test_estimates_are_of_the_families_that_have_the_core() -> None:
    target = tvm.target.Target(TARGET)
    module = importer.to_relax(nets.residual(), "net")
    kernels, _ = choosing.choose(module, {}, target, winograd=True, compare_on=None)
    for task, _ in build.plan(module, kernels, target).tasks():
        found = choosing.estimates(task, target)
        assert bool(found) is (task.core is not None)
        assert all(cycles > 0 for cycles in found.values())
        assert all(
            name.startswith("TvmGemm" if task.core.kind == "gemm" else "TvmConv")
            for name in found
            if task.core
        )


def test_estimates_count_the_weights_that_a_model_reads_from_memory() -> None:
    """9 MB in direct sums, 17 to 134 MB in Winograd's: on few pixels that decides."""
    core = ConvConfig(1, 512, 7, 7, 512, 3, 3, pad_h=1, pad_w=1)
    found = choosing.estimates(TaskConfig(core=core, layouts="native"), tvm.target.Target(TARGET))
    assert min(found, key=found.__getitem__) == "TvmConvTile"


def test_a_model_that_a_rival_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(runtimes.Absent, match="not installed"):
        runtimes.onnxruntime(nets.residual(), [], threads=1)
    net = Net((1, 8))
    with pytest.raises(runtimes.Absent, match="no PyTorch form of Softmax"):
        runtimes._Network(net.model(net.add("Softmax", "x")))
