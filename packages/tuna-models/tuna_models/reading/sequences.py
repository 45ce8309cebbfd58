"""What is known of sequences of tensors before they are made, and of a value that stays as it is.
Imports onnx.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from tuna_models.reading.onnx_shapes import Call, Tensor, Unknown, check_parts, known
from tuna_models.refusals import Unsupported


def _tensors(call: Call) -> list[Tensor]:
    """Those of the first input; raises Unknown."""
    tensors = call.input(0).tensors
    if tensors is None:
        raise Unknown
    return tensors


def _constructed(call: Call) -> Tensor:
    return Tensor(tensors=[tensor for tensor in call.inputs if tensor is not None])


def _at(call: Call) -> Tensor:
    tensor = _tensors(call)[call.integer(1)]
    return Tensor(tensor.kind, tensor.shape)


def _inserted(call: Call) -> Tensor:
    tensors = list(_tensors(call))
    tensors.insert(call.integer(2) if call.has(2) else len(tensors), call.input(1))
    return Tensor(tensors=tensors)


def _erased(call: Call) -> Tensor:
    tensors = list(_tensors(call))
    del tensors[call.integer(1) if call.has(1) else -1]
    return Tensor(tensors=tensors)


def _length(call: Call) -> Tensor:
    return Tensor(TensorProto.INT64, (), values=np.array(len(_tensors(call))))


def _joined(call: Call) -> Tensor:
    tensors = _tensors(call)
    shapes = [known(tensor.shape) for tensor in tensors]
    new = bool(call.attributes.get("new_axis"))
    axis, first = call.axis(len(shapes[0]) + new), shapes[0]
    if new:
        return Tensor(tensors[0].kind, (*first[:axis], len(shapes), *first[axis:]))
    total = sum(shape[axis] for shape in shapes)
    return Tensor(tensors[0].kind, (*first[:axis], total, *first[axis + 1 :]))


def _split(call: Call) -> Tensor:
    shape, kind = call.shape(0), call.input(0).kind
    axis, keeps = call.axis(len(shape)), call.attributes.get("keepdims", 1)
    extent = shape[axis]
    if not call.has(1):
        size, parts = 1, extent
    elif call.input(1).shape == ():
        keeps, size = 1, call.integer(1)
        if size < 1:
            raise Unsupported(f"it has parts of the size {size}")
        parts = -(-extent // size)
    else:
        sizes = call.integers(1) or []
        return Tensor(
            tensors=[Tensor(kind, (*shape[:axis], each, *shape[axis + 1 :])) for each in sizes]
        )
    check_parts(parts)
    return Tensor(
        tensors=[
            Tensor(
                kind,
                (
                    *shape[:axis],
                    *((min(size, extent - size * place),) if keeps else ()),
                    *shape[axis + 1 :],
                ),
            )
            for place in range(parts)
        ]
    )


def _same(call: Call) -> Tensor:
    given = call.input(0)
    return Tensor(given.kind, given.shape, given.proto, given.values, tensors=given.tensors)


RULES: dict[str, Callable[[Call], Tensor]] = {
    "Identity": _same,
    "SequenceEmpty": lambda call: Tensor(tensors=[]),
    "SequenceConstruct": _constructed,
    "SequenceAt": _at,
    "SequenceInsert": _inserted,
    "SequenceErase": _erased,
    "SequenceLength": _length,
    "ConcatFromSequence": _joined,
    "SplitToSequence": _split,
}
