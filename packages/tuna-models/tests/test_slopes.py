"""LeakyReLU and PReLU, however an exporter wrote them, are steps of kernels, and alone work in
blocks of channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from compiled import TARGET, error_of, planned
from nets import Net
from quantised_nets import Quantised
from shared_data import need
from test_bf16 import in_bf16

from tuna.libraries.tvm.kernels import machine
from tuna_models.compiler.build import Planned

Form = Callable[[Net, str, Any], str]


def prelu(net: Net, x: str, slope: Any) -> str:
    return net.add("PRelu", x, net.constant(slope))


def leaky(net: Net, x: str, slope: Any) -> str:
    return net.add("LeakyRelu", x, alpha=float(np.abs(slope).mean()))


def chosen(comparison: str) -> Form:
    def write(net: Net, x: str, slope: Any) -> str:
        sides = [x, net.add("Mul", net.constant(slope), x)]
        order = 1 if comparison.startswith("Greater") else -1
        return net.add("Where", net.add(comparison, x, net.constant(0.0)), *sides[::order])

    return write


def larger(net: Net, x: str, slope: Any) -> str:
    return net.add("Max", net.add("Mul", x, net.constant(np.abs(slope))), x)


def epilogues(found: Planned) -> set[tuple[str, ...]]:
    return {task.epilogue for task, _ in found.tasks() if task.core is not None}


FORMS = [prelu, leaky, larger, *map(chosen, ("Greater", "GreaterOrEqual", "Less", "LessOrEqual"))]


def slopes(channels: int, *others: int) -> Any:
    """A factor for each channel, of either sign."""
    values = np.random.default_rng(5).uniform(-0.9, 0.9, channels)
    return values.reshape(channels, *others)


def layers(form: Form) -> Any:
    """A convolution, one with a sum behind the function, one with a sum before it, and a product,
    on 28 channels; and the function alone behind a pool."""
    net = Net((2, 8, 9, 9))
    x = form(net, net.conv("x", 8, 28, 3), slopes(28, 1, 1))
    y = net.add("Add", x, form(net, net.conv(x, 28, 28, 1), slopes(28, 1, 1)))
    y = form(net, net.add("Add", net.conv(y, 28, 28, 1, norm=False), x), slopes(28, 1, 1))
    y = net.add("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2])
    y = net.conv(form(net, y, slopes(1, 1, 1)), 28, 28, 1)
    y = net.conv(form(net, net.add("Sigmoid", y), slopes(28, 1, 1)), 28, 28, 1)
    flat = net.add("Flatten", net.add("GlobalAveragePool", y))
    weights = net.constant(net.random.normal(0, 0.3, (28, 20)))
    return net.model(form(net, net.add("MatMul", flat, weights), slopes(20)))


@pytest.mark.parametrize("form", FORMS)
def test_slopes_are_steps_of_kernels_in_every_way_to_write_them(form: Form) -> None:
    found = planned(layers(form))
    assert epilogues(found) == {
        ("bias", "prelu"),
        ("bias", "prelu", "residual"),
        ("residual", "prelu"),
        ("bias",),
        ("bias", "sigmoid"),
        ("prelu",),
    }
    names = Counter({task.name: count for task, count in found.tasks() if task.core is None})
    assert {name: names[name] for name in ("to_blocks", "from_blocks")} == {
        "to_blocks": 1,
        "from_blocks": 0,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_slopes_for_each_channel_answer_as_the_reference(precision: str) -> None:
    model, given = layers(prelu), {"x": np.random.default_rng(2).normal(0, 1, (2, 8, 9, 9))}
    given = {"x": given["x"].astype(np.float32)}
    if precision == "fp32":
        assert error_of(model, planned(model), given) < 1e-5
        return
    if "bf16" not in machine.from_target(tvm.target.Target(TARGET)).words:
        need(None, "a CPU with avx512_bf16")
    assert error_of(model, in_bf16(model, TARGET), given) < 0.03


def test_slopes_that_are_no_factors_for_channels_stay_operators() -> None:
    net = Net((2, 8, 9, 9))
    y = prelu(net, net.conv("x", 8, 16, 1), slopes(9))  # for each column
    z = chosen("Less")(net, net.conv("x", 8, 16, 1), slopes(16 * 81).reshape(16, 9, 9))
    larger_than_one = net.add("Mul", net.conv("x", 8, 16, 1), net.constant(1.5))
    w = net.add("Max", larger_than_one, net.nodes[-1].input[0])
    model = net.model(y, z, w)
    found = planned(model)
    assert epilogues(found) == {("bias",)}
    given = {"x": np.random.default_rng(2).normal(0, 1, (2, 8, 9, 9)).astype(np.float32)}
    assert error_of(model, found, given) < 1e-5


def test_slopes_of_bytes_are_applied_before_they_are_rounded() -> None:
    net = Quantised((1, 16, 9, 9), 13)
    x = net.rounded("x", 0.03)
    y = net.rounded(prelu(net, net.quantised_conv(x, 28, 16, bias=True), slopes(28, 1, 1)), 0.02)
    z = prelu(net, net.quantised_conv(y, 28), slopes(28, 1, 1))
    y = net.add("Add", prelu(net, net.rounded(z, 0.03), slopes(28, 1, 1)), z)
    model = net.model(net.rounded(net.quantised_conv(net.rounded(y, 0.03), 16, 28), 0.05))
    found = planned(model)
    assert epilogues(found) == {
        ("dequantize", "prelu", "quantize"),
        ("dequantize", "prelu"),
        ("dequantize", "quantize"),
    }
    given = {"x": np.random.default_rng(2).normal(0, 1, (1, 16, 9, 9)).astype(np.float32)}
    assert error_of(model, found, given) < 5e-3
