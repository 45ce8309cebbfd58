"""Reference answers of ONNX models. Imports onnx.

Operators that are wrong or slow in ONNX's reference evaluator are written here, from their
definitions, in NumPy alone and independently of TVM.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import (
    op_conv,
    op_instance_normalization,
    op_layer_normalization,
    op_max_pool,
    op_resize,
)

from tuna.common.messages import one_line
from tuna_models.names import OWN_DOMAINS, title
from tuna_models.operators import quantised_reference, recurrent_reference
from tuna_models.reading import qoperators
from tuna_models.refusals import REASON_CHARS

#: The first opset with quantisation in ONNX's reference.
_QUANTISED_SINCE = 19
#: The first opset whose softmax is along one axis; ONNX's reference has no other.
_ALONG_AXIS_SINCE = 13


class ReferenceFault(Exception):
    """Why an operator was not computed, after its name."""


def run(model: Any, inputs: Mapping[str, Any], names: Sequence[str] | None = None) -> list[Any]:
    """The outputs of the model, or those of its tensors, weights included, with these names; raises
    ReferenceFault where an operator cannot be computed."""
    reference = evaluator(qoperators.in_real_values(model))
    try:
        return list(reference.run(names, dict(inputs)))
    except Exception as error:  # operators raise whatever they do
        frames = traceback.walk_tb(error.__traceback__)
        operators = (frame.f_locals.get("self") for frame, _ in frames)
        node = next((each.onnx_node for each in operators if isinstance(each, OpRun)), None)
        if node is None or isinstance(error, MemoryError):
            raise
        reason = one_line(str(error).strip(), REASON_CHARS).rstrip(".") or type(error).__name__
        raise ReferenceFault(f"the operator {title(node)}: {reason}") from error


def run_node(model: Any, node: Any, inputs: Sequence[Any]) -> Any:
    """The first output of an operator of the model on other inputs than those it has there."""
    names = ["" if value is None else f"in{place}" for place, value in enumerate(inputs)]
    single = type(node)()
    single.CopyFrom(node)
    single.input[:] = names
    graph = helper.make_graph(
        [single],
        "single",
        [helper.make_tensor_value_info(name, 0, None) for name in names if name],
        [helper.make_tensor_value_info(node.output[0], 0, None)],
    )
    whole = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    given = {name: value for name, value in zip(names, inputs, strict=True) if name}
    return next(iter(evaluator(whole).run(None, given)))


def evaluate(
    model: Any, inputs: Mapping[str, Any], names: Sequence[str] = ()
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """The outputs of the model; of each of its quantised tensors, by name, the whole numbers, the
    real ones of which they are the nearest, and the type these were computed in; and the tensors
    with these names."""
    whole = qoperators.in_real_values(model)
    nodes = [node for node in whole.graph.node if node.op_type in quantised_reference.ROUNDING]
    outputs = [value.name for value in model.graph.output]
    read = [name for node in nodes for name in (*node.input, *node.output) if name]
    wanted = list(dict.fromkeys([*outputs, *read, *names]))
    values = dict(zip(wanted, run(model, inputs, wanted), strict=True))
    found = dict[str, Any]()
    for node in nodes:
        for name, real in quantised_reference.ROUNDING[node.op_type](node, values).items():
            limits = np.iinfo(values[name].dtype)
            kind = values[node.input[0]].dtype
            found[name] = values[name], np.clip(real, limits.min, limits.max), kind
    return [values[name] for name in outputs], found, values


def evaluator(model: Any) -> ReferenceEvaluator:
    """ONNX's reference evaluator with the operators here."""
    own: list[type[OpRun]] = [
        *quantised_reference.OPERATORS,
        BatchNormalization,
        Conv,
        ConvTranspose,
        GatherElements,
        GlobalMaxPool,
        InstanceNormalization,
        LayerNormalization,
        LRN,
        MaxPool,
        Resize,
        *recurrent_reference.OPERATORS,
    ]
    opset = max(entry.version for entry in model.opset_import if entry.domain in OWN_DOMAINS)
    if opset < _QUANTISED_SINCE:
        own += quantised_reference.BEFORE_19
    if opset < _ALONG_AXIS_SINCE:
        own += [Hardmax, LogSoftmax, Softmax]
    return ReferenceEvaluator(model, new_ops=own)


class BatchNormalization(OpRun):
    """Inference; below opset 14 ONNX's reference takes the statistics of the batch."""

    op_domain = ""

    def _run(
        self,
        x: Any,
        scale: Any,
        bias: Any,
        mean: Any,
        var: Any,
        epsilon: Any = None,
        **_training: Any,
    ) -> Any:
        ones = (1,) * (x.ndim - 2)
        scale, bias, mean, var = (part.reshape(-1, *ones) for part in (scale, bias, mean, var))
        return ((scale * (x - mean) / np.sqrt(var + epsilon) + bias).astype(x.dtype),)


class GatherElements(OpRun):
    """Indices for a part of the other axes, which ONNX's reference refuses."""

    op_domain = ""

    def _run(self, data: Any, indices: Any, axis: int = 0) -> Any:
        axis %= data.ndim
        part = tuple(
            slice(None) if at == axis else slice(extent) for at, extent in enumerate(indices.shape)
        )
        return (np.take_along_axis(data[part], indices, axis),)


class GlobalMaxPool(OpRun):
    """Pooling of any number of axes; ONNX's reference has it for images alone."""

    op_domain = ""

    def _run(self, x: Any) -> Any:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class _InFp32(OpRun):
    """A normalisation that is computed in fp32 for fp16, whose squares overflow in ONNX's
    reference; goes before ONNX's class."""

    op_domain = ""

    def _run(self, *inputs: Any, **attributes: Any) -> Any:
        wide = [
            each.astype(np.float32) if each is not None and each.dtype == np.float16 else each
            for each in inputs
        ]
        answers = super()._run(*wide, **attributes)  # type: ignore[no-untyped-call, safe-super]
        return tuple(each.astype(inputs[0].dtype) for each in answers)


class InstanceNormalization(_InFp32, op_instance_normalization.InstanceNormalization):
    """The operator, of fp16 in fp32."""


class LayerNormalization(_InFp32, op_layer_normalization.LayerNormalization):
    """The operator, of fp16 in fp32, as `stash_type` says."""


class LRN(OpRun):
    """The operator on any number of axes; the loop of ONNX's reference runs over the batch in the
    place of the channels."""

    op_domain = ""

    def _run(
        self, x: Any, alpha: Any = None, beta: Any = None, bias: Any = None, size: Any = None
    ) -> Any:
        squares, channels = x.astype(np.float64) ** 2, x.shape[1]
        total = np.zeros_like(squares)
        for ahead in range(-((size - 1) // 2), size // 2 + 1):
            first, last = max(0, -ahead), min(channels, channels - ahead)
            total[:, first:last] += squares[:, first + ahead : last + ahead]
        return ((x / (bias + alpha / size * total) ** beta).astype(x.dtype),)


class _AlongTheRest(OpRun):
    """Before opset 13: along all axes from `axis` on, by default from the second, as one."""

    op_domain = ""

    def _run(self, x: Any, axis: int | None = None) -> Any:
        # its default is that of the newest opset
        written = any(attribute.name == "axis" for attribute in self.onnx_node.attribute)
        at = (axis if written and axis is not None else 1) % max(x.ndim, 1)
        rows = x.reshape(int(np.prod(x.shape[:at])), -1) if x.size else x
        return (self._of_rows(rows).reshape(x.shape).astype(x.dtype),)

    def _of_rows(self, rows: Any) -> Any:
        raise NotImplementedError


class Softmax(_AlongTheRest):
    """The operator before opset 13."""

    def _of_rows(self, rows: Any) -> Any:
        return np.exp(_log_softmax(rows))


class LogSoftmax(_AlongTheRest):
    """The operator before opset 13."""

    def _of_rows(self, rows: Any) -> Any:
        return _log_softmax(rows)


class Hardmax(_AlongTheRest):
    """The operator before opset 13."""

    def _of_rows(self, rows: Any) -> Any:
        found = np.zeros_like(rows)
        if rows.size:
            found[np.arange(len(rows)), rows.argmax(axis=1)] = 1
        return found


def _log_softmax(rows: Any) -> Any:
    if not rows.size:
        return rows
    below = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=1, keepdims=True))


class Resize(op_resize.Resize):
    """Corners are aligned by whole lengths, as ONNX says; its reference takes the length before it
    is rounded down."""

    op_domain = ""

    def _run(  # type: ignore[override]
        self, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, **attributes: Any
    ) -> Any:
        if attributes.get("coordinate_transformation_mode") in _BY_LENGTH and scales is not None:
            axes = attributes.get("axes") or range(x.ndim)
            extents = [x.shape[axis] for axis in axes]
            sizes, scales = np.floor(np.array(extents, np.float32) * scales).astype(np.int64), None
        return super()._run(x, roi, scales, sizes, **attributes)


#: Modes of Resize that map the first and the last value to themselves, or to the ends of a region.
_BY_LENGTH = {"align_corners", "tf_crop_and_resize"}


class Conv(op_conv.Conv):
    """By taps, in double precision, where they are dilated: ONNX's reference writes the zeros
    between them, which take 40 GB for the dilation of 36 in a DeepLab."""

    op_domain = ""

    def _run(  # type: ignore[override]
        self, x: Any, w: Any, b: Any = None, **attributes: Any
    ) -> Any:
        given = attributes.get("auto_pad") not in (None, "NOTSET")
        if given or not any(each > 1 for each in attributes.get("dilations") or ()):
            return super()._run(x, w, b, **attributes)  # type: ignore[no-untyped-call]
        batch, groups, taps = x.shape[0], attributes.get("group") or 1, w.shape[2:]
        weights = w.astype(np.float64).reshape(groups, -1, *w.shape[1:])
        windows = _windows(x, attributes | {"kernel_shape": taps}, 0.0)
        sums, shape = 0.0, ()
        for tap, window in zip(itertools.product(*map(range, taps)), windows, strict=True):
            shape = window.shape[2:]
            sums = sums + weights[(..., *tap)] @ window.reshape(batch, groups, w.shape[1], -1)
        answer = np.reshape(sums, (batch, -1, *shape))
        return (
            (answer if b is None else answer + b.reshape(-1, *(1,) * len(taps))).astype(x.dtype),
        )


class ConvTranspose(OpRun):
    """In double precision: ONNX's reference mixes up the channels and the bias of groups."""

    op_domain = ""

    def _run(self, x: Any, w: Any, b: Any = None, **attributes: Any) -> Any:
        axes, groups = x.ndim - 2, attributes.get("group") or 1
        strides = attributes.get("strides") or [1] * axes
        dilations = attributes.get("dilations") or [1] * axes
        more = attributes.get("output_padding") or [0] * axes
        taps, sizes = w.shape[2:], x.shape[2:]
        spans = [(size - 1) * stride + 1 for size, stride in zip(sizes, strides, strict=True)]
        whole = [
            span + (tap - 1) * dilation + extra
            for span, tap, dilation, extra in zip(spans, taps, dilations, more, strict=True)
        ]
        begins, extents = _cut(whole, sizes, strides, attributes)
        batch, per_in, per_out = x.shape[0], x.shape[1] // groups, w.shape[1]
        x64 = x.astype(np.float64).reshape(batch, groups, per_in, -1)
        weights = w.astype(np.float64).reshape(groups, per_in, per_out, *taps)
        # an answer may be larger than what the input reaches
        room = np.maximum(whole, np.add(begins, extents))
        sums: Any = np.zeros((batch, groups, per_out, *room))
        for tap in itertools.product(*map(range, taps)):
            window = tuple(
                slice(at * dilation, at * dilation + span, stride)
                for at, dilation, span, stride in zip(tap, dilations, spans, strides, strict=True)
            )
            part = weights[(..., *tap)].swapaxes(1, 2) @ x64
            sums[(..., *window)] += part.reshape(batch, groups, per_out, *sizes)
        inside = tuple(
            slice(begin, begin + extent) for begin, extent in zip(begins, extents, strict=True)
        )
        answer = sums.reshape(batch, groups * per_out, *room)[(..., *inside)]
        return ((answer if b is None else answer + b.reshape(-1, *(1,) * axes)).astype(x.dtype),)


def _cut(
    whole: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    attributes: Mapping[str, Any],
) -> tuple[Sequence[int], Sequence[int]]:
    """Return begin and extents of a transposed convolution's answer within its full output."""
    auto_pad, output_shape = attributes.get("auto_pad") or "", attributes.get("output_shape")
    if output_shape is None and not auto_pad.startswith("SAME"):
        ahead, behind = np.array(attributes.get("pads") or [0] * 2 * len(whole)).reshape(2, -1)
        return list(ahead), list(np.array(whole) - ahead - behind)
    wanted = output_shape or [size * stride for size, stride in zip(sizes, strides, strict=True)]
    cut = [max(extent - answer, 0) for extent, answer in zip(whole, wanted, strict=True)]
    upper = auto_pad == "SAME_UPPER"
    return [total // 2 if upper else total - total // 2 for total in cut], list(wanted)


class MaxPool(op_max_pool.MaxPool):
    """Vectorised, because ONNX's reference loops in Python, for most of the check of a ResNet; and
    of equal values next to the padding it has the place of the padding."""

    op_domain = ""

    def _run(self, x: Any, **attributes: Any) -> Any:  # type: ignore[override]
        if attributes.get("ceil_mode") or attributes.get("auto_pad") not in (None, "NOTSET"):
            return super()._run(x, **attributes)  # type: ignore[no-untyped-call]
        if len(self.output) > 1:
            return _first_largest(x, attributes)
        sums = None
        for window in _windows(x, attributes, _lowest(x)):
            sums = window.copy() if sums is None else np.maximum(sums, window, out=sums)
        return (sums,)


def _first_largest(x: Any, attributes: Mapping[str, Any]) -> tuple[Any, Any]:
    """The largest value of each window, and the place of the first of them in the flattened
    input."""
    order: Any = "F" if attributes.get("storage_order") else "C"
    images, size = int(np.prod(x.shape[:2])), int(np.prod(x.shape[2:]))
    places = np.arange(size).reshape(x.shape[2:], order=order)
    places = (np.arange(images).reshape(*x.shape[:2], *(1,) * places.ndim) * size) + places
    windows, tops = _windows(x, attributes, _lowest(x)), _windows(places, attributes, -1)
    pairs = zip(windows, tops, strict=True)
    largest, first = (part.copy() for part in next(pairs))
    for window, place in pairs:
        better = (place >= 0) & ((window > largest) | (first < 0))
        largest, first = np.where(better, window, largest), np.where(better, place, first)
    return largest, first


def _lowest(x: Any) -> Any:
    """The lowest value of an array's type."""
    return -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min


def _windows(x: Any, attributes: Mapping[str, Any], padding: Any) -> Iterator[Any]:
    """Yield the inputs of each tap of a pool or a convolution for all values of the answer."""
    taps = attributes["kernel_shape"]
    ones = [1] * len(taps)
    strides, dilations = attributes.get("strides") or ones, attributes.get("dilations") or ones
    ahead, behind = np.array(attributes.get("pads") or [0] * 2 * len(taps)).reshape(2, -1)
    x = np.pad(x, [(0, 0), (0, 0), *zip(ahead, behind, strict=True)], constant_values=padding)
    reach = [
        size - (tap - 1) * dilation
        for size, tap, dilation in zip(x.shape[2:], taps, dilations, strict=True)
    ]
    for tap in itertools.product(*map(range, taps)):
        window = (
            slice(at * dilation, at * dilation + length, stride)
            for at, dilation, length, stride in zip(tap, dilations, reach, strides, strict=True)
        )
        yield x[(..., *window)]
