"""Small ONNX models, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Net:
    """An ONNX graph with an input `x`; methods take and return the names of values."""

    def __init__(self, shape: tuple[int, ...], opset: int = 17, kind: Any = np.float32) -> None:
        self.shape, self.opset, self.kind = shape, opset, np.dtype(kind)
        self.random = np.random.default_rng(1)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def add(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(operator, list(inputs), [name], domain=domain, **attributes)
        )
        return name

    def constant(self, values: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(values, self.kind), name))
        return name

    def whole(self, values: Any) -> str:
        """Whole numbers, such as a shape."""
        self.weights.append(
            numpy_helper.from_array(np.asarray(values, np.int64), f"w{len(self.weights)}")
        )
        return f"w{len(self.weights) - 1}"

    def conv(
        self,
        x: str,
        ins: int,
        outs: int,
        size: int,
        *,
        norm: bool = True,
        pads: Any = None,
        **attributes: Any,
    ) -> str:
        """A convolution, by default with batch normalisation and padding that keeps the size."""
        groups = attributes.get("group", 1)
        weights = self.random.normal(
            0.0, (groups / ins) ** 0.5 / size, (outs, ins // groups, size, size)
        )
        y = self.add("Conv", x, self.constant(weights), pads=pads or [size // 2] * 4, **attributes)
        if not norm:
            return y
        parts = [*self.random.normal(1.0, 0.2, (3, outs)), self.random.uniform(0.5, 1.5, outs)]
        return self.add("BatchNormalization", y, *map(self.constant, parts))

    def relu(self, x: str) -> str:
        return self.add("Relu", x)

    def relu6(self, x: str) -> str:
        return self.add("Clip", x, self.constant(0.0), self.constant(6.0))

    def gelu(self, x: str) -> str:
        """As exporters write it for operator sets that do not have it."""
        erf = self.add("Erf", self.add("Div", x, self.constant(2.0**0.5)))
        y = self.add("Mul", x, self.add("Add", erf, self.constant(1.0)))
        return self.add("Mul", y, self.constant(0.5))

    def model(self, *outputs: str, check: bool = True, inputs: Sequence[Any] = ()) -> Any:
        """The finished model; `outputs` are of any shape, `inputs` in the place of `x`: name, type
        and shape."""
        kind = helper.np_dtype_to_tensor_dtype(self.kind)
        given = inputs or [("x", kind, self.shape)]
        values = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info(*one) for one in given],
            values,
            self.weights,
        )
        opsets = [
            helper.make_opsetid(domain, self.opset)
            for domain in {node.domain for node in self.nodes} | {""}
        ]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return onnx.shape_inference.infer_shapes(made) if check else made


def residual() -> Any:
    """A stem, two blocks of a ResNet, one with a shortcut of its own, and a classifier."""
    net = Net((1, 3, 16, 16))
    x = net.relu(net.conv("x", 3, 16, 7, strides=[2, 2]))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    y = net.conv(net.relu(net.conv(x, 16, 16, 3)), 16, 16, 3)
    x = net.relu(net.add("Add", y, x))
    y = net.conv(net.relu(net.conv(x, 16, 32, 3, strides=[2, 2])), 32, 32, 3)
    x = net.relu(net.add("Add", y, net.conv(x, 16, 32, 1, strides=[2, 2])))
    flat = net.add("Flatten", net.add("GlobalAveragePool", x))
    weights, bias = net.random.normal(0, 0.2, (10, 32)), net.random.normal(0, 1, 10)
    return net.model(net.add("Gemm", flat, net.constant(weights), net.constant(bias), transB=1))


def inverted() -> Any:
    """A block of a MobileNet whose channels fill no blocks."""
    net = Net((2, 3, 9, 9))
    x = net.relu6(net.conv("x", 3, 12, 3, strides=[2, 2]))
    y = net.relu6(net.conv(x, 12, 20, 1))
    y = net.relu6(net.conv(y, 20, 20, 3, group=20))
    return net.model(net.add("Add", x, net.conv(y, 20, 12, 1)))


def odd() -> Any:
    """What no kernel of ours takes, between convolutions that they do: TVM computes it in the
    model's own layout."""
    net = Net((1, 8, 10, 10))
    x = net.conv("x", 8, 16, 3, norm=False)
    y = net.conv(x, 16, 16, 3, norm=False, pads=[0, 0, 1, 1])
    z = net.add("AveragePool", net.relu(x), kernel_shape=[2, 2], strides=[1, 1])
    both = net.add("Concat", y, z, axis=1)
    scaled = net.add("Mul", both, net.constant(net.random.normal(1, 0.2, (1, 32, 1, 1))))
    third = net.conv(net.add("Sigmoid", scaled), 32, 8, 1, norm=False)
    return net.model(net.add("Softmax", third, axis=1), x)


def shared() -> Any:
    """Sums that more than one reads, an answer in the middle, a bias after a residual, and a ReLU
    that stands alone."""
    net = Net((1, 8, 6, 6))
    x = net.conv("x", 8, 8, 3)
    y = net.relu(x)
    twice = net.add("Add", net.conv(y, 8, 8, 1, norm=False), x)
    shifted = net.add("Add", twice, net.constant(net.random.normal(0, 1, (8, 1, 1))))
    same = net.add("Add", net.conv(shifted, 8, 8, 1), "x")
    return net.model(net.add("Add", same, same), x, shifted)


def squeezed(channels: int = 16) -> Any:
    """A block of a MobileNetV3: hard swish written out, and a gate for each channel; constants on
    either side."""
    net = Net((1, 3, 12, 12))
    x = net.conv("x", 3, channels, 3)
    shifted = net.add(
        "Clip", net.add("Add", net.constant([3.0]), x), net.constant(0.0), net.constant(6.0)
    )
    x = net.add("Div", net.add("Mul", x, shifted), net.constant([6.0]))
    x = net.add("Mul", net.constant(net.random.normal(1, 0.2, (1, channels, 1, 1))), x)
    gate = net.relu(net.conv(net.add("GlobalAveragePool", x), channels, 8, 1, norm=False))
    gate = net.add("HardSigmoid", net.conv(gate, 8, channels, 1, norm=False))
    return net.model(net.conv(net.add("Mul", gate, x), channels, 8, 1, norm=False))


def ragged() -> Any:
    """The same with channels that fill no blocks."""
    return squeezed(20)


def dense() -> Any:
    """Products of rows in two dimensions with constant matrices, one with a bias, and a product of
    two variables."""
    net = Net((2, 5, 12))
    x = net.add("MatMul", "x", net.constant(net.random.normal(0, 0.3, (12, 20))))
    x = net.relu(net.add("Add", x, net.constant(net.random.normal(0, 1, 20))))
    y = net.add("MatMul", x, net.constant(net.random.normal(0, 0.3, (20, 7))))
    return net.model(net.add("MatMul", y, net.add("Transpose", y, perm=[0, 2, 1])))


def computed_shape() -> Any:
    """A reshape to what the graph computes from a shape."""
    net = Net((2, 4, 6, 6))
    batch = net.add("Gather", net.add("Shape", net.relu("x")), net.whole([0]))
    return net.model(
        net.add(
            "Reshape", net.conv("x", 4, 8, 1), net.add("Concat", batch, net.whole([-1]), axis=0)
        )
    )


def old() -> Any:
    """Batch normalisation of an operator set whose reference normalises as in training, and one
    that follows no convolution."""
    net = Net((2, 8, 6, 6), opset=11)
    x = net.add(
        "BatchNormalization",
        "x",
        *map(net.constant, [*net.random.normal(1, 0.2, (3, 8)), [2.0] * 8]),
    )
    return net.model(net.relu6(net.conv(x, 8, 16, 3)))


def activated() -> Any:
    """Activations as exporters write them: Sigmoid, SiLU before a residual, both forms of GELU, in
    convolutions and products."""
    net = Net((1, 8, 6, 6))
    x = net.add("Sigmoid", net.conv("x", 8, 8, 3))
    y = net.conv(x, 8, 8, 1)
    x = net.add("Add", net.add("Mul", net.add("Sigmoid", y), y), x)
    x = net.gelu(net.conv(x, 8, 16, 3, norm=False))
    y = net.conv(x, 16, 16, 1, norm=False)
    cubic = net.add(
        "Add", y, net.add("Mul", net.add("Pow", y, net.constant(3.0)), net.constant(0.044715))
    )
    tanh = net.add("Tanh", net.add("Mul", net.constant([0.7978846]), cubic))
    x = net.add(
        "Mul", net.add("Mul", net.constant(0.5), y), net.add("Add", tanh, net.constant(1.0))
    )
    flat = net.add("Flatten", x)
    x = net.add("Tanh", net.add("MatMul", flat, net.constant(net.random.normal(0, 0.1, (576, 12)))))
    x = net.add(
        "Gemm",
        x,
        *map(net.constant, (net.random.normal(0, 0.3, (12, 9)), net.random.normal(0, 1, 9))),
    )
    x = net.add("MatMul", net.gelu(x), net.constant(net.random.normal(0, 0.3, (9, 8))))
    x = net.add(
        "Mul", net.add("Add", x, net.constant(0.5)), net.constant(net.random.normal(1, 0.2, 8))
    )
    shifted = net.add(
        "Clip", net.add("Add", x, net.constant(3.0)), net.constant(0.0), net.constant(6.0)
    )
    x = net.add("Mul", x, net.add("Div", shifted, net.constant(6.0)))
    return net.model(net.add("Cast", x, to=TensorProto.FLOAT16))


def attention() -> Any:
    """A block of a transformer: four tokens, two heads, an uneven number of values."""
    tokens, heads, size = 4, 2, 5
    hidden = heads * size
    net = Net((3, tokens, hidden))

    def dense(x: str, ins: int, outs: int) -> str:
        y = net.add("MatMul", x, net.constant(net.random.normal(0, ins**-0.5, (ins, outs))))
        return net.add("Add", net.constant(net.random.normal(0, 0.1, outs)), y)

    def head(perm: list[int]) -> str:
        split = net.add("Reshape", dense("x", hidden, hidden), net.whole([3, tokens, heads, size]))
        return net.add("Transpose", split, perm=perm)

    scores = net.add("MatMul", head([0, 2, 1, 3]), head([0, 2, 3, 1]))
    scores = net.add("Softmax", net.add("Div", scores, net.constant(size**0.5)), axis=-1)
    mixed = net.add("Transpose", net.add("MatMul", scores, head([0, 2, 1, 3])), perm=[0, 2, 1, 3])
    x = dense(net.add("Reshape", mixed, net.whole([3, tokens, hidden])), hidden, hidden)
    x = net.add(
        "LayerNormalization",
        net.add("Add", x, "x"),
        *map(net.constant, net.random.normal(1, 0.2, (2, hidden))),
    )
    return net.model(net.add("Add", dense(net.gelu(dense(x, hidden, 14)), 14, hidden), x))


def tokens(batch: int | str = 2, length: int | str = 6) -> Any:
    """The way into an encoder of text: token ids, a mask that hides some of them, positions from 1,
    and lengths."""
    hidden, net = 16, Net(())
    ids = net.add("Reshape", net.add("Cast", "ids", to=TensorProto.INT64), net.whole([0, -1]))
    words = net.add("Gather", net.constant(net.random.normal(0, 1, (50, hidden))), ids)
    place = net.add("Sub", "positions", net.whole(1))
    x = net.add(
        "Add", words, net.add("Gather", net.constant(net.random.normal(0, 1, (6, hidden))), place)
    )
    shown = net.add("Equal", net.add("Unsqueeze", "mask", net.whole([1])), net.whole(1))
    within = net.add("Less", net.whole(range(6)), net.add("Unsqueeze", "len.1", net.whole([1])))
    shown = net.add("And", shown, net.add("Unsqueeze", within, net.whole([1])))
    scores = net.add("MatMul", x, net.add("Transpose", x, perm=[0, 2, 1]))
    scores = net.add("Softmax", net.add("Where", shown, scores, net.constant(-np.inf)), axis=-1)
    x = net.add(
        "MatMul",
        net.add("MatMul", scores, x),
        net.constant(net.random.normal(0, 0.3, (hidden, hidden))),
    )
    rows, whole = [batch, length], (TensorProto.INT32, TensorProto.INT64)
    inputs = [
        ("ids", whole[0], rows),
        ("mask", whole[1], rows),
        ("positions", whole[1], rows),
        ("len.1", 7, [batch]),
    ]
    return net.model(net.relu(x), inputs=inputs)


def upsampled() -> Any:
    """Transposed convolutions whose taps are as many as their strides: to 20 channels with batch
    normalisation, and to two with a bias."""
    net = Net((2, 8, 5, 7))
    weights = net.constant(net.random.normal(0, 0.2, (20, 20, 2, 2)))
    y = net.add("ConvTranspose", net.conv("x", 8, 20, 1), weights, strides=[2, 2])
    parts = [*net.random.normal(1.0, 0.2, (3, 20)), net.random.uniform(0.5, 1.5, 20)]
    y = net.relu(net.add("BatchNormalization", y, *map(net.constant, parts)))
    given = [net.constant(net.random.normal(0, 0.2, shape)) for shape in ((20, 2, 3, 2), (2,))]
    return net.model(net.add("Sigmoid", net.add("ConvTranspose", y, *given, strides=[3, 2])))


def enlarged() -> Any:
    """Transposed convolutions: with batch normalisation; depthwise with an output padding; in
    groups with a bias; and alone."""
    net = Net((1, 8, 5, 6))
    alone = net.constant(net.random.normal(0, 0.2, (6, 3, 2, 2)))
    weights = net.constant(net.random.normal(0, 0.2, (8, 12, 4, 4)))
    y = net.add("ConvTranspose", "x", weights, strides=[2, 2], pads=[1, 1, 1, 1])
    parts = [*net.random.normal(1.0, 0.2, (3, 12)), net.random.uniform(0.5, 1.5, 12)]
    x = net.relu(net.add("BatchNormalization", y, *map(net.constant, parts)))
    weights = net.constant(net.random.normal(0, 0.2, (12, 1, 3, 3)))
    grouped = {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1], "group": 12}
    x = net.add("Sigmoid", net.add("ConvTranspose", x, weights, **grouped))
    weights = net.constant(net.random.normal(0, 0.2, (12, 3, 2, 2)))
    bias = net.constant(net.random.normal(0, 1, 6))
    return net.model(
        net.add("ConvTranspose", net.add("ConvTranspose", x, weights, bias, group=2), alone)
    )


NETS = {
    "tokens": tokens,
    "enlarged": enlarged,
    "upsampled": upsampled,
    "activated": activated,
    "attention": attention,
    "old": old,
    "dense": dense,
    "computed_shape": computed_shape,
    "squeezed": squeezed,
    "ragged": ragged,
    "residual": residual,
    "inverted": inverted,
    "odd": odd,
    "shared": shared,
}
