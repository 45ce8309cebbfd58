#!/usr/bin/env python3
"""Writes ONNX models with random weights: ResNet-18, ResNet-50, one in the shape of MobileNetV2, a
block of BERT-base, two residual blocks for a first try.

    python examples/make_models.py resnet18 -o resnet18.onnx
    python examples/make_models.py mobilenetv2 --size 96 -o small.onnx

For trying `tuna model` without a download. Needs the package `onnx`. The structure is that of the
papers, batch normalisation included; the answers mean nothing, but they are neither zero nor
overflow.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_OPSET = 17
#: Opset 17 came with version 8 of the format; older readers refuse what is newer than they are.
_IR_VERSION = 8


class Network:
    """An ONNX graph that grows node by node; methods take and return the names of values."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        """The only output of a new node."""
        output = f"{operator.lower()}{len(self._nodes)}"
        self._nodes.append(
            helper.make_node(operator, list(inputs), [output], name=output, **attributes)
        )
        return output

    def constant(self, values: np.ndarray) -> str:
        """A weight."""
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def conv(
        self, x: str, channels: tuple[int, int], size: int, stride: int = 1, groups: int = 1
    ) -> str:
        """A convolution with batch normalisation; `channels` of input and output, `size` of the
        square filter."""
        ins, outs = channels
        taps = ins // groups * size * size
        weights = self._random.normal(0.0, (2.0 / taps) ** 0.5, (outs, ins // groups, size, size))
        pad = size // 2
        y = self.add(
            "Conv", x, self.constant(weights),
            kernel_shape=[size, size], strides=[stride, stride], pads=[pad] * 4, group=groups,
        )  # fmt: skip
        scale, shift, mean = (self._random.normal(centre, 0.1, outs) for centre in (1.0, 0.0, 0.0))
        variance = self._random.uniform(0.5, 1.5, outs)
        return self.add(
            "BatchNormalization",
            y,
            *(self.constant(part) for part in (scale, shift, mean, variance)),
        )

    def classifier(self, x: str, channels: int, classes: int) -> str:
        """Global average pooling and one dense layer."""
        flat = self.add("Flatten", self.add("GlobalAveragePool", x))
        weights = self._random.normal(0.0, channels**-0.5, (classes, channels))
        return self.add(
            "Gemm",
            flat,
            self.constant(weights),
            self.constant(self._random.normal(0.0, 0.1, classes)),
            transB=1,
        )

    def dense(self, x: str, ins: int, outs: int) -> str:
        """A product of rows with a constant matrix, and a bias."""
        y = self.add("MatMul", x, self.constant(self._random.normal(0.0, ins**-0.5, (ins, outs))))
        return self.add("Add", self.constant(self._random.normal(0.0, 0.1, outs)), y)

    def norm(self, x: str, size: int) -> str:
        """Layer normalisation of rows."""
        scale, shift = (self._random.normal(centre, 0.1, size) for centre in (1.0, 0.0))
        return self.add(
            "LayerNormalization",
            x,
            self.constant(scale),
            self.constant(shift),
            axis=-1,
            epsilon=1e-12,
        )

    def integers(self, values: Sequence[int]) -> str:
        """Whole numbers, such as a shape."""
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def model(self, output: str, given: Sequence[int], answer: Sequence[int]) -> onnx.ModelProto:
        """The finished model with one input `x`, and the shapes of both."""
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, given)
        y = helper.make_tensor_value_info(output, TensorProto.FLOAT, answer)
        graph = helper.make_graph(self._nodes, "model", [x], [y], self._weights)
        made = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
        )
        onnx.checker.check_model(made)
        return made


def resnet18(network: Network, classes: int) -> str:
    """Basic blocks: two 3x3 convolutions and a shortcut."""
    x = _stem(network)
    channels = 64
    for stage, outs in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = network.add("Relu", network.conv(x, (channels, outs), 3, stride))
            y = network.conv(y, (outs, outs), 3)
            shortcut = (
                x
                if channels == outs and stride == 1
                else network.conv(x, (channels, outs), 1, stride)
            )
            x = network.add("Relu", network.add("Add", y, shortcut))
            channels = outs
    return network.classifier(x, channels, classes)


def residual(network: Network, classes: int) -> str:
    """Two basic blocks of 16 channels: small enough for an emulated board at `--size 32`."""
    x = network.add("Relu", network.conv("x", (3, 16), 3))
    for _ in range(2):
        y = network.add("Relu", network.conv(x, (16, 16), 3))
        x = network.add("Relu", network.add("Add", network.conv(y, (16, 16), 3), x))
    return network.classifier(x, 16, classes)


def resnet50(network: Network, classes: int) -> str:
    """Bottleneck blocks: 1x1, 3x3 (which has the stride), 1x1, and a shortcut."""
    x = _stem(network)
    channels = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride, outs = (2 if stage and not block else 1), 4 * width
            y = network.add("Relu", network.conv(x, (channels, width), 1))
            y = network.add("Relu", network.conv(y, (width, width), 3, stride))
            y = network.conv(y, (width, outs), 1)
            shortcut = x if channels == outs else network.conv(x, (channels, outs), 1, stride)
            x = network.add("Relu", network.add("Add", y, shortcut))
            channels = outs
    return network.classifier(x, channels, classes)


def mobilenetv2(network: Network, classes: int) -> str:
    """Inverted residuals: 1x1 to more channels, depthwise 3x3, 1x1 back; ReLU6 between."""
    x = _relu6(network, network.conv("x", (3, 32), 3, 2))
    channels = 32
    for expansion, outs, blocks, first in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for block in range(blocks):
            stride, wide = (1 if block else first), channels * expansion
            y = x if expansion == 1 else _relu6(network, network.conv(x, (channels, wide), 1))
            y = _relu6(network, network.conv(y, (wide, wide), 3, stride, groups=wide))
            y = network.conv(y, (wide, outs), 1)
            x = network.add("Add", x, y) if stride == 1 and channels == outs else y
            channels = outs
    x = _relu6(network, network.conv(x, (channels, 1280), 1))
    return network.classifier(x, 1280, classes)


def bert(network: Network, batch: int, length: int, hidden: int = 768, heads: int = 12) -> str:
    """One encoder block of BERT (Devlin et al. 2018), as PyTorch exports it: attention and a
    network of two products, each with a residual and a layer normalisation after it. The input is
    what the block before it wrote."""
    size = hidden // heads
    split, merged = (
        network.integers([batch, length, heads, size]),
        network.integers([batch, length, hidden]),
    )

    def head(perm: Sequence[int]) -> str:
        parts = network.add("Reshape", network.dense("x", hidden, hidden), split)
        return network.add("Transpose", parts, perm=perm)

    query, key, value = head([0, 2, 1, 3]), head([0, 2, 3, 1]), head([0, 2, 1, 3])
    scores = network.add(
        "Div", network.add("MatMul", query, key), network.constant(np.array(size**0.5))
    )
    mixed = network.add("MatMul", network.add("Softmax", scores, axis=-1), value)
    joined = network.add("Reshape", network.add("Transpose", mixed, perm=[0, 2, 1, 3]), merged)
    x = network.norm(network.add("Add", network.dense(joined, hidden, hidden), "x"), hidden)
    y = network.dense(_gelu(network, network.dense(x, hidden, 4 * hidden)), 4 * hidden, hidden)
    return network.norm(network.add("Add", y, x), hidden)


def _gelu(network: Network, x: str) -> str:
    """As exporters write it for operator sets that do not have it."""
    erf = network.add("Erf", network.add("Div", x, network.constant(np.array(2.0**0.5))))
    y = network.add("Mul", x, network.add("Add", erf, network.constant(np.array(1.0))))
    return network.add("Mul", y, network.constant(np.array(0.5)))


def _stem(network: Network) -> str:
    x = network.add("Relu", network.conv("x", (3, 64), 7, 2))
    return network.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)


def _relu6(network: Network, x: str) -> str:
    return network.add("Clip", x, network.constant(np.array(0.0)), network.constant(np.array(6.0)))


IMAGES = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenetv2": mobilenetv2,
    "residual": residual,
}
MODELS = (*IMAGES, "bert")
#: Rows and columns of an image, and tokens of a text.
_SIZE, _LENGTH, _HIDDEN = 224, 128, 768


def make(
    name: str, *, batch: int = 1, size: int | None = None, classes: int = 1000, seed: int = 0
) -> onnx.ModelProto:
    """The model called `name`, the same for the same seed; `size` is the rows and columns of an
    image, or tokens of a text."""
    network = Network(seed)
    if name == "bert":
        shape = (batch, size or _LENGTH, _HIDDEN)
        return network.model(bert(network, *shape), shape, shape)
    size = size or _SIZE
    return network.model(IMAGES[name](network, classes), (batch, 3, size, size), (batch, classes))


def main() -> None:
    """The command line of the module's first sentences."""
    parser = argparse.ArgumentParser(description="Write an ONNX model with random weights.")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--batch", type=int, default=1, help="images or texts at once")
    parser.add_argument(
        "--size", type=int, help="rows and columns of an image (224), or tokens of a text (128)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    given = parser.parse_args()
    onnx.save(make(given.model, batch=given.batch, size=given.size, seed=given.seed), given.output)
    print(f"{given.output}: {given.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
