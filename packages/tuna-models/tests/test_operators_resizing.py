"""Resize and Upsample of every opset against ONNX's definition, written here once more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from test_operators import answers, floats, model, same

from tuna.errors import BadInput
from tuna_models.reading import importer

#: Sizes that the scales below make of 5 and 6: (5, 6) times (1.7, 0.45).
SCALES, SIZES = (1.7, 0.45), (8, 2)


def places(mode: str, size: int, resized: int, scale: float) -> Any:
    """Coordinates in the input, by the formulas in ONNX's operators."""
    at = np.arange(resized)
    return {
        "half_pixel": (at + 0.5) / scale - 0.5,
        "pytorch_half_pixel": (at + 0.5) / scale - 0.5,
        "asymmetric": at / scale,
        "align_corners": at * (size - 1) / (resized - 1),
        "tf_half_pixel_for_nn": (at + 0.5) / scale,
        "half_pixel_symmetric": size / 2 * (1 - resized / (scale * size))
        + (at + 0.5) / scale
        - 0.5,
    }[mode]


def linear(x: Any, axis: int, at: Any) -> Any:
    """Values between those at the two whole coordinates; beyond the ends those of the ends."""
    whole = np.arange(x.shape[axis])
    return np.apply_along_axis(lambda row: np.interp(at, whole, row), axis, x)


def nearest(x: Any, axis: int, at: Any, rounding: str) -> Any:
    whole = {
        "floor": np.floor(at),
        "ceil": np.ceil(at),
        "round_prefer_floor": np.ceil(at - 0.5),
        "round_prefer_ceil": np.floor(at + 0.5),
    }[rounding]
    return np.take(x, np.clip(whole, 0, x.shape[axis] - 1).astype(int), axis)


def resized(x: Any, mode: str, scales: Any, sizes: Any, rounding: str = "") -> Any:
    """The last axes of `x`, one after the other."""
    for axis, (scale, size) in enumerate(zip(scales, sizes, strict=True), x.ndim - len(sizes)):
        at = places(mode, x.shape[axis], size, scale)
        whole = {"simple": "ceil" if scale < 1 else "floor"}.get(rounding, rounding)
        x = nearest(x, axis, at, whole) if rounding else linear(x, axis, at)
    return x.astype(np.float32)


def resize(name: str, scales: str = "", sizes: str = "", **attributes: Any) -> Any:
    return helper.make_node("Resize", ["x", "", scales, sizes], [name], **attributes)


def test_scales_that_make_no_whole_size_are_those_of_the_coordinates() -> None:
    x, nodes, expected = floats(2, 3, 5, 6), [], []
    constants = {"by": np.array([1, 1, *SCALES], np.float32), "to": np.array([2, 3, 9, 4])}
    fractional = ("half_pixel", "pytorch_half_pixel", "asymmetric", "half_pixel_symmetric")
    for mode in fractional:
        nodes.append(resize(mode, "by", mode="linear", coordinate_transformation_mode=mode))
        expected.append(resized(x, mode, SCALES, SIZES))
    for rounding in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"):
        nodes.append(resize(rounding, "by", nearest_mode=rounding))
        expected.append(resized(x, "half_pixel", SCALES, SIZES, rounding))
    for mode in ("align_corners", "half_pixel", "asymmetric"):  # whole sizes, as TVM resizes
        nodes.append(
            resize(f"to_{mode}", "", "to", mode="linear", coordinate_transformation_mode=mode)
        )
        expected.append(resized(x, mode, (9 / 5, 4 / 6), (9, 4)))
    names = [node.output[0] for node in nodes]
    same(answers(model(nodes, {"x": x}, names, constants, opset=19), {"x": x}), expected, 1e-5)


def test_ratios_axes_and_antialiasing_of_opset_18_are_known() -> None:
    x = floats(1, 3, 12, 12)
    constants = {"to": np.array([9, 5]), "from": np.array([0.1, -0.2, 0.9, 1.3], np.float32)}
    ways: dict[str, dict[str, Any]] = {
        "fits": {"mode": "linear", "keep_aspect_ratio_policy": "not_larger"},
        "covers": {"mode": "nearest", "keep_aspect_ratio_policy": "not_smaller"},
        "smooth": {"mode": "linear", "antialias": 1},
        "smoother": {"mode": "cubic", "antialias": 1, "cubic_coeff_a": -0.5},
        "inside": {"mode": "cubic", "exclude_outside": 1},
        "cut": {
            "mode": "linear",
            "coordinate_transformation_mode": "tf_crop_and_resize",
            "extrapolation_value": 7.0,
        },
    }
    nodes = [
        helper.make_node("Resize", ["x", "from", "", "to"], [name], **way, axes=[3, 2])
        for name, way in ways.items()
    ]
    made = model(nodes, {"x": x}, list(ways), constants, opset=19)
    expected = ReferenceEvaluator(made).run(None, {"x": x})
    same(answers(made, {"x": x}), list(expected), 1e-5)


def test_fp16_and_volumes_are_resized_and_whole_numbers_alone_to_the_nearest() -> None:
    x, whole = floats(1, 2, 3, 4, 3).astype(np.float16), np.arange(24, dtype=np.uint8).reshape(4, 6)
    constants = {"by": np.array([1, 1, 2, 2, 1.5], np.float32), "to": np.array([8, 3])}
    nodes = [
        resize("volume", "by", mode="linear"),
        helper.make_node("Resize", ["whole", "", "", "to"], ["picked"], nearest_mode="floor"),
    ]
    inputs = {"x": x, "whole": whole}
    found = answers(model(nodes, inputs, ["volume", "picked"], constants, opset=13), inputs)
    exact = resized(x.astype(np.float64), "half_pixel", (2, 2, 1.5), (6, 8, 4))
    rows = nearest(whole, 0, places("half_pixel", 4, 8, 2.0), "floor")
    same(
        found,
        [exact.astype(np.float16), nearest(rows, 1, places("half_pixel", 6, 3, 0.5), "floor")],
        1e-3,
    )
    node = helper.make_node("Resize", ["whole", "", "", "to"], ["y"], mode="linear", name="blur")
    with pytest.raises(BadInput, match=r"Resize \(blur\): linear interpolation of uint8 is not"):
        importer.to_relax(model([node], {"whole": whole}, ["y"], {"to": np.array([8, 3])}), "net")


@pytest.mark.parametrize("opset", [7, 9, 10])
def test_upsampling_before_opset_11_takes_the_first_of_asymmetric_coordinates(opset: int) -> None:
    x, scales = floats(1, 2, 5, 6), [1.0, 1.0, *SCALES]
    operator = "Resize" if opset == 10 else "Upsample"
    nodes = [
        helper.make_node(operator, ["x"], [mode], mode=mode, scales=scales)
        if opset == 7
        else helper.make_node(operator, ["x", "by"], [mode], mode=mode)
        for mode in ("nearest", "linear")
    ]
    constants = {} if opset == 7 else {"by": np.array(scales, np.float32)}
    same(
        answers(model(nodes, {"x": x}, ["nearest", "linear"], constants, opset), {"x": x}),
        [
            resized(x, "asymmetric", SCALES, SIZES, "simple"),
            resized(x, "asymmetric", SCALES, SIZES),
        ],
        1e-5,
    )


def test_aligned_corners_of_a_size_that_is_not_whole_are_refused_with_the_reason() -> None:
    node = resize("y", "by", mode="linear", coordinate_transformation_mode="align_corners")
    made = model([node], {"x": floats(1, 1, 5, 6)}, ["y"], {"by": np.array([1, 1, 1.7, 2], "f")})
    with pytest.raises(BadInput, match=r"Resize \(y\): with align_corners and a scale of 1.7"):
        importer.to_relax(made, "net")
