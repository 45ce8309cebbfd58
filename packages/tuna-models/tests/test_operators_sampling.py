"""Fourier transforms of known length, and samples of regions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from test_operators import answers, floats, model, same

from tuna.errors import BadInput
from tuna_models.reading import importer


def parts(values: Any) -> Any:
    return np.stack([values.real, values.imag], -1).astype(np.float32)


def test_fourier_transforms_are_those_of_numpy() -> None:
    x, spectrum = floats(2, 12, 3, 1), floats(2, 3, 7, 2)
    signal, window = floats(2, 40), np.hanning(8).astype(np.float32)
    constants = {
        **{"nine": np.int64(9), "sixteen": np.int64(16), "thirteen": np.int64(13)},
        **{"first": np.int64(1), "step": np.int64(5), "window": window},
    }
    nodes = [
        helper.make_node("DFT", ["x", "nine", "first"], ["cut"], onesided=1),
        helper.make_node("DFT", ["x", "sixteen", "first"], ["filled"]),
        helper.make_node("DFT", ["spectrum"], ["back"], inverse=1),
        helper.make_node("DFT", ["spectrum", "thirteen"], ["real"], inverse=1, onesided=1),
        helper.make_node("DFT", ["spectrum"], ["even"], inverse=1, onesided=1),
        helper.make_node("STFT", ["signal", "step", "window"], ["frames"]),
    ]
    inputs = {"x": x, "spectrum": spectrum, "signal": signal}
    numbers = spectrum[..., 0] + 1j * spectrum[..., 1]
    framed = np.stack([signal[:, at : at + 8] * window for at in range(0, 33, 5)], 1)
    expected = [
        parts(np.fft.rfft(x[..., 0], 9, 1)),
        parts(np.fft.fft(x[..., 0], 16, 1)),
        parts(np.fft.ifft(numbers)),
        np.fft.irfft(numbers, 13)[..., None].astype(np.float32),
        np.fft.irfft(numbers)[..., None].astype(np.float32),
        parts(np.fft.rfft(framed)),
    ]
    names = [node.output[0] for node in nodes]
    same(answers(model(nodes, inputs, names, constants, opset=20), inputs), expected, 1e-5)


def test_a_transform_whose_matrix_is_too_large_is_refused() -> None:
    node = helper.make_node("DFT", ["x"], ["y"], name="spectrum")
    with pytest.raises(BadInput, match=r"DFT \(spectrum\): a length of 5000 is not supported"):
        importer.to_relax(model([node], {"x": floats(1, 5000, 1)}, ["y"], {}, opset=20), "net")


def test_cubic_samples_at_the_border_are_those_of_onnx() -> None:
    grid = np.random.default_rng(1).uniform(-1.6, 1.6, (2, 4, 5, 2)).astype(np.float32)
    inputs = {"x": floats(2, 2, 5, 6), "grid": grid}
    nodes = [
        helper.make_node(
            *("GridSample", ["x", "grid"], [name]),
            mode="cubic",
            padding_mode="border",
            align_corners=aligned,
        )
        for name, aligned in (("apart", 0), ("aligned", 1))
    ]
    made = model(nodes, inputs, ["apart", "aligned"], {}, opset=20)
    same(answers(made, inputs), list(ReferenceEvaluator(made).run(None, inputs)), 1e-5)


def test_regions_are_shifted_after_they_are_scaled() -> None:
    regions = [[4, 4, 60, 40], [10.5, 0, 30, 63], [0, 20, 63, 63], [9, 9, 9, 9]]
    x, constants = floats(2, 3, 16, 16), {"images": np.array([0, 1, 0, 1])}
    inputs = {"x": x, "regions": np.array(regions, np.float32)}
    nodes = [
        helper.make_node(
            "RoiAlign",
            ["x", "regions", "images"],
            [f"{mode}_{pixel}_{samples}"],
            coordinate_transformation_mode=pixel,
            mode=mode,
            sampling_ratio=samples,
            spatial_scale=0.25,
            output_height=3,
            output_width=2,
        )
        for mode in ("avg", "max")
        for pixel in ("half_pixel", "output_half_pixel")
        for samples in (0, 2)
    ]
    made = model(nodes, inputs, [node.output[0] for node in nodes], constants, opset=16)
    expected = ReferenceEvaluator(made).run(None, inputs)
    same(answers(made, inputs), list(expected), 1e-5)
