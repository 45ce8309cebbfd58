"""Convolutions along one, two and three axes, with any padding, have kernels of their own, and
answer as ONNX's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import error_of, planned, run
from nets import Net
from test_plan import epilogues
from tvm import relax

from tuna.configs import ConvConfig
from tuna.libraries import reference
from tuna_models.compiler.build import Planned


def cores(found: Planned) -> list[ConvConfig]:
    return [task.core for task, _ in found.tasks() if isinstance(task.core, ConvConfig)]


def others(found: Planned) -> set[str]:
    return {task.name for task, _ in found.tasks() if task.core is None}


def weighted(net: Net, x: str, outs: int, ins: int, *taps: int, **attributes: Any) -> str:
    """A convolution without a bias."""
    weights = net.random.normal(0, 1 / (ins * np.prod(taps)) ** 0.5, (outs, ins, *taps))
    return net.add("Conv", x, net.constant(weights), **attributes)


def padded(net: Net, x: str, *widths: int, value: float = 0.0) -> str:
    return net.add("Pad", x, net.whole(widths), net.constant(value))


def image(*shape: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(2).normal(0, 1, shape).astype(np.float32)}


def test_padding_that_differs_by_side_has_a_kernel_with_its_epilogue() -> None:
    net = Net((1, 3, 17, 18))
    x = net.relu(net.conv("x", 3, 20, 3, pads=[0, 0, 1, 1], strides=[2, 2]))
    y = net.relu(net.conv(x, 20, 20, 3, pads=[0, 1, 1, 2], strides=[2, 2], group=20))
    z = net.relu(net.conv(x, 20, 24, 5, pads=[2, 1, 1, 2], dilations=[1, 2]))
    found = planned(model := net.model(y, z))
    assert epilogues(found) == [("bias", "relu")] * 3
    assert others(found) <= {"window", "from_blocks"}
    assert error_of(model, found, image(1, 3, 17, 18)) < 1e-5


def test_more_padding_before_than_after_needs_no_copy_where_the_answers_are_as_many() -> None:
    net = Net((1, 20, 10, 10))
    found = planned(model := net.model(net.conv("x", 20, 8, 3, pads=[1, 1, 0, 0], strides=[2, 2])))
    assert others(found) == {"to_blocks", "from_blocks"}
    assert [core.pad_h for core in cores(found)] == [1]
    assert error_of(model, found, image(1, 20, 10, 10)) < 1e-5


def test_zeros_around_the_input_of_a_convolution_become_its_padding() -> None:
    net = Net((1, 8, 9, 9))
    x = net.relu(net.conv("x", 8, 20, 1))
    y = net.relu(net.conv(padded(net, x, 0, 0, 1, 1, 0, 0, 1, 1), 20, 8, 3, pads=[0] * 4))
    found = planned(model := net.model(y))
    assert [core.pad_h for core in cores(found)] == [0, 1]
    assert others(found) == {"to_blocks", "from_blocks"}
    assert error_of(model, found, image(1, 8, 9, 9)) < 1e-5


def test_another_value_around_images_is_written_in_blocks() -> None:
    net = Net((1, 8, 9, 9))
    x = net.relu(net.conv("x", 8, 20, 1))
    y = net.conv(padded(net, x, 0, 0, 1, 0, 0, 0, 2, 1, value=0.5), 20, 8, 3, pads=[0] * 4)
    found = planned(model := net.model(y))
    assert others(found) == {"to_blocks", "window", "from_blocks"}
    assert error_of(model, found, image(1, 8, 9, 9)) < 1e-5


def test_taps_that_read_padding_alone_are_cut_off() -> None:
    net = Net((1, 20, 8, 8))
    middle = net.conv("x", 20, 8, 3, pads=[12] * 4, dilations=[12, 12])
    right = net.conv("x", 20, 8, 3, pads=[0, 3, 0, 12], dilations=[1, 6])
    found = planned(model := net.model(middle, right))
    assert [(core.fil_h, core.fil_w, core.in_w) for core in cores(found)] == [(1, 1, 8), (3, 2, 17)]
    assert error_of(model, found, image(1, 20, 8, 8)) < 1e-5


def test_groups_of_any_number_of_channels_have_kernels_in_blocks() -> None:
    net = Net((1, 3, 9, 9))
    x = net.relu(net.conv("x", 3, 40, 3))
    x = net.relu(net.conv(x, 40, 40, 3, group=5))
    x = net.relu(net.conv(x, 40, 80, 3, group=40, strides=[2, 2]))
    found = planned(model := net.model(net.relu(net.conv(x, 80, 20, 1, group=10))))
    assert epilogues(found) == [("bias", "relu")] * 4
    assert others(found) == {"from_blocks"}
    assert error_of(model, found, image(1, 3, 9, 9)) < 1e-5


def test_a_convolution_of_volumes_is_one_of_frames_with_the_depth_as_channels() -> None:
    net = Net((2, 3, 5, 9, 8))
    stem = weighted(net, "x", 20, 3, 3, 3, 3, pads=[1] * 6, strides=[1, 2, 2])
    x = net.relu(stem)
    y = net.relu(weighted(net, x, 20, 20, 3, 1, 1, pads=[1, 0, 0, 1, 0, 0], strides=[2, 1, 1]))
    short = weighted(net, x, 20, 20, 1, 1, 1, strides=[2, 1, 1])
    y = net.relu(net.add("Add", weighted(net, y, 20, 20, 3, 3, 3, pads=[1] * 6), short))
    last = weighted(net, y, 8, 20, 2, 3, 3, pads=[0, 0, 1, 1, 1, 2], dilations=[2, 1, 1])
    found = planned(model := net.model(last))
    assert epilogues(found) == [("relu",), ("relu",), (), ("residual", "relu"), ()]
    assert others(found) <= {"window", "from_blocks"}
    assert error_of(model, found, image(2, 3, 5, 9, 8)) < 1e-5


def test_a_gate_of_volumes_works_on_blocks_only_where_frames_stay_together() -> None:
    net = Net((2, 20, 3, 4, 4))
    x = weighted(net, "x", 20, 20, 1, 3, 3, pads=[0, 1, 1, 0, 1, 1])
    gate = net.add("Sigmoid", net.add("GlobalAveragePool", x))
    scaled = net.add("Mul", net.add("Mul", x, net.constant(np.ones((1, 20, 1, 1, 1)))), gate)
    model = net.model(weighted(net, scaled, 8, 20, 1, 1, 1))
    assert error_of(model, planned(model), image(2, 20, 3, 4, 4)) < 1e-5


@pytest.mark.parametrize("groups", [1, 24])
def test_a_convolution_along_one_axis_is_one_of_images_with_one_row(groups: int) -> None:
    random = np.random.default_rng(3)
    given = random.normal(0, 1, (2, 24, 11)).astype(np.float32)
    weights = random.normal(0, 0.2, (24, 24 // groups, 5)).astype(np.float32)
    x, builder = relax.Var("x", relax.TensorType(given.shape, "float32")), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            layer = relax.op.nn.conv1d(x, relax.const(weights), 2, 2, groups=groups)
            answer = builder.emit_output(relax.op.nn.relu(builder.emit(layer)))
        builder.emit_func_output(answer)
    found = planned(builder.finalize())
    assert epilogues(found) == [("relu",)]
    row = ConvConfig(2, 24, 1, 11, 24, 1, 5, 0, 2, 1, 2, group_count=groups)
    assert cores(found) == [row]
    expected = np.maximum(reference.convolve(row, given[:, :, None], weights[:, :, None]), 0)
    (answered,) = run(found, given)
    np.testing.assert_allclose(answered, expected[:, :, 0], atol=1e-5)
