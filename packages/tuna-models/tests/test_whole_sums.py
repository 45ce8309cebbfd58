"""Quantised convolutions and products answer as integers and scales in double precision do: whole
sums are exact however many products they have, and are converted and multiplied once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled import HERE, planned, run
from onnx import TensorProto, helper, numpy_helper

from tuna_models.reading import onnx_reference

#: Largest distance of an exact value from a tie at which fp32 may take the other side.
NEAR = 1e-5
DRILL = pytest.mark.drill(only=True)
KINDS = {
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.float32): TensorProto.FLOAT,
}


class Graph:
    """An ONNX graph with inputs of bytes."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.values: list[Any] = []  #: values of the inputs
        self.outputs: list[tuple[str, int, Any]] = []  #: name, type and right values

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def given(self, values: Any) -> str:
        name = f"x{len(self.inputs)}"
        kind = KINDS[values.dtype]
        self.inputs.append(helper.make_tensor_value_info(name, kind, values.shape))
        self.values.append(values)
        return name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def dequantised(self, values: Any, scale: Any, zero: Any, axis: int = 0) -> str:
        """Real values of a constant, or of a name."""
        whole = values if isinstance(values, str) else self.constant(values)
        given = self.constant(np.float32(scale)), self.constant(zero)
        return self.add("DequantizeLinear", whole, *given, axis=axis)

    def answer(self, name: str, kind: int, right: Any) -> None:
        self.outputs.append((name, kind, right))

    @property
    def model(self) -> Any:
        made = [helper.make_tensor_value_info(name, kind, None) for name, kind, _ in self.outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, made, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])

    def reference(self) -> list[Any]:
        """What the reference answers."""
        given = zip(self.inputs, self.values, strict=True)
        return onnx_reference.run(self.model, {value.name: array for value, array in given})

    def run(self, cpu: str = HERE["mcpu"]) -> list[Any]:
        """What the model answers that is built for a CPU."""
        target = {**HERE, "mcpu": cpu}
        return run(planned(self.model, target=target), *self.values, target=target)


def bytes_of(random: Any, kind: Any, *shape: int) -> Any:
    """Random bytes, with a row of the largest, one of the least, and one of a single byte."""
    limits = np.iinfo(kind)
    found = random.integers(limits.min, limits.max + 1, shape).astype(kind)
    rows = found.reshape(-1, shape[-1])
    rows[0], rows[1], rows[2] = limits.max, limits.min, 0
    rows[2, shape[-1] // 2] = 1
    return found


def convolved(x: Any, w: Any, zero: int, pads: int, groups: int = 1) -> Any:
    """The exact sums of a convolution of images or rows with stride 1, in int64."""
    if x.ndim == 3:
        rows = np.pad(x[:, :, None], [(0, 0), (0, 0), (pads, pads), (0, 0)], constant_values=zero)
        return convolved(rows, w[:, :, None], zero, pads, groups)[:, :, 2 * pads]
    x = np.pad(x.astype(np.int64) - zero, [(0, 0), (0, 0), (pads, pads), (pads, pads)])
    w = w.astype(np.int64)
    high, wide = (x.shape[axis] - w.shape[axis] + 1 for axis in (2, 3))
    own, ins = len(w) // groups, w.shape[1]
    found = np.zeros((len(x), len(w), high, wide), np.int64)
    for group in range(groups):
        part, rows = x[:, group * ins : (group + 1) * ins], slice(group * own, (group + 1) * own)
        for r, s in np.ndindex(*w.shape[2:]):
            window = part[:, :, r : r + high, s : s + wide]
            found[:, rows] += np.einsum("nchw,kc->nkhw", window, w[rows, :, r, s])
    return found


def whole_sums() -> Graph:
    """Sums beyond 2^24 in int32, of operators that answer them."""
    net = Graph()
    a = bytes_of(net.random, np.uint8, 5, 901)
    b = net.random.integers(90, 128, (901, 16)).astype(np.int8)
    x = net.given(a)
    net.answer(
        net.add("MatMulInteger", x, net.constant(b)),
        TensorProto.INT32,
        a.astype(np.int64) @ b.astype(np.int64),
    )
    rows = np.arange(5, dtype=np.uint8) * 60
    columns = (np.arange(16) - 100).astype(np.int8)
    zeros = net.constant(rows), net.constant(columns)
    net.answer(
        net.add("MatMulInteger", x, net.constant(b), *zeros),
        TensorProto.INT32,
        (a.astype(np.int64) - rows[:, None]) @ (b.astype(np.int64) - columns),
    )
    c, d = bytes_of(net.random, np.int8, 2, 3, 700), bytes_of(net.random, np.uint8, 2, 700, 4)
    net.answer(
        net.add("MatMulInteger", net.given(c), net.given(d), net.constant(np.int8(-128))),
        TensorProto.INT32,
        (c.astype(np.int64) + 128) @ d.astype(np.int64),
    )
    for shape, weights, groups in (
        ((1, 80, 5, 5), (8, 80, 3, 3), 1),
        ((1, 32, 16, 18), (4, 8, 15, 15), 4),
        ((1, 16, 17, 17), (16, 1, 17, 17), 16),
        ((2, 6, 400), (4, 6, 300), 1),
    ):
        image = bytes_of(net.random, np.uint8, *shape)
        image[:, : shape[1] - 1] = 255
        w = net.random.integers(240, 256, weights).astype(np.uint8)
        given = net.given(image), net.constant(w), net.constant(np.uint8(3))
        pads = [1] * 2 * (len(shape) - 2)
        right = convolved(image, w, 3, 1, groups)
        y = net.add("ConvInteger", *given, pads=pads, group=groups)
        net.answer(y, TensorProto.INT32, right)
    return net


@pytest.mark.parametrize("cpu", [HERE["mcpu"], pytest.param("x86-64", marks=DRILL)])
def test_sums_of_whole_numbers_are_exact_however_many_there_are(cpu: str) -> None:
    net = whole_sums()
    answers = zip(net.run(cpu), net.reference(), net.outputs, strict=True)
    for found, by_reference, (_, _, right) in answers:
        assert np.abs(right).max() > 1 << 24
        assert np.array_equal(found, right)
        assert np.array_equal(by_reference, right)


def quantised(net: Graph, real: str, exact: Any, scale: float, zero: Any) -> None:
    """Round real values of which `exact` are the right ones."""
    grid = net.constant(np.float32(scale)), net.constant(zero)
    name = net.add("QuantizeLinear", real, *grid)
    net.answer(name, KINDS[zero.dtype], (exact / np.float64(np.float32(scale)), int(zero)))


def scaled_sums() -> Graph:
    """Products and convolutions whose zero points' parts cancel, with biases of whole numbers, real
    ones and none; exact ties; scales by channel; a clip; and real answers."""
    net = Graph()
    sx, sw = 0.037, net.random.uniform(0.001, 0.01, 24).astype(np.float32)
    a, b = bytes_of(net.random, np.int8, 4, 4096), net.random.integers(40, 127, (4096, 24))
    a[0], a[1], a[3], b = 0, 0, 0, b.astype(np.int8)
    a[1, ::40], a[2, ::100] = 1, 2
    a[2, 1::100] = 0
    exact = a.astype(np.int64) @ b.astype(np.int64)
    x = net.dequantised(net.given(a), sx, np.int8(0))
    steps = np.float64(np.float32(sx)) * sw.astype(np.float64)
    y = net.add("MatMul", x, net.dequantised(b, sw, np.zeros(24, np.int8), 1))
    for size in (1.0, 40.0):  # sums of one byte, and of many
        quantised(net, y, exact * steps, size * 0.013, np.int8(-3))
    net.answer(y, TensorProto.FLOAT, exact * steps)
    # ties: powers of two, and numbers that have a common factor
    t, w = bytes_of(net.random, np.uint8, 64, 144), net.random.integers(-3, 4, (144, 16))
    given = net.dequantised(net.given(t), 0.5, np.uint8(77))
    weights = net.add("Transpose", net.dequantised(w.T.astype(np.int8), 0.25, np.int8(0)))
    bias = net.random.integers(-500, 500, 16).astype(np.int32)
    exact = (t.astype(np.int64) - 77) @ w + bias
    y = net.add("MatMul", given, weights)
    y = net.add("Add", y, net.dequantised(bias, 0.125, np.int32(0)))
    quantised(net, y, exact * 0.125, 4.0, np.uint8(121))
    # convolutions: direct, image, depthwise, with padding
    for channels, outs, groups, size in ((32, 24, 1, 3), (3, 24, 1, 3), (24, 24, 24, 5)):
        image = bytes_of(net.random, np.uint8, 1, channels, 8, 9)
        image[0, :, :4] = 210
        w = net.random.integers(20, 128, (outs, channels // groups, size, size)).astype(np.int8)
        bias = net.random.integers(-(1 << 20), 1 << 20, outs).astype(np.int32)
        given = net.dequantised(net.given(image), sx, np.uint8(210))
        real = net.dequantised(w, sw, np.zeros(24, np.int8))
        sums = convolved(image, w, 210, size // 2, groups)
        by_channel = steps.reshape(-1, 1, 1)
        pads = [size // 2] * 4
        scales = (np.float32(sx) * sw).astype(np.float32)
        whole = net.dequantised(bias, scales, np.zeros(24, np.int32))
        y = net.add("Conv", given, real, whole, pads=pads, group=groups)
        total = (sums + bias.reshape(-1, 1, 1)) * by_channel
        quantised(net, y, total, np.abs(total).max() / 300, np.uint8(128))
        small = (bias.astype(np.float32) / (1 << 14)).astype(np.float32)
        y = net.add("Conv", given, real, net.constant(small), pads=pads, group=groups)
        total = sums * by_channel + small.reshape(-1, 1, 1)
        quantised(net, net.add("Relu", y), np.maximum(total, 0), 0.17, np.uint8(0))
    return net


def _doubled(values: Any, axis: int) -> Any:
    """Twice as many values, three quarters of the nearest one and a quarter of the next."""
    last = values.shape[axis] - 1
    places = np.arange(2 * values.shape[axis])
    others = np.clip(places // 2 + 2 * (places % 2) - 1, 0, last)
    return 0.75 * values.take(places // 2, axis) + 0.25 * values.take(others, axis)


def averages() -> Graph:
    """Averages and larger images with ties in many places, of bytes in both layouts."""
    net = Graph()
    image, grid = bytes_of(net.random, np.uint8, 3, 24, 8, 8), (0.037, np.uint8(77))
    x = net.dequantised(net.given(image), *grid)
    whole = image.astype(np.int64) - 77
    rows = whole.reshape(3, 24, 4, 2, 4, 2)
    largest = net.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    of_four = net.add("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    twice = net.constant(np.array([1, 1, 2, 2], np.float32))
    padded = {"kernel_shape": [1, 2], "strides": [1, 6], "pads": [0, 1, 0, 0]}
    for y, steps in (
        (of_four, rows.mean((3, 5))),
        (net.add("Resize", x, "", twice, mode="linear"), _doubled(_doubled(whole, 2), 3)),
        (net.add("GlobalAveragePool", x), rows.mean((2, 3, 4, 5))[..., None, None]),
        (net.add("GlobalAveragePool", largest), rows.max((3, 5)).mean((2, 3))[..., None, None]),
        (
            net.add("AveragePool", x, **padded, count_include_pad=1),
            np.stack([whole[..., 0] / 2, whole[..., 5:7].sum(-1) / 2], -1),
        ),
    ):
        tensor = net.add(
            "QuantizeLinear", y, net.constant(np.float32(grid[0])), net.constant(grid[1])
        )
        net.answer(tensor, TensorProto.UINT8, (steps, 77))
    net.answer(of_four, TensorProto.FLOAT, rows.mean((3, 5)) * np.float64(np.float32(grid[0])))
    return net


def sums_without_kernels() -> Graph:
    """Weights whose zero points leave more than eight bits; and what no kernel of bytes takes: two
    variables, and transposed convolutions."""
    net = Graph()
    sw = net.random.uniform(0.001, 0.01, 24).astype(np.float32)
    zeros = net.random.integers(130, 200, 24).astype(np.uint8)
    a, b = bytes_of(net.random, np.uint8, 64, 700), np.full((700, 24), 250, np.uint8)
    a[3:] = net.random.integers(250, 256, (61, 700))
    # partial sums are large, and nearly cancel
    b[350:] = 2 * zeros.astype(np.int64) - 250 + net.random.integers(-2, 3, (350, 24))
    x = net.dequantised(net.given(a), 0.037, np.uint8(131))
    steps = np.float64(np.float32(0.037)) * sw.astype(np.float64)
    exact = (a.astype(np.int64) - 131) @ (b.astype(np.int64) - zeros)
    y = net.add("MatMul", x, net.dequantised(b, sw, zeros, 1))
    net.answer(y, TensorProto.FLOAT, exact * steps)
    quantised(net, y, exact * steps, np.abs(exact * steps).max() / 300, np.uint8(120))
    c = bytes_of(net.random, np.int8, 700, 9)
    y = net.add("MatMul", x, net.dequantised(net.given(c), 0.013, np.int8(5)))
    exact = (a.astype(np.int64) - 131) @ (c.astype(np.int64) - 5)
    real = exact * (np.float64(np.float32(0.037)) * np.float64(np.float32(0.013)))
    net.answer(y, TensorProto.FLOAT, real)
    quantised(net, y, real, np.abs(real).max() / 300, np.uint8(120))
    image = bytes_of(net.random, np.uint8, 1, 40, 16, 16)
    given = net.dequantised(net.given(image), 0.037, np.uint8(9))
    w = bytes_of(net.random, np.uint8, 24, 40, 3, 3)
    centered = w.astype(np.int64) - zeros.reshape(-1, 1, 1, 1)
    y = net.add("Conv", given, net.dequantised(w, sw, zeros), pads=[1] * 4)
    real = convolved(image, centered, 9, 1) * steps.reshape(-1, 1, 1)
    net.answer(y, TensorProto.FLOAT, real)
    quantised(net, net.add("Relu", y), np.maximum(real, 0), real.max() / 200, np.uint8(0))
    # the transposed convolution is that of the filter turned round, whose channels are swapped
    turned = np.ascontiguousarray(w[:, :, ::-1, ::-1].swapaxes(0, 1))
    y = net.add("ConvTranspose", given, net.dequantised(turned, sw, zeros, 1), pads=[1] * 4)
    net.answer(y, TensorProto.FLOAT, real)
    quantised(net, net.add("Relu", y), np.maximum(real, 0), real.max() / 200, np.uint8(0))
    return net


@pytest.mark.parametrize(
    ("make", "cpu"),
    [
        (scaled_sums, HERE["mcpu"]),
        pytest.param(scaled_sums, "haswell", marks=DRILL),
        (sums_without_kernels, HERE["mcpu"]),
        (averages, HERE["mcpu"]),
    ],
)
def test_quantised_tensors_are_those_of_integers_and_scales_in_double_precision(
    make: Any, cpu: str
) -> None:
    net = make()
    for found, (name, kind, right) in zip(net.run(cpu), net.outputs, strict=True):
        if kind == TensorProto.FLOAT:
            np.testing.assert_allclose(found, right, rtol=3e-7, atol=0)
            continue
        limits = np.iinfo(found.dtype)
        steps, zero = right
        rounded = np.clip(np.rint(steps) + zero, limits.min, limits.max)
        apart = np.abs(found.astype(np.int64) - rounded)
        tied = np.abs(steps - np.floor(steps) - 0.5)
        assert not np.any(apart[(tied > NEAR) | (tied == 0)]), (name, np.argwhere(apart)[:3])
        assert apart.max() <= 1
        assert len(np.unique(rounded)) > 5


def of_any_size(largest: float) -> Graph:
    """A product as `quantize_dynamic` writes it, of inputs up to so large a number. The zero
    point's part alone is beyond fp32 where they are large."""
    net = Graph()
    x = (net.random.uniform(-0.05, 0.1, (3, 200)) * largest).astype(np.float32)
    x[0], x[0, :2], x[1] = 0, (largest, -largest / 2), 0
    w = net.random.integers(40, 128, (200, 16)).astype(np.int8)
    q, scale, zero = net.add("DynamicQuantizeLinear", net.given(x)), "scale", "zero"
    net.nodes[-1].output.extend([scale, zero])
    y = net.add("MatMulInteger", q, net.constant(w), zero)
    y = net.add("Cast", y, to=TensorProto.FLOAT)
    y = net.add("Mul", y, net.add("Mul", scale, net.constant(np.float32(0.01))))
    step = np.float32((x.max() - np.minimum(x.min(), 0)) / np.float32(255))
    middle = int(np.rint(-x.min() / step))
    whole = np.clip(np.rint(x / step) + middle, 0, 255).astype(np.uint8)
    net.answer(q, TensorProto.UINT8, whole)
    sums = (whole.astype(np.int64) - middle) @ w.astype(np.int64)
    net.answer(y, TensorProto.FLOAT, sums * np.float64(step) * np.float32(0.01))
    return net


def test_dynamic_scales_may_be_as_small_or_large_as_numbers_are() -> None:
    for largest in (1e-38, 3e37):
        net = of_any_size(largest)
        for made in (net.run(), net.reference()):
            (whole, real), (right, exact) = made, (values for *_, values in net.outputs)
            assert np.array_equal(whole, right)
            assert np.abs(exact).max() < 3e38
            # the scale's product is a number with few digits where it is small
            np.testing.assert_allclose(real, exact, rtol=1e-5 if largest > 1e-36 else 0.1)


def test_ranges_below_the_least_number_are_of_zeros() -> None:
    net = Graph()
    x = np.float32([0, 1e-44, -5e-45])
    name = net.add("DynamicQuantizeLinear", net.given(x))
    net.nodes[-1].output.extend(["scale", "zero"])
    net.answer(name, TensorProto.UINT8, np.zeros(3, np.uint8))
    for made in (net.run(), net.reference()):
        assert made[0].tolist() == [0, 0, 0]


def test_zero_points_and_scales_may_be_known_when_the_model_runs() -> None:
    """Of signed and unsigned bytes, around images too, and of weights that need nine bits less
    their zero point; the kernels of bytes take them."""
    net = Graph()
    scale = net.given(np.asarray(0.0123, np.float32))
    for kind, zero, weight_zero in (
        (np.uint8, 201, np.int8(0)),
        (np.int8, -77, np.int8(0)),
        (np.uint8, 0, np.uint8(217)),
        (np.int8, -9, np.uint8(40)),
    ):
        middle, taken_off = net.given(np.asarray(zero, kind)), net.constant(weight_zero)
        image = bytes_of(net.random, kind, 1, 24, 6, 7)
        w = bytes_of(net.random, weight_zero.dtype, 40, 24, 3, 3)
        whole = w.astype(np.int64) - int(weight_zero)
        bias = net.random.normal(size=(40, 1, 1)).astype(np.float32)
        given = net.given(image), net.constant(w), middle, taken_off
        y = net.add("ConvInteger", *given, pads=[1] * 4)
        y = net.add("Mul", net.add("Cast", y, to=TensorProto.FLOAT), scale)
        y = net.add("Add", y, net.constant(bias))
        exact = convolved(image, whole, zero, 1) * np.float64(np.float32(0.0123)) + bias
        net.answer(y, TensorProto.FLOAT, exact)
        a, rows = bytes_of(net.random, kind, 7, 60), slice(60)
        b = net.constant(w.reshape(-1, 24)[rows])
        y = net.add("MatMulInteger", net.given(a), b, middle, taken_off)
        y = net.add("Mul", scale, net.add("Cast", y, to=TensorProto.FLOAT))
        exact = (a.astype(np.int64) - zero) @ whole.reshape(-1, 24)[rows]
        net.answer(y, TensorProto.FLOAT, exact * np.float64(np.float32(0.0123)))
    plan = planned(net.model, target=HERE)
    assert not plan.left_in_fp32
    answers = run(plan, *net.values, target=HERE)
    for sums, (*_, right) in zip(answers, net.outputs, strict=True):
        np.testing.assert_allclose(sums, right, rtol=3e-7, atol=3e-6)
