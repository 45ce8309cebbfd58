"""Pools by ONNX's rules for rounding, padding and dilation, where TVM has others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from onnx import helper
from test_operators import answers, floats, model, same

from tuna.errors import BadInput
from tuna_models.reading import importer, onnx_reference

#: Attributes of two-dimensional pools, and the sizes of their answers on images of 9x10.
POOLS: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, (4, 5)),
    ({"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 1, 1], "ceil_mode": 1}, (5, 4)),
    ({"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}, (5, 5)),
    ({"kernel_shape": [2, 2], "strides": [2, 3], "auto_pad": "SAME_UPPER"}, (5, 4)),
    (
        {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [3, 2], "pads": [1, 1, 2, 0]},
        (5, 5),
    ),
    ({"kernel_shape": [3, 3], "strides": [3, 3], "pads": [2, 2, 2, 2], "ceil_mode": 1}, (4, 4)),
]


def windows(
    attributes: dict[str, Any], sizes: Sequence[int], answers_: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The padding at the beginning and the end of each axis."""
    taps, strides = attributes["kernel_shape"], attributes["strides"]
    auto = attributes.get("auto_pad")
    if auto is None:
        pads = attributes.get("pads", [0, 0, 0, 0])
        return pads[:2], pads[2:]
    totals = [
        (answer - 1) * stride + tap - size
        for size, answer, stride, tap in zip(sizes, answers_, strides, taps, strict=True)
    ]
    begins = [(total + (auto == "SAME_LOWER")) // 2 for total in totals]
    return begins, [total - begin for total, begin in zip(totals, begins, strict=True)]


def by_definition(
    x: Any,
    attributes: dict[str, Any],
    answer: tuple[int, int],
    pooled: Callable[[list[tuple[int, ...]], int], Any],
) -> Any:
    """Pool values by a function of the places in a window and the count of those that are padding.

    Cells past the padding, of which rounding up makes some, are neither.
    """
    begins, ends = windows(attributes, x.shape[2:], answer)
    pools = np.zeros((*x.shape[:2], *answer), np.float64)
    dilations = attributes.get("dilations", [1, 1])
    for place in np.ndindex(pools.shape):
        inside, padding = [], 0
        for tap in itertools.product(*map(range, attributes["kernel_shape"])):
            at = [
                place[2 + n] * attributes["strides"][n] + tap[n] * dilations[n] - begins[n]
                for n in (0, 1)
            ]
            if all(0 <= at[n] < x.shape[2 + n] for n in (0, 1)):
                inside.append((*place[:2], *at))
            elif all(-begins[n] <= at[n] < x.shape[2 + n] + ends[n] for n in (0, 1)):
                padding += 1
        pools[place] = pooled(inside, padding)
    return pools


def test_pools_are_those_of_onnx() -> None:
    x = floats(1, 2, 9, 10)

    def largest(inside: list[tuple[int, ...]]) -> tuple[int, ...]:
        return max(inside, key=lambda at: x[at])

    def mean(inside: list[tuple[int, ...]], others: int = 0) -> Any:
        return sum(x[at] for at in inside) / (len(inside) + others)

    kinds: list[tuple[str, dict[str, int], list[Callable[[list[tuple[int, ...]], int], Any]]]] = [
        ("AveragePool", {"count_include_pad": 0}, [lambda inside, _: mean(inside)]),
        ("AveragePool", {"count_include_pad": 1}, [mean]),
        ("LpPool", {"p": 3}, [lambda inside, _: sum(abs(x[at]) ** 3 for at in inside) ** (1 / 3)]),
        (
            *("MaxPool", {}),
            [
                lambda inside, _: x[largest(inside)],
                lambda inside, _: np.ravel_multi_index(largest(inside), x.shape),
            ],
        ),
    ]
    nodes, names, right = [], [], []
    for pool, (operator, more, definitions) in itertools.product(POOLS, kinds):
        attributes, answer = pool
        outputs = [f"y{len(names) + place}" for place in range(len(definitions))]
        names += outputs
        nodes.append(helper.make_node(operator, ["x"], outputs, **attributes, **more))
        for place, definition in enumerate(definitions):
            kind = np.int64 if place else np.float32
            right.append(by_definition(x, attributes, answer, definition).astype(kind))
    same(answers(model(nodes, {"x": x}, names, {}, opset=22), {"x": x}), right, 1e-5)


def test_means_and_norms_in_fp16_do_not_overflow_and_lrn_takes_an_even_size() -> None:
    large = (
        np.full((1, 4, 64, 64), 20.0, np.float16) + np.arange(4, dtype=np.float16)[:, None, None]
    )
    x = floats(1, 5, 3, 2)
    nodes = [
        helper.make_node("GlobalAveragePool", ["large"], ["mean"]),
        helper.make_node("ReduceMean", ["large"], ["reduced"], axes=[2, 3], keepdims=0),
        helper.make_node("ReduceL2", ["large"], ["norm"], axes=[2, 3], keepdims=0),
        helper.make_node("LRN", ["x"], ["even"], size=4, alpha=0.1, bias=2.0),
    ]
    inputs = {"large": large, "x": x}
    squares = np.pad(x.astype(np.float64) ** 2, [(0, 0), (1, 2), (0, 0), (0, 0)])
    sums = sum(squares[:, first : first + 5] for first in range(4))
    means = np.arange(20, 24, dtype=np.float16)
    same(
        answers(model(nodes, inputs, ["mean", "reduced", "norm", "even"], {}), inputs),
        [
            means.reshape(1, 4, 1, 1),
            means.reshape(1, 4),
            means.reshape(1, 4) * 64,
            (x / (2 + 0.1 / 4 * sums) ** 0.75).astype(np.float32),
        ],
        1e-5,
    )


def test_an_unpool_whose_indices_are_in_doubt_is_refused_by_name() -> None:
    x, at = floats(1, 1, 2, 2), np.array([[[[5, 7], [13, 15]]]])
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
    inputs = {"x": x, "at": at}
    node = helper.make_node("MaxUnpool", ["x", "at", "to"], ["y"], name="back", **attributes)
    (found,) = answers(model([node], inputs, ["y"], {"to": np.array([1, 1, 4, 4])}), inputs)
    assert np.array_equal(found.reshape(-1)[at.reshape(-1)], x.reshape(-1))
    larger = model([node], inputs, ["y"], {"to": np.array([1, 1, 5, 5])})
    with pytest.raises(BadInput, match=r"MaxUnpool \(back\): its output_shape is \[1, 1, 5, 5\]"):
        importer.to_relax(larger, "net")


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_largest_of_minus_infinities_is_the_first_of_them(axes: int) -> None:
    x = np.full((1, 2, *[5] * axes), -np.inf, np.float32)
    x[:, 1] = 2.0
    attributes = {"kernel_shape": [3] * axes, "strides": [2] * axes, "pads": [1] * 2 * axes}
    nodes = [helper.make_node("MaxPool", ["x"], ["y", "places"], **attributes)]
    net = model(nodes, {"x": x}, ["y", "places"], {})
    found, places = answers(net, {"x": x})
    assert np.array_equal(found, x[(..., *[slice(0, 3)] * axes)])
    right, first = onnx_reference.run(net, {"x": x})
    assert np.array_equal(found, right)
    assert np.array_equal(places, first)
    assert first.flat[0] == 0
