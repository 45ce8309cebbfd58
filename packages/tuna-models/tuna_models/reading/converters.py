"""TVM's importer of ONNX, with converters for the operators that it lacks or gets wrong. Imports
TVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from tuna_models.compiler.graph import Facts, constant_of
from tuna_models.compiler.reducing import Nan, extreme, index_of_extreme
from tuna_models.operators import (
    arithmetic,
    convolving,
    fourier,
    pooling,
    quantised,
    rearranging,
    recurrent,
    resizing,
    sampling,
)
from tuna_models.operators.conversion import converters_of_tvm
from tuna_models.operators.conversion import kind_of as _kind
from tuna_models.operators.conversion import shape_of as _shape
from tuna_models.operators.quantised import QuantisedConversion
from tuna_models.refusals import Unsupported

#: Operators that are computed in fp32 where their inputs are fp16: those that add up values (fp16
#: ends at 65,504), those whose constants TVM's importer has in fp32 alone, and functions that lose
#: digits in fp16, or that LLVM has not for it.
_IN_FP32 = {
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Softmax", "LogSoftmax", "CumSum"),
    *("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSumExp"),
    *("ReduceLogSum", "LRN", "LpPool", "GlobalLpPool", "RoiAlign", "DFT", "STFT", "Mod", "Pow"),
    *("GlobalAveragePool", "AveragePool", "Elu", "Selu", "Celu", "Softplus", "HardSigmoid"),
    *("Shrink", "Mish", "Gelu", "Tanh", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh"),
    *("Tan", "Asin", "Acos", "Atan"),
    "BatchNormalization",  # TVM's answer of fp16 is fp32
    *("Relu", "Clip"),
}
#: Those of them that read the answer of another one before it is rounded to fp16: a convolution
#: keeps them as its epilogue. Relu and Clip of a rounded value are those of the value, rounded.
_UNROUNDED = {"BatchNormalization", "Relu", "Clip"}


class NotConverted(Exception):
    """An operator that cannot be imported as this node has it."""

    def __init__(self, operator: str, node: str, reason: Exception) -> None:
        super().__init__(f"{operator} ({node}): {reason}")
        self.operator, self.node, self.reason = operator, node, reason


class Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer of ONNX, with the operators here; an error has the name of the node."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """`shapes` are those of the inputs; TVM takes an extent of 0 for an open one."""
        super().__init__(dict(shapes), "float32")
        self.facts = Facts()
        self._unrounded: dict[Any, Any] = {}  #: fp32 values by their variables in fp16

    def _check_for_unsupported_ops(self, graph: Any) -> None:
        """Check nothing: `importer.unsupported` has named all with their nodes before."""

    def _convert_operator(
        self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int
    ) -> Any:
        own = OWN.get(op_name)
        half = op_name in _IN_FP32 and _is_half(inputs[0])
        try:
            if half:
                exact = self._unrounded if op_name in _UNROUNDED else {}
                inputs = onnx_frontend.onnx_input(
                    [exact[value] if value in exact else self._in_fp32(value) for value in inputs]
                )
            if own is None:
                convert = converters_of_tvm()[op_name].get_converter(opset)
                converted = convert(self.bb, inputs, attrs, [self._nodes, self._params])
            else:
                node = QuantisedConversion(op_name, inputs, attrs, opset, self.bb, self.facts)
                converted = own(node)
            outputs = attrs["tvm_custom"]["num_outputs"]
            converted = _checked(self.bb.normalize(converted), outputs)
            return self._in_fp16(converted, outputs) if half else converted
        except Exception as error:  # converters raise whatever they do
            raise NotConverted(op_name, attrs["tvm_custom"]["name"], error) from error

    def _in_fp32(self, value: Any) -> Any:
        if value is None or not _is_half(value):
            return value
        known = constant_of(value)
        if known is not None:
            return relax.const(known.astype(np.float32))
        return self.bb.emit(relax.op.astype(value, "float32"))

    def _in_fp16(self, value: Any, outputs: int) -> Any:
        """The answer of an operator that was computed in fp32."""
        if outputs > 1:
            raise Unsupported("of several outputs in fp16 only the first is supported")
        if isinstance(value.ty, relax.TupleType):
            value = self.bb.emit(relax.TupleGetItem(value, 0))
        found = self.bb.emit(relax.op.astype(value, "float16"))
        self._unrounded[found] = value
        return found


def _is_half(value: Any) -> bool:
    """Whether it is a tensor of fp16."""
    return isinstance(value.ty, relax.TensorType) and str(value.ty.dtype) == "float16"


def _checked(answer: Any, outputs: int) -> Any:
    """The answer of a converter; raises Unsupported for one with too few tensors, or whose shape is
    not known when compiling."""
    parts = list(answer.ty.fields) if isinstance(answer.ty, relax.TupleType) else [answer.ty]
    tensors = [part for part in parts if isinstance(part, relax.TensorType)]
    if len(tensors) == len(parts) < outputs:
        raise Unsupported(f"only {len(parts)} of its {outputs} outputs are supported")
    for tensor in tensors:
        if not isinstance(tensor.shape, relax.ShapeExpr) or not all(
            isinstance(extent, tirx.IntImm) for extent in tensor.shape.values
        ):
            raise Unsupported("the shape of its answer depends on values of the model's input")
    return answer


def _conv(node: QuantisedConversion) -> Any:
    adapt = convolving.transposed if node.operator == "ConvTranspose" else convolving.convolved
    return adapt(node, lambda inputs: _conv_of_images(node, inputs))


def _conv_of_images(node: QuantisedConversion, inputs: Sequence[Any]) -> Any:
    """Convert a convolution along one axis into one of images with one row, which has kernels."""
    x, w, bias = inputs
    if len(_shape(x)) != 3 or constant_of(w) is None:
        return node.of_tvm([x, w, bias])
    for name, row in {"strides": 1, "dilations": 1, "kernel_shape": 1, "output_padding": 0}.items():
        if name in node.attributes:
            node.attributes[name] = (row, *node.attributes[name])
    if "pads" in node.attributes:
        ahead, behind = node.attributes["pads"]
        node.attributes["pads"] = (0, ahead, 0, behind)
    (batch, channels, length), (outs, ins, taps) = _shape(x), _shape(w)
    image = node.shaped(x, (batch, channels, 1, length))
    found = node.of_tvm([image, node.shaped(w, (outs, ins, 1, taps)), bias])
    batch, channels, _, length = _shape(found)
    return node.shaped(found, (batch, channels, length))


def _slice(node: QuantisedConversion) -> Any:
    """Turn limits that are attributes, as before opset 10, into inputs for TVM's importer."""
    names = [name for name in ("starts", "ends", "axes") if name in node.attributes]
    limits = [relax.const(np.array(node.attributes[name], np.int64)) for name in names]
    return node.of_tvm([node.inputs[0], *limits] if limits else list(node.inputs))


def _split(node: QuantisedConversion) -> Any:
    """Convert a split that has parts of no values, which TVM's has not."""
    x, given = node.inputs[0], node.inputs[1]
    sizes = node.attributes.get("split") if given is None else constant_of(given)
    if sizes is None or 0 not in sizes:
        return node.of_tvm([x, given])
    axis, ends = int(node.attributes.get("axis", 0)) % len(_shape(x)), np.cumsum(sizes)
    parts = []
    for size, end in zip(sizes, ends, strict=True):
        shape = tuple(int(size) if at == axis else one for at, one in enumerate(_shape(x)))
        if size:
            part = relax.op.strided_slice(x, [axis], [int(end - size)], [int(end)])
            parts.append(node.emit(part))
        else:
            parts.append(relax.const(np.zeros(shape, _kind(x))))
    return relax.Tuple(parts)


def _one_hot(node: QuantisedConversion) -> Any:
    """One value where the new axis has the index, another elsewhere: also beyond the depth."""
    indices, values, depth = node.inputs[0], node.inputs[2], constant_of(node.inputs[1])
    if depth is None:
        raise Unsupported("its depth depends on the model's input")
    if constant_of(values) is not None:
        return node.of_tvm(list(node.inputs))
    size, shape = int(depth.reshape(-1)[0]), _shape(indices)
    axis = int(node.attributes.get("axis", -1)) % (len(shape) + 1)

    def compute(places: Any, choice: Any) -> Any:
        def value(*at: Any) -> Any:
            place = tirx.Cast("int64", places[(*at[:axis], *at[axis + 1 :])])
            here = tirx.any(place == at[axis], place + size == at[axis])
            return tirx.Select(here, choice[1], choice[0])

        return te.compute((*shape[:axis], size, *shape[axis:]), value, name="one_hot")

    return node.compute(compute, indices, values)


def _reduced_extreme(node: QuantisedConversion) -> Any:
    """Convert ReduceMax and ReduceMin; the axes are an input since opset 18."""
    keep, largest = node.flag("keepdims", 1), node.operator == "ReduceMax"
    return extreme(node.builder, node.inputs[0], _reduced_axes(node), keep=keep, largest=largest)


def _reduced_axes(node: QuantisedConversion) -> list[int]:
    given = node.inputs[1]
    axes = node.attributes.get("axes") if given is None else constant_of(given)
    if axes is None or not len(axes):
        axes = () if node.flag("noop_with_empty_axes") else range(len(_shape(node.inputs[0])))
    return [int(axis) for axis in axes]


def _log_sum_exp(node: QuantisedConversion) -> Any:
    """Add up beside the largest value, unless that is infinite: a row of -inf has the sum 0."""
    x, axes = node.inputs[0], _reduced_axes(node)
    kind = _kind(x)
    if not axes or not kind.startswith("float"):
        return node.of_tvm([x, node.inputs[1]])
    largest = node.emit(relax.op.max(x, axes, keepdims=True))  # a NaN is in the sum, too
    finite = node.emit(relax.op.isfinite(largest))
    largest = node.emit(relax.op.where(finite, largest, relax.const(0.0, kind)))
    powers = node.emit(relax.op.exp(node.emit(relax.op.subtract(x, largest))))
    sums = node.emit(relax.op.sum(powers, axes, keepdims=True))
    found = node.emit(relax.op.add(node.emit(relax.op.log(sums)), largest))
    return found if node.flag("keepdims", 1) else node.emit(relax.op.squeeze(found, axes))


def _index_of_extreme(node: QuantisedConversion) -> Any:
    """Convert ArgMax and ArgMin."""
    axis, keep, last = node.axis(0), node.flag("keepdims", 1), node.flag("select_last_index")
    largest = node.operator == "ArgMax"
    return node.compute(
        lambda x: index_of_extreme(x, axis, keep=keep, largest=largest, last=last, nan=Nan.PASSED),
        node.inputs[0],
    )


def _extreme(node: QuantisedConversion) -> Any:
    """Compare two inputs at a time, where TVM's importer stacks all and reduces."""
    given = list(node.inputs)
    if all(constant_of(value) is not None for value in given):
        return node.of_tvm(given)
    operator = relax.op.maximum if node.operator == "Max" else relax.op.minimum
    return reduce(lambda one, other: node.emit(operator(one, other)), given)


def _instance_norm(node: QuantisedConversion) -> Any:
    x, scale, bias = (node.inputs[number] for number in range(3))
    axes, epsilon = range(2, len(_shape(x))), node.attributes.get("epsilon", 1e-5)
    return relax.op.nn.instance_norm(x, scale, bias, 1, list(axes), epsilon)


def _layer_norm(node: QuantisedConversion) -> Any:
    """Apply a scale and a bias that broadcast after the normalisation, whose own have a value for
    each place."""
    x, scale, bias = (node.inputs[number] for number in range(3))
    shape, kind, axis = _shape(x), _kind(x), node.axis(-1)
    epsilon = node.attributes.get("epsilon", 1e-5)
    one, zero = (relax.const(fill(shape[axis:], kind)) for fill in (np.ones, np.zeros))
    whole = all(given is None or _shape(given) == shape[axis:] for given in (scale, bias))
    weights = (scale, zero if bias is None else bias) if whole else (one, zero)
    axes = list(range(axis, len(shape)))
    found = node.emit(relax.op.nn.layer_norm(x, *weights, axes, epsilon))
    if not whole:
        found = node.emit(relax.op.multiply(found, scale))
        found = found if bias is None else node.emit(relax.op.add(found, bias))
    if _shape(found) != shape:
        raise Unsupported("its scale or bias has more values than its input")
    return found


def _mean_variance_norm(node: QuantisedConversion) -> Any:
    """Add 1e-9 to the deviation, as ONNX's definition does, by its square under the root."""
    x, shape, kind = node.inputs[0], _shape(node.inputs[0]), _kind(node.inputs[0])
    reduced = {int(axis) % len(shape) for axis in node.attributes.get("axes", (0, 2, 3))}
    if len(reduced) == len(shape):  # the operator below needs an axis of channels
        x, reduced = node.shaped(x, (1, *shape)), {axis + 1 for axis in reduced}
    channels = min(set(range(len(_shape(x)))) - reduced)
    one, zero = (relax.const(fill(_shape(x)[channels], kind)) for fill in (np.ones, np.zeros))
    found = relax.op.nn.instance_norm(x, one, zero, channels, sorted(reduced), 1e-18)
    return node.shaped(node.emit(found), shape)


def _recurrent(node: QuantisedConversion) -> Any:
    return recurrent.convert(node.operator, node.builder, list(node.inputs), node.attributes)


#: Converters by operator.
OWN: Mapping[str, Callable[[QuantisedConversion], Any]] = {
    **resizing.CONVERTERS,
    **sampling.CONVERTERS,
    **arithmetic.CONVERTERS,
    **convolving.CONVERTERS,
    **fourier.CONVERTERS,
    **pooling.CONVERTERS,
    **rearranging.CONVERTERS,
    **quantised.CONVERTERS,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Slice": _slice,
    "Split": _split,
    "OneHot": _one_hot,
    "ReduceMax": _reduced_extreme,
    "ReduceMin": _reduced_extreme,
    "ReduceLogSumExp": _log_sum_exp,
    "ArgMax": _index_of_extreme,
    "ArgMin": _index_of_extreme,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "MeanVarianceNormalization": _mean_variance_norm,
    "Max": _extreme,
    "Min": _extreme,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "DynamicQuantizeLSTM": recurrent.convert_dynamic,
}
