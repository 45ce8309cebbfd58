"""Operators between convolutions work on blocks of channels, and answer as ONNX's reference."""

from __future__ import annotations

from nets import Net
from test_plan import error_of, planned


def test_averages_of_other_channels_at_the_same_size_are_other_functions() -> None:
    net = Net((1, 16, 8, 8))
    means = [net.add("GlobalAveragePool", net.conv("x", 16, outs, 1)) for outs in (12, 16)]
    model = net.model(*means)
    image = net.random.normal(0, 1, (1, 16, 8, 8)).astype("float32")
    assert error_of(model, planned(model), {"x": image}) < 1e-5
