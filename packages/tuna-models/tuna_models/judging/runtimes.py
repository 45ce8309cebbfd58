"""Other runtimes that a built model is compared with: onnxruntime and PyTorch, both optional.

PyTorch has no reader of ONNX files, so the operators of convolutional networks are defined here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tuna_models.judging.checks import ABSENT, RUNTIMES
from tuna_models.reading.torch_importer import TorchModel

#: Runs the model in another runtime and returns its outputs as NumPy arrays.
Run = Callable[[], list[Any]]


class Absent(Exception):
    """A runtime cannot take part; the message is the reason."""


def onnxruntime(model: Any, inputs: Sequence[Any], threads: int) -> list[Run]:
    """Its session with the CPU provider."""
    if isinstance(model, TorchModel):
        raise Absent("the model is not an ONNX file")
    _require("onnxruntime")
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = dict(zip((value.name for value in session.get_inputs()), inputs, strict=True))
    return [lambda: list(session.run(None, given))]


def pytorch(model: Any, inputs: Sequence[Any], threads: int) -> list[Run]:
    """Return eager, channels-last and frozen modules; raises Absent for an unknown operator."""
    _require("pytorch")
    import torch

    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(array) for array in inputs]
    make = model.program.module if isinstance(model, TorchModel) else _Network(model).module
    eager = make()
    last = make().to(memory_format=torch.channels_last)
    last_given = [_channels_last(value) for value in tensors]
    jit: Any = torch.jit
    with torch.no_grad():
        frozen = jit.optimize_for_inference(jit.freeze(jit.trace(make(), tensors).eval()))
        for _ in range(3):  # the first runs compile it
            frozen(*tensors)
    return [
        _without_gradients(eager, tensors),
        _without_gradients(last, last_given),
        _without_gradients(frozen, tensors),
    ]


ALL: Mapping[str, Callable[[Any, Sequence[Any], int], list[Run]]] = {
    "onnxruntime": onnxruntime,
    "pytorch": pytorch,
}


def _require(name: str) -> None:
    if importlib.util.find_spec(RUNTIMES[name]) is None:
        raise Absent(ABSENT)


def _channels_last(value: Any) -> Any:
    import torch

    return value.to(memory_format=torch.channels_last) if value.dim() == 4 else value


def _without_gradients(module: Any, given: Sequence[Any]) -> Run:
    import torch

    def run() -> list[Any]:
        with torch.inference_mode():
            found = module(*given)
        return [
            value.contiguous().numpy()
            for value in (found if isinstance(found, tuple) else (found,))
        ]

    return run


class _Network:
    """The nodes of an ONNX graph, which `module` makes into a module of PyTorch."""

    def __init__(self, model: Any) -> None:
        from onnx import helper, numpy_helper

        graph = model.graph
        self._weights = {
            value.name: np.array(numpy_helper.to_array(value)) for value in graph.initializer
        }
        self._inputs = [value.name for value in graph.input if value.name not in self._weights]
        self._outputs = [value.name for value in graph.output]
        self._nodes = [
            (node, {entry.name: helper.get_attribute_value(entry) for entry in node.attribute})
            for node in graph.node
        ]
        unknown = sorted({node.op_type for node in graph.node} - set(_LAYERS))
        if unknown:
            raise Absent(f"Tuna has no PyTorch form of {', '.join(unknown)}")

    def module(self) -> Any:
        """A new module, ready for inference."""
        import torch

        steps = [
            (node, _LAYERS[node.op_type](node, attributes, self._weights))
            for node, attributes in self._nodes
        ]
        inputs, outputs = self._inputs, self._outputs
        constants = {name: torch.from_numpy(array) for name, array in self._weights.items()}

        def forward(*arguments: Any) -> Any:
            values = dict(zip(inputs, arguments, strict=True))
            for node, layer in steps:
                names = node.input[:1] if isinstance(layer, torch.nn.Module) else node.input
                values[node.output[0]] = layer(
                    *(values.get(n, constants.get(n)) for n in names if n)
                )
            answers = tuple(values[name] for name in outputs)
            return answers if len(answers) > 1 else answers[0]

        network = torch.nn.ModuleList(
            layer for _, layer in steps if isinstance(layer, torch.nn.Module)
        )
        network.forward = forward
        return network.eval()


def _conv(node: Any, attributes: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
    import torch

    kernel = weights[node.input[1]]
    if kernel.ndim != 4:
        raise Absent("it has convolutions that are not of images")
    top, left, bottom, right = attributes.get("pads", [0] * 4)
    if (top, left) != (bottom, right):
        raise Absent("it has convolutions that are padded on one side")
    groups = attributes.get("group", 1)
    layer = torch.nn.Conv2d(
        kernel.shape[1] * groups,
        kernel.shape[0],
        kernel.shape[2:],
        stride=tuple(attributes.get("strides", (1, 1))),
        padding=(top, left),
        dilation=tuple(attributes.get("dilations", (1, 1))),
        groups=groups,
        bias=len(node.input) > 2,
    )
    return _with_weights(layer, kernel, node, weights)


def _with_weights(layer: Any, kernel: Any, node: Any, weights: Mapping[str, Any]) -> Any:
    bias = {"bias": weights[node.input[2]]} if len(node.input) > 2 else {}
    _set(layer, weight=kernel, **bias)
    return layer


def _norm(node: Any, attributes: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
    import torch

    scale, bias, mean, var = (weights[name] for name in node.input[1:5])
    layer = torch.nn.BatchNorm2d(len(scale), eps=attributes.get("epsilon", 1e-5))
    _set(layer, weight=scale, bias=bias, running_mean=mean, running_var=var)
    return layer


def _dense(node: Any, attributes: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
    import torch

    kernel = weights[node.input[1]] if attributes.get("transB") else weights[node.input[1]].T
    layer = torch.nn.Linear(kernel.shape[1], kernel.shape[0], bias=len(node.input) > 2)
    return _with_weights(layer, kernel, node, weights)


def _pool(_node: Any, attributes: Mapping[str, Any], _weights: Mapping[str, Any]) -> Any:
    import torch

    top, left, bottom, right = attributes.get("pads", [0] * 4)
    if (top, left) != (bottom, right):
        raise Absent("it has pools that are padded on one side")
    return torch.nn.MaxPool2d(
        tuple(attributes["kernel_shape"]),
        tuple(attributes.get("strides", (1, 1))),
        padding=(top, left),
    )


def _clip(node: Any, _attributes: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
    import torch

    low, high = (float(weights[name]) for name in node.input[1:3])
    return torch.nn.ReLU6() if (low, high) == (0.0, 6.0) else torch.nn.Hardtanh(low, high)


def _function(name: str, *args: Any) -> Callable[..., Any]:
    """A layer that is a function of `torch`."""

    def make(_node: Any, _attributes: Mapping[str, Any], _weights: Mapping[str, Any]) -> Any:
        import torch

        function = getattr(torch, name)
        return lambda *values: function(*values, *args)

    return make


def _module(name: str, *args: Any) -> Callable[..., Any]:
    """A layer that is a class of `torch.nn`."""

    def make(_node: Any, _attributes: Mapping[str, Any], _weights: Mapping[str, Any]) -> Any:
        import torch

        return getattr(torch.nn, name)(*args)

    return make


def _set(layer: Any, **values: Any) -> None:
    import torch

    layer.load_state_dict(
        {name: torch.from_numpy(np.array(value)) for name, value in values.items()}, strict=False
    )


_LAYERS: Mapping[str, Callable[..., Any]] = {
    "Conv": _conv,
    "BatchNormalization": _norm,
    "Gemm": _dense,
    "MaxPool": _pool,
    "Clip": _clip,
    "Relu": _module("ReLU"),
    "Sigmoid": _module("Sigmoid"),
    "GlobalAveragePool": _module("AdaptiveAvgPool2d", 1),
    "Flatten": _function("flatten", 1),
    "Add": _function("add"),
    "Mul": _function("mul"),
}
