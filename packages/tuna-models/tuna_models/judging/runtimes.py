"""Other runtimes that a built model is compared with: onnxruntime and PyTorch, both optional.

PyTorch has no reader of ONNX files, so the operators of convolutional networks are defined here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

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
    """An ONNX graph whose operators `module` calls as functions of PyTorch."""

    def __init__(self, model: Any) -> None:
        graph = model.graph
        self._weights = {
            tensor.name: np.array(numpy_helper.to_array(tensor)) for tensor in graph.initializer
        }
        self._inputs = [value.name for value in graph.input if value.name not in self._weights]
        self._outputs = [value.name for value in graph.output]
        self._nodes = graph.node
        unknown = sorted({node.op_type for node in graph.node} - set(_OPERATORS))
        if unknown:
            raise Absent(f"Tuna has no PyTorch form of {', '.join(unknown)}")

    def module(self) -> Any:
        """A new module, ready for inference; raises Absent for an operator with other inputs or
        attributes than those of convolutional networks."""
        import torch

        network, places = torch.nn.Module(), dict[str, str]()
        for place, (name, array) in enumerate(self._weights.items()):
            places[name] = f"weight{place}"
            network.register_buffer(places[name], torch.from_numpy(array))
        steps = []
        for node in self._nodes:
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            given = [self._weights.get(name) for name in node.input]
            steps.append((node, _OPERATORS[node.op_type](torch, given, attributes)))

        def forward(*arguments: Any) -> Any:
            values = dict(zip(self._inputs, arguments, strict=True))
            values |= {name: getattr(network, place) for name, place in places.items()}
            for node, function in steps:
                values[node.output[0]] = function(*(values[name] for name in node.input if name))
            answers = tuple(values[name] for name in self._outputs)
            return answers if len(answers) > 1 else answers[0]

        network.forward = forward
        return network.eval()


#: The constants among an operator's inputs, None for others, and its attributes.
_Weights = Sequence[Any]
_Attributes = Mapping[str, Any]


def _conv(torch: Any, given: _Weights, attributes: _Attributes) -> Callable[..., Any]:
    if given[1] is None or given[1].ndim != 4:
        raise Absent("it has convolutions that are not of images")
    window = {
        "stride": attributes.get("strides", (1, 1)),
        "padding": _padding(attributes, "convolutions"),
        "dilation": attributes.get("dilations", (1, 1)),
        "groups": attributes.get("group", 1),
    }
    return partial(torch.nn.functional.conv2d, **window)


def _norm(torch: Any, _: _Weights, attributes: _Attributes) -> Callable[..., Any]:
    normalise, epsilon = torch.nn.functional.batch_norm, attributes.get("epsilon", 1e-5)
    return lambda x, scale, bias, *rest: normalise(x, *rest, scale, bias, eps=epsilon)


def _dense(torch: Any, _: _Weights, attributes: _Attributes) -> Callable[..., Any]:
    linear, turned = torch.nn.functional.linear, attributes.get("transB")
    return lambda x, weights, *bias: linear(x, weights if turned else weights.T, *bias)


def _pool(torch: Any, _: _Weights, attributes: _Attributes) -> Callable[..., Any]:
    return partial(
        torch.nn.functional.max_pool2d,
        kernel_size=attributes["kernel_shape"],
        stride=attributes.get("strides", (1, 1)),
        padding=_padding(attributes, "pools"),
    )


def _padding(attributes: _Attributes, what: str) -> Sequence[int]:
    top, left, bottom, right = attributes.get("pads", [0] * 4)
    if (top, left) != (bottom, right):
        raise Absent(f"it has {what} that are padded on one side")
    return top, left


def _clip(torch: Any, given: _Weights, _: _Attributes) -> Callable[..., Any]:
    low, high = (float(limit) for limit in given[1:3])
    return lambda x, *_: torch.nn.functional.hardtanh(x, low, high)


def _function(name: str, *args: Any) -> Callable[..., Callable[..., Any]]:
    """An operator that is a function of `torch`, with these last arguments."""
    return lambda torch, *_: lambda *values: getattr(torch, name)(*values, *args)


_OPERATORS: Mapping[str, Callable[[Any, _Weights, _Attributes], Callable[..., Any]]] = {
    "Conv": _conv,
    "BatchNormalization": _norm,
    "Gemm": _dense,
    "MaxPool": _pool,
    "Clip": _clip,
    "Relu": _function("relu"),
    "Sigmoid": _function("sigmoid"),
    "GlobalAveragePool": lambda torch, *_: partial(
        torch.nn.functional.adaptive_avg_pool2d, output_size=1
    ),
    "Flatten": _function("flatten", 1),
    "Add": _function("add"),
    "Mul": _function("mul"),
}
