"""A model is recognised, planned in blocks of channels, and computes what ONNX's reference does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import pytest
import tvm
from compiled import HERE, TARGET, error_of, planned, run
from nets import NETS, Net
from tvm import relax

from tuna.configs import ConvConfig, TaskConfig
from tuna.configs.values import Direction
from tuna.db.configs import computed_columns
from tuna.errors import BadInput
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm import function_texts, problems
from tuna.libraries.tvm.kernel_child import TvmBuilder
from tuna.libraries.tvm.kernels.shape import Mode
from tuna_models import names
from tuna_models.compiler import build, graph
from tuna_models.compiler.build import Record, TaskKernels
from tuna_models.judging import bounds, inputs
from tuna_models.manifest import Class
from tuna_models.reading import importer


@pytest.mark.parametrize("name", NETS)
def test_a_built_model_answers_as_the_reference_of_onnx(name: str) -> None:
    model = NETS[name]()
    known = [one["bounds"] for one in bounds.of(importer.to_relax(model, "net"))]
    wanted = [
        one | {"bounds": found} for one, found in zip(importer.inputs_of(model), known, strict=True)
    ]
    given = inputs.values(wanted, seed=3)
    # its answer is in fp16
    bound = 1e-3 if name == "activated" else 1e-5
    assert error_of(model, planned(model, target=HERE), given, HERE) < bound


def epilogues(found: build.Planned) -> list[tuple[str, ...]]:
    """Of each call of a convolution."""
    return [
        task.epilogue
        for task, count in found.tasks()
        for _ in range(count)
        if isinstance(task.core, ConvConfig)
    ]


def test_a_residual_network_stays_in_blocks_from_its_input_to_its_classifier() -> None:
    found = planned(nets.residual())
    assert sorted(epilogues(found)) == sorted(
        [("bias", "relu")] * 3 + [("bias", "residual", "relu")] * 2 + [("bias",)]
    )
    others = {task.name: count for task, count in found.tasks() if task.core is None}
    assert set(others) == {"max_pool", "global_average", "reshape"}


def test_relu6_becomes_part_of_the_convolution_though_onnx_has_it_as_a_clip() -> None:
    found = planned(nets.inverted())
    assert epilogues(found) == [("bias", "relu6")] * 3 + [("bias", "residual")]
    assert {task.name for task, _ in found.tasks() if task.core is None} == {"from_blocks"}


def test_normalisation_and_relu6_in_fp16_become_part_of_the_convolution() -> None:
    net = Net((1, 3, 8, 8), kind=np.float16)
    fused = net.relu6(net.conv("x", 3, 20, 3))
    parts = [net.constant(np.full(3, 0.5)) for _ in range(4)]
    bare = net.relu6(net.add("BatchNormalization", "x", *parts))
    plan = planned(net.model(fused, bare))
    assert epilogues(plan) == [("bias", "relu6", "to_fp16")]
    x = net.random.normal(size=(1, 3, 8, 8)).astype(np.float16)
    _, alone = run(plan, x)
    right = np.clip((x.astype(np.float64) - 0.5) / np.sqrt(0.5 + 1e-5) * 0.5 + 0.5, 0, 6)
    assert alone.dtype == np.float16
    assert np.abs(alone - right).max() < 2e-3


@pytest.mark.parametrize("net", [nets.squeezed, nets.ragged])
def test_operators_on_single_values_and_gates_for_channels_work_on_blocks(net: Any) -> None:
    names = {task.name: count for task, count in planned(net()).tasks() if task.core is None}
    assert names["from_blocks"] == 1, "the answer"
    assert names["to_blocks"] == 1, "what the average wrote"


def test_a_sum_that_others_read_too_is_written_before_its_relu() -> None:
    assert epilogues(planned(nets.shared())) == [
        ("bias",),
        ("bias", "residual"),
        ("bias", "residual"),
    ]


def test_activations_in_any_form_and_casts_become_part_of_a_core() -> None:
    tasks = [task for task, _ in planned(nets.activated()).tasks() if task.core is not None]
    assert [task.epilogue for task in tasks] == [
        ("bias", "sigmoid"),
        ("bias", "silu", "residual"),
        ("gelu",),
        ("gelu_tanh",),
        ("tanh",),
        ("bias", "gelu"),
        ("bias", "hard_swish", "to_fp16"),
    ]


def test_an_activation_whose_parts_are_read_elsewhere_stays_an_operator() -> None:
    net = Net((1, 8, 6, 6))
    y = net.conv("x", 8, 8, 1)
    gate = net.add("Sigmoid", y)
    assert epilogues(planned(net.model(net.add("Mul", gate, y), gate))) == [("bias",)]


@pytest.mark.parametrize("rest", [1, 20])
def test_factors_and_summands_behind_an_activation_are_a_step_of_the_kernel(rest: int) -> None:
    net = Net((2, 8, 6, 6))

    def affine(y: str) -> Any:
        numbers = net.random.uniform(0.5, 1.5, (2, rest, 1, 1))
        scale, shift = map(net.constant, numbers)
        return net.add("Add", net.add("Mul", scale, y), shift)

    x = affine(net.relu(net.conv("x", 8, 20, 1)))
    y = affine(net.add("Add", net.conv(x, 20, 20, 3, norm=False), x))
    model = net.model(net.conv(net.add("Mul", y, net.constant(2.0)), 20, 20, 1))
    found = planned(model)
    assert epilogues(found) == [("bias", "relu", "affine"), ("residual", "affine"), ("bias",)]
    given = {"x": np.random.default_rng(2).normal(0, 1, (2, 8, 6, 6)).astype(np.float32)}
    assert error_of(model, found, given) < 1e-5


def test_transposed_convolutions_are_backward_data_with_an_epilogue() -> None:
    tasks = [
        task for task, _ in planned(nets.enlarged()).tasks() if isinstance(task.core, ConvConfig)
    ]
    assert all(task.core.direction is Direction.BACKWARD_DATA for task in tasks)
    assert [task.epilogue for task in tasks] == [("bias", "relu"), ("sigmoid",), ("bias",), ()]


def test_transposed_convolutions_without_overlaps_are_of_one_pixel() -> None:
    found = planned(nets.upsampled())
    assert [task.label for task, _ in found.tasks() if isinstance(task.core, ConvConfig)] == [
        "conv 2x8x5x7 k20 1x1 s1 p0 NCHW fp32 F +bias native",
        "conv 2x20x5x7 k128 1x1 s1 p0 NCHW fp32 F +bias+relu+depth_to_space_2x2 native",
        "conv 2x20x10x14 k12 1x1 s1 p0 NCHW fp32 F +bias+sigmoid+depth_to_space_3x2 native",
    ]
    assert [name for name in found.calls if "blocks" in name] == ["to_blocks"]


def test_a_transformer_is_products_and_attention() -> None:
    tasks = {
        task.label: count
        for task, count in planned(nets.attention()).tasks()
        if task.core is not None
    }
    assert tasks == {
        "gemm 12x10x10 NN fp32 +bias native": 3,
        "attention b3 2x4x4x5 BSHD fp32 layer": 1,
        "gemm 12x10x10 NN fp32 +bias+residual native": 1,
        "gemm 12x14x10 NN fp32 +bias+gelu native": 1,
        "gemm 12x10x14 NN fp32 +bias+residual native": 1,
    }


def test_functions_without_a_core_are_tasks_by_their_text() -> None:
    first, second = planned(nets.residual()), planned(nets.residual())
    named = {task.body: task for task, _ in first.tasks() if task.core is None}
    assert set(named) == set(first.bodies) == set(second.bodies)
    assert all(len(task.structure) == 16 for task in named.values())
    text = next(iter(first.bodies.values()))
    assert function_texts.to_text(function_texts.module_of(text)["main"]) == text
    with pytest.raises(BadInput, match="cannot be read"):
        function_texts.module_of("@T.prim_func")


def test_names_of_functions_and_tasks_are_bounded_however_many_operators_they_have() -> None:
    """TVM joins the names of all operators that it fuses, here a polynomial by Horner's rule."""
    net = Net((1, 3, 5, 5))
    x, scale = net.add("Tanh", "x"), net.constant(0.5)
    y = net.add("Mul", x, scale)
    for step in range(24):
        y = net.add("Mul", net.add("Add", y, net.constant(1.0 / (step + 1))), x)
    model = net.model(y)
    found = planned(model)
    longest = max(map(len, found.functions))
    assert 80 < longest <= names.MAX_CHARS
    assert all(len(task.name) <= names.MAX_CHARS for task in found.functions.values())
    for task in found.functions.values():
        computed_columns(task)
    given = {"x": net.random.normal(size=net.shape).astype(np.float32)}
    assert error_of(model, found, given) < 1e-5


def test_a_name_that_is_short_enough_stays_and_longer_ones_stay_different() -> None:
    name = "add_" * 100
    assert names.bounded(name[: names.MAX_CHARS]) == name[: names.MAX_CHARS]
    assert names.bounded(f"{name}1") != names.bounded(f"{name}2")
    assert len(names.bounded(name, 20)) == 20


def test_a_record_is_applied_and_one_that_cannot_be_is_named() -> None:
    target = tvm.target.Target(TARGET)
    tasks = [task for task, _ in planned(nets.residual()).tasks() if task.core is not None]
    good, bad = tasks[1], tasks[2]
    job = KernelJob(good, "TvmConvTile", json.dumps(TARGET), {}, 0, 2)
    params = TvmBuilder().propose(job)[-1]
    kernels = TaskKernels(
        target, {good.key: Record("TvmConvTile", params), bad.key: Record("TvmConvTile", "[]")}
    )
    planned(nets.residual(), kernels)
    assert kernels.classes[good.key] is Class.EXACT
    assert kernels.classes[bad.key] is Class.PREDICTED
    assert list(kernels.refused) == [bad.key]


def test_the_params_of_a_similar_task_are_used_where_its_space_has_them() -> None:
    target = tvm.target.Target(TARGET)
    small, large = (
        TaskConfig(core=ConvConfig(batch, 16, 8, 8, 32, 1, 1), layouts="native", epilogue=("bias",))
        for batch in (1, 4)
    )
    space = problems.with_family(small, "direct", Mode.NATIVE, target)
    assert space is not None
    params = TvmBuilder().propose(KernelJob(small, "TvmConvTile", json.dumps(TARGET), {}, 0, 3))
    kernels = TaskKernels(target, {large.key: Record("TvmConvTile", params[2], similar=True)})
    found = kernels(large)
    assert kernels.classes[large.key] is Class.NEAREST
    other = problems.with_family(large, "direct", Mode.NATIVE, target)
    assert found is not None
    assert other is not None
    index = other.family.kernel.space(other.layer).index(space.family.kernel.space(space.layer)[2])
    assert str(found.function.script()) == str(other.candidate(index).mod["main"].script())
    damaged = TaskKernels(target, {large.key: Record("TvmConvTile", "[]", similar=True)})
    assert damaged(large) is not None
    assert damaged.classes[large.key] is Class.PREDICTED


def test_all_operators_that_cannot_be_imported_are_named_at_once() -> None:
    net = Net((1, 8))
    x = net.add("Mystery", net.add("Relu", "x"), domain="com.example")
    model = net.model(
        net.add("Bernoulli", net.add("Mystery", x, domain="com.example")), check=False
    )
    model.graph.node[-1].name = "last"
    with pytest.raises(
        BadInput, match=r"cannot be imported: Bernoulli \(1: last\), com\.example\.Mystery \(2: "
    ):
        importer.to_relax(model, "net.onnx")


def test_an_input_without_a_shape_has_to_be_given_one(tmp_path: Path) -> None:
    net, path = Net(("n", 8)), tmp_path / "net.onnx"  # type: ignore[arg-type]
    onnx.save(net.model(net.relu("x")), path)
    with pytest.raises(
        BadInput, match=r"net\.onnx has open extents in the shape of its input x=n,8\."
    ) as refused:
        importer.read(path, {})
    assert refused.value.hint == "give them: --shape n=N; --batch N is the first of every input"
    for given in ({"shapes": {"x": [4, 8]}}, {"shapes": {"n": [4]}}, {"shapes": {}, "batch": 4}):
        (value,) = importer.real_inputs(importer.read(path, **given))
        assert [extent.dim_value for extent in value.type.tensor_type.shape.dim] == [4, 8]
    with pytest.raises(BadInput, match="has 2 dimensions, not 1"):
        importer.read(path, {"x": [4]})
    with pytest.raises(BadInput, match="no input z") as refused:
        importer.read(path, {"z": [4]})
    assert refused.value.hint == "inputs: x; open extents: n"


def test_all_that_is_in_the_way_of_an_import_is_in_one_message(tmp_path: Path) -> None:
    path, rows = tmp_path / "net.onnx", ["batch", "length"]
    net = Net(())
    y = net.add("Mystery", "ids", domain="own")
    inputs = [("ids", 7, rows), ("mask", 7, rows), ("image", 1, [1, 3, None, None])]
    onnx.save(net.model(net.add("Bernoulli", y), inputs=inputs, check=False), path)
    with pytest.raises(BadInput) as refused:
        importer.read(path, {})
    assert (
        str(refused.value)
        == "net.onnx has operators that cannot be imported: Bernoulli (1: v1), own.Mystery (1: v0);"
        " and open extents in the shape of its inputs ids=batch,length and mask=batch,length and"
        " image=1,3,?,?."
    )
    assert (
        refused.value.hint
        == "give them: --shape batch=N --shape length=N --shape image=1,3,N,N; --batch N is the"
        " first of every input; write that part of the network with other operators, and export it"
        " again"
    )


def test_hints_for_open_extents_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    net, path = Net(("2 * n", 8)), tmp_path / "net.onnx"  # type: ignore[arg-type]
    onnx.save(net.model(net.relu("x")), path)
    with pytest.raises(BadInput) as refused:
        importer.read(path, {})
    assert refused.value.hint.startswith("give them: --shape '2 * n=N'; ")


def test_what_one_input_says_of_an_extent_holds_for_all(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(nets.tokens("batch", "length"), path)

    def shapes(**given: Any) -> list[list[int]]:
        return [one["shape"] for one in importer.inputs_of(importer.read(path, **given))]

    expected = [[3, 6], [3, 6], [3, 6], [3]]
    assert shapes(shapes={"ids": [3, 6]}) == expected
    assert shapes(shapes={"batch": [3], "length": [6]}) == expected
    assert shapes(shapes={"length": [6]}, batch=3) == expected
    with pytest.raises(BadInput, match="input mask has the extent length, which is 6, not 5"):
        shapes(shapes={"ids": [3, 6], "mask": [3, 5]})


def test_an_input_that_is_no_tensor_of_numbers_is_refused(tmp_path: Path) -> None:
    net, path = Net(()), tmp_path / "net.onnx"
    onnx.save(
        net.model(
            net.add("Identity", "x"), inputs=[("x", onnx.TensorProto.STRING, [1])], check=False
        ),
        path,
    )
    with pytest.raises(BadInput, match=r"net\.onnx has an input x of type string"):
        importer.read(path, {})


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(b"not a model")
    with pytest.raises(BadInput, match=r"net\.onnx is not an ONNX model"):
        importer.read(path, {})


def test_tasks_of_a_model_are_tuned_but_for_what_is_scheduled_as_it_is_made() -> None:
    from tuna.libraries.base import Environment
    from tuna.libraries.tvm import TvmLibrary

    here = Environment("tvm", "1", "x86", 1, "t", target=json.dumps(TARGET))
    tasks = [task for task, _ in planned(nets.residual()).tasks()]
    found = dict(TvmLibrary().applicable(tasks, here))
    for task in tasks:
        assert bool(found[task]) == (task.core is not None)
    three = next(
        task for task in tasks if isinstance(task.core, ConvConfig) and task.core.conv_stride_h == 1
    )
    assert {"TvmConvTile", "TvmConvWinogradF2"} <= set(found[three])
    assert isinstance(three, TaskConfig)


def quotient(net: Net, x: str) -> str:
    """A value for each channel divides: 1 / 0 beyond the channels."""
    return net.add("Div", net.add("Exp", x), net.constant(np.full((1, 20, 1, 1), 3.0)))


def large_square(net: Net, x: str) -> str:
    """Values near 1, where those beyond the channels are 1e22 before they are squared."""
    shifted = net.add("Sub", x, net.constant(np.full((1, 20, 1, 1), 50.0)))
    large = net.add("Mul", net.add("Exp", shifted), net.constant(5e21))
    return net.add("Mul", large, large)


@pytest.mark.parametrize(("between", "size"), [(quotient, 1), (large_square, 3)])
def test_values_beyond_the_channels_that_are_not_finite_reach_no_kernel(
    between: Any, size: int
) -> None:
    net = Net((1, 8, 4, 4))
    model = net.model(net.conv(between(net, net.conv("x", 8, 20, 1)), 20, 8, size))
    given = inputs.values(importer.inputs_of(model), seed=3)
    assert error_of(model, planned(model), given) < 1e-5


def test_a_bound_beyond_what_is_usual_holds_in_the_built_model() -> None:
    net = Net((1, 8, 6, 6))
    x = net.add("Clip", net.conv("x", 8, 16, 3), net.constant(0.0), net.constant(255.0))
    model = net.model(net.add("Log", net.add("Add", net.relu(x), net.constant(1e-6))))
    given = {"x": 2000.0 * np.random.default_rng(0).random((1, 8, 6, 6), np.float32)}
    assert error_of(model, planned(model), given) < 1e-5


@pytest.mark.parametrize("kind", ["int64", "float64"])
def test_a_folded_constant_keeps_its_type(kind: str) -> None:
    x, builder = relax.Var("x", relax.TensorType((2,), kind)), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            row = builder.emit(relax.op.reshape(relax.const(np.ones((1, 2), kind), kind), (2,)))
            answer = builder.emit_output(relax.op.add(x, row))
        builder.emit_func_output(answer)
    (node,) = graph.read(builder.get()).nodes
    assert str(graph.constant_of(node.args[1]).dtype) == kind
