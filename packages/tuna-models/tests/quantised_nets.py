"""Small quantised ONNX models, as onnxruntime writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from nets import Net
from onnx import numpy_helper


class Quantised(Net):
    """A net that is quantised as onnxruntime does it; bytes are of `byte`."""

    byte: Any = np.uint8

    def typed(self, values: Any, kind: Any) -> str:
        name = self.constant(0.0)
        self.weights[-1].CopyFrom(numpy_helper.from_array(np.asarray(values, kind), name))
        return name

    def whole_numbers(self, x: str, scale: float, zero: int = 128) -> tuple[str, ...]:
        """The quantised tensor, with its scale and zero point."""
        given = self.constant(scale), self.typed(zero, self.byte)
        return self.add("QuantizeLinear", x, *given), *given

    def rounded(self, x: str, scale: float, zero: int = 128) -> str:
        return self.add("DequantizeLinear", *self.whole_numbers(x, scale, zero))

    def quantised_weights(self, *shape: int, axis: int = 0) -> str:
        values = self.random.integers(-127, 128, shape)
        spread = 73 * (values.size / shape[axis]) ** 0.5  # so that answers are as large as inputs
        scales = self.constant(self.random.uniform(0.8, 1.6, shape[axis]) / spread)
        zeros = self.typed([0] * shape[axis], np.int8)
        return self.add("DequantizeLinear", self.typed(values, np.int8), scales, zeros, axis=axis)

    def quantised_conv(
        self,
        x: str,
        channels: int,
        ins: int | None = None,
        size: int = 3,
        *,
        group: int = 1,
        bias: bool = False,
        **attributes: Any,
    ) -> str:
        weights = self.quantised_weights(channels, (ins or channels) // group, size, size)
        given = [self.constant(self.random.normal(0, 0.3, channels))] if bias else []
        pads = {"pads": [size // 2] * 4} | attributes
        return self.add("Conv", x, weights, *given, group=group, **pads)


def residual(scale: float = 0.04, *, whole: bool = True) -> Any:
    """A block with a shortcut; `scale` is that of the second quantised tensor. Without `whole`
    weights are real, and convolutions in fp32."""
    net = Quantised((1, 16, 9, 9), 13)

    def conv(x: str) -> str:
        return net.quantised_conv(x, 16) if whole else net.conv(x, 16, 16, 3, norm=False)

    x = net.rounded("x", 0.03)
    y = net.rounded(net.relu(conv(x)), scale, 0)
    y = net.rounded(conv(y), 0.08)
    y = net.rounded(net.relu(net.add("Add", x, y)), 0.05, 0)
    return net.model(net.rounded(net.add("GlobalAveragePool", y), 0.02, 0))


def dynamic(*, gelu: bool = False) -> Any:
    """Products as `quantize_dynamic` writes them; two of them share a quantised tensor."""
    net = Quantised((5, 24), 13)
    quantised = ["q", "scale", "zero"]
    net.add("DynamicQuantizeLinear", "x")
    net.nodes[-1].output[:] = quantised
    parts = []
    for _ in range(2):
        w = net.typed(net.random.integers(-127, 128, (24, 24)), np.int8)
        y = net.add("MatMulInteger", "q", w, "zero", net.typed(0, np.int8))
        parts.append(net.add("Mul", net.add("Cast", y, to=1), "scale"))
    if gelu:
        scales = net.constant(net.random.uniform(1e-4, 2e-4, 24))
        w = net.typed(net.random.integers(-127, 128, (24, 24)), np.int8)
        y = net.add("MatMulInteger", "q", w, "zero", net.typed([0] * 24, np.int8))
        y = net.add("Mul", net.add("Cast", y, to=1), net.add("Mul", "scale", scales))
        bias = net.constant(net.random.normal(0, 0.3, 24))
        parts.append(net.gelu(net.add("Add", bias, y)))
        return net.model(*parts)
    return net.model(net.add("Add", *parts))


def operators() -> Any:
    """Of the operators whose arguments are quantised themselves."""
    net = Quantised((1, 16, 9, 9), 13)
    q, *x = net.whole_numbers("x", 0.03)
    w = net.typed(net.random.integers(-127, 128, (16, 16, 3, 3)), np.int8)
    w_given = net.constant(net.random.uniform(1e-3, 2e-3, 16)), net.typed([0] * 16, np.int8)
    y = net.constant(0.05), net.typed(120, np.uint8)
    bias = net.typed(net.random.integers(-999, 999, 16), np.int32)
    found = net.add("QLinearConv", q, *x, w, *w_given, *y, bias, pads=[1] * 4)
    pooled = net.add("MaxPool", found, kernel_shape=[3, 3])
    found = net.add("Reshape", pooled, net.whole([16, 49]))
    w = net.typed(net.random.integers(0, 256, (49, 8)), np.uint8)
    w_given = net.constant(0.01), net.typed(128, np.uint8)
    z = net.constant(0.2), net.typed(128, np.uint8)
    found = net.add("QLinearMatMul", found, *y, w, *w_given, *z)
    return net.model(net.add("DequantizeLinear", found, *z))


def bytes_alone() -> Any:
    """A convolution whose input and answer are signed bytes, as an integer-only runtime has it."""
    net = Quantised((1, 16, 9, 9), 13)
    net.byte = np.int8
    x = net.add("DequantizeLinear", "x", net.constant(0.03), net.typed(3, np.int8))
    y, *_ = net.whole_numbers(net.quantised_conv(x, 24, 16, bias=True), 0.05, -7)
    kind = onnx.TensorProto.INT8
    model = net.model(y, inputs=[("x", kind, net.shape)], check=False)
    model.graph.output[0].type.tensor_type.elem_type = kind
    return onnx.shape_inference.infer_shapes(model)


def stem(byte: Any = np.uint8) -> Any:
    """The beginning of a network: an image, a pool, channels that fill no block, a depthwise
    convolution with ReLU6, a padding that differs by side, a sum that no convolution takes, and a
    classifier."""
    net, zero = Quantised((1, 3, 13, 13), 13), -128 if byte is np.int8 else 0
    net.byte = byte
    middle = zero + 128
    x = net.rounded("x", 0.03, middle)
    y = net.quantised_conv(x, 12, 3, strides=[2, 2], bias=True)
    y = net.rounded(y, 0.04, zero)
    y = net.add("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    x = net.rounded(y, 0.04, zero)
    y = net.rounded(net.relu6(net.quantised_conv(x, 12, group=12, bias=True)), 0.02, zero)
    y = net.rounded(net.quantised_conv(y, 12, size=1), 0.05, middle)
    both = net.rounded(net.add("Add", y, x), 0.06, middle)
    z = net.quantised_conv(y, 16, 12, pads=[0, 0, 1, 1], strides=[2, 2])
    z = net.rounded(net.relu(z), 0.05, zero)
    flat = net.rounded(net.add("Flatten", z), 0.05, zero)
    w = net.quantised_weights(64, 10, axis=1)
    end = net.add("MatMul", flat, w)
    end = net.add("Add", end, net.constant(net.random.normal(0, 1, 10)))
    return net.model(net.rounded(end, 0.1, middle), both)
