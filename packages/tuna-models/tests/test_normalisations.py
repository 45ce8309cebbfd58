"""Normalisations are right to four digits where the mean is thousands of deviations away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import HERE, planned, run
from nets import Net


def answer(model: Any, x: Any) -> Any:
    (found,) = run(planned(model, target=HERE), x, target=HERE)
    return found


def normalised(x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    values = x.astype(np.float64)
    centered = values - values.mean(axis=axes, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=axes, keepdims=True) + epsilon)


@pytest.mark.parametrize(
    ("operator", "shape", "axes", "attributes"),
    [
        ("LayerNormalization", (3, 5, 64), (2,), {}),
        ("LayerNormalization", (3, 5, 7), (1, 2), {"axis": 1}),
        ("InstanceNormalization", (2, 4, 33, 16), (2, 3), {}),
        ("InstanceNormalization", (2, 4, 50), (2,), {}),
        ("GroupNormalization", (2, 8, 32, 32), (2, 3, 4), {"num_groups": 2}),
        ("GroupNormalization", (1, 6, 5, 7), (2, 3, 4), {"num_groups": 3}),
        ("MeanVarianceNormalization", (2, 4, 8, 16), (0, 2, 3), {}),
        ("MeanVarianceNormalization", (2, 4, 8, 16), (1, 2, 3), {"axes": [1, -2, 3]}),
        ("MeanVarianceNormalization", (4, 16), (0, 1), {"axes": [0, 1]}),
    ],
)
def test_flat_values_far_from_zero_are_normalised_to_four_digits(
    operator: str, shape: tuple[int, ...], axes: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    net = Net(shape, opset=21 if operator == "GroupNormalization" else 17)
    x = (128.0 + net.random.normal(0.0, 0.05, shape)).astype(np.float32)
    groups = attributes.get("num_groups")
    parted = x if groups is None else x.reshape(shape[0], groups, -1, *shape[2:])
    right = normalised(parted, axes, 1e-5).reshape(shape)
    weights = []
    if operator != "MeanVarianceNormalization":
        layer = operator == "LayerNormalization"
        extents = tuple(shape[axis] for axis in axes) if layer else shape[1:2]
        scale, bias = net.random.normal(1.0, 0.2, (2, *extents)).astype(np.float32)
        weights = [net.constant(scale), net.constant(bias)]
        spread = extents if layer else (*extents, *[1] * (len(shape) - 2))
        right = right * scale.reshape(spread) + bias.reshape(spread)
    else:
        right = normalised(x, axes, 0.0)
    found = answer(net.model(net.add(operator, "x", *weights, **attributes), check=False), x)
    assert np.abs(found - right).max() < 1e-4


@pytest.mark.parametrize(
    ("scale", "bias"), [((7,), (5, 7)), ((5, 1), (7,)), ((3, 1, 1), (1,)), ((5, 7), None)]
)
def test_weights_of_a_layer_normalisation_broadcast(
    scale: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    net = Net((3, 5, 7))
    x = net.random.normal(0.0, 1.0, (3, 5, 7)).astype(np.float32)
    weights = [net.random.normal(1.0, 0.2, shape) for shape in (scale, bias) if shape is not None]
    y = net.add("LayerNormalization", "x", *map(net.constant, weights), axis=1)
    right = normalised(x, (1, 2), 1e-5) * weights[0]
    right = right if bias is None else right + weights[1]
    assert np.abs(answer(net.model(y), x) - right).max() < 1e-5


def test_a_constant_image_is_normalised_to_zero() -> None:
    net = Net((1, 3, 16, 16))
    model = net.model(net.add("MeanVarianceNormalization", "x"), check=False)
    assert np.all(answer(model, np.full((1, 3, 16, 16), 128.3, np.float32)) == 0.0)
