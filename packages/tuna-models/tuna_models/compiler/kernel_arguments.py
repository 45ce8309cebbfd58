"""The arguments of a group's kernel, in its order and the forms that it reads. Imports TVM."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tvm import relax

from tuna.configs import AttentionConfig, ConvConfig, GemmConfig
from tuna.configs.attention import SCORES
from tuna.configs.task import (
    ANSWER,
    CHANNELS,
    LANES,
    PIXELS,
    SCALARS,
    START,
    Argument,
    arguments_of,
    pads,
)
from tuna.configs.values import DataType
from tuna.libraries.tvm.kernels.packing import channels_in_blocks, column_blocks
from tuna.libraries.tvm.kernels.shape import ConvShape
from tuna.libraries.tvm.kernels.signature import mask_extents
from tuna.libraries.tvm.problems import packed
from tuna_models.compiler import blocked, window_sums
from tuna_models.compiler.blocked import BF16, BYTE, FP32
from tuna_models.compiler.forms import OWN, PLAIN, Forms, TensorForm
from tuna_models.compiler.graph import constant_of, extents
from tuna_models.compiler.groups import MASKS, VALUES, FusionGroup
from tuna_models.compiler.integer_groups import IntegerGroup
from tuna_models.compiler.scores import Mask

Group = FusionGroup | IntegerGroup
#: Type of the tensors that a kernel reads, by that of its core
_READ = {DataType.FP32: OWN, DataType.BF16: BF16, DataType.INT8: BYTE}


@dataclass(frozen=True)
class Chosen:
    """The kernel of a task."""

    function: Any  #: scheduled PrimFunc
    #: packs weights for it; None for a product of two variables
    pack: Callable[[Any], Any] | None
    shape: ConvShape | None  #: Shape of a convolution
    winograd: bool = False  #: True for Winograd's sums, which are right to fewer digits


def arguments(group: Group, chosen: Chosen, forms: Forms) -> list[Any]:
    """Return what the kernel of a group reads."""
    if isinstance(group.core, AttentionConfig):
        assert isinstance(group, FusionGroup)
        return _attended(group, group.core, forms)
    if chosen.pack is not None:
        second = relax.const(chosen.pack(group.weights))
    else:
        assert isinstance(group, FusionGroup)
        second = _second_factor(group, forms)
    first = _input(group, chosen.shape, forms)
    return [first, second, *_added(group, first, chosen.shape, forms)]


def answer_extents(core: Any) -> tuple[int, ...]:
    """Extents of the answer of a product or an attention."""
    return core.shapes["y"] if isinstance(core, AttentionConfig) else rows(core)["c"]


def _attended(group: FusionGroup, core: AttentionConfig, forms: Forms) -> list[Any]:
    """The operands that an attention reads."""
    kind = _READ[core.data_type]
    leaves = {"q": group.input, "k": group.other, "v": group.added[VALUES]}
    values = [
        forms.writer.shaped(forms.leaf(leaf, kind), core.shapes[letter])
        for letter, leaf in leaves.items()
    ]
    return [*values, _mask(group.added[MASKS], core, forms)] if core.mask else values


def _mask(masks: Sequence[Mask], core: AttentionConfig, forms: Forms) -> Any:
    """The sum of an attention's masks, with whole vectors of keys."""
    extents_of = dict(zip(SCORES, core.scores, strict=True))
    given = list[Any]()
    for mask in masks:
        sizes = tuple(extents_of[axis] if axis in mask.axes else 1 for axis in SCORES)
        values = constant_of(mask.operand)
        if values is not None:
            values = values if mask.values is None else np.where(values, *mask.values)
            given.append(values.astype(np.float32).reshape(sizes))
            continue
        value = forms.leaf(mask.operand)
        if mask.values is not None:
            shown, hidden = (relax.const(each, FP32) for each in mask.values)
            value = forms.writer.emit(relax.op.where(value, shown, hidden))
        given.append(forms.writer.shaped(value, sizes))
    own, whole = core.shapes["m"], mask_extents(core, forms.block)
    missing = whole[-1] - core.keys
    constants = [each for each in given if isinstance(each, np.ndarray)]
    variables = [each for each in given if not isinstance(each, np.ndarray)]
    if constants:
        total = sum(constants[1:], constants[0])
        if not variables:
            added = [(0, 0)] * (len(own) - 1) + [(0, missing)]
            return relax.const(np.pad(total.reshape(own), added))
        variables.append(relax.const(total))
    emit, (value, *others) = forms.writer.emit, variables
    for other in others:
        value = emit(relax.op.add(value, other))
    value = forms.writer.shaped(value, own)
    if missing:
        zeros = relax.const(np.zeros((*own[:-1], missing), np.float32))
        value = emit(relax.op.concat([value, zeros], axis=-1))
    return value


def rows(core: Any) -> dict[str, tuple[int, ...]]:
    """Extents of a product's matrices, with all leading axes but those of a batch as rows."""
    batch = (core.batch_count,) if core.batch_count > 1 else ()
    return {name: (*batch, *sizes) for name, sizes in core.stored_shapes.items()}


def _input(group: Group, shape: ConvShape | None, forms: Forms) -> Any:
    """The first factor."""
    kind, core = _READ[group.core.data_type], group.core
    if shape is None:
        return forms.writer.shaped(forms.leaf(group.input, kind), rows(core)["a"])
    if group.window is not None:
        return _window(group, group.window, kind, shape, forms)
    if not shape.image:
        return forms.get(group.input, TensorForm(True, kind))
    return forms.writer.shaped(forms.leaf(group.input, kind), shape.native_input())


def _window(group: Group, window: blocked.Window, kind: str, sizes: ConvShape, forms: Forms) -> Any:
    """A copy of a window of a group's input, in blocks or an image."""
    var = group.input
    form, shape, image = TensorForm(window.blocked, kind), extents(var), sizes.image
    assert shape is not None
    own = form._replace(type=OWN)
    if kind == BF16 and (var, own) in forms.values and (var, form) not in forms.values:
        form = own  # the copy rounds
    value, source, to = forms.get(var, form), form.type or FP32, kind or FP32
    make = partial(blocked.window, shape, forms.block, window, image=image, kind=source, result=to)
    function = forms.writer.add(("window", shape, window, image, source, to), make, "window")
    values = [value]
    if window.value is None:
        assert isinstance(group, IntegerGroup)
        zero = forms.writer.emit(relax.op.astype(_stored_zero(group, forms), BYTE))
        values.append(forms.writer.shaped(zero, (1,)))
    return forms.writer.call(function, values, sizes.native_input(), to)


def _second_factor(group: FusionGroup, forms: Forms) -> Any:
    """The second factor of a product of two variables."""
    other = forms.leaf(group.other, _READ[group.core.data_type])
    if group.order is not None and group.order != sorted(group.order):
        other = forms.writer.emit(relax.op.permute_dims(other, group.order))
    return forms.writer.shaped(other, rows(group.core)["b"])


def _added(group: Group, first: Any, shape: ConvShape | None, forms: Forms) -> list[Any]:
    """The operands that are read between the weights and the answer."""
    core, tensors, scale = group.core, dict(group.added), None
    if isinstance(group, IntegerGroup):
        tensors |= group.dequantized()
        scale = _variable_scale(group, forms)
    values = []
    for argument in arguments_of(group.task.epilogue, padded=pads(core)):
        if argument.form == PIXELS:
            assert isinstance(group, IntegerGroup)
            values.append(_window_sums(group, first, shape, forms))
            continue
        value = tensors[argument.role]
        if argument.form == ANSWER:
            values.append(_residual(group, value, forms))
            continue
        is_packed = isinstance(core, ConvConfig) or argument.form == LANES
        if argument.form in (CHANNELS, LANES) and is_packed:
            value = _in_blocks(core, value, forms.block)
        value = relax.const(value)
        if isinstance(group, IntegerGroup):
            value = _with_variables(group, argument, value, scale, forms)
        values.append(value)
    return values


def _residual(group: Group, var: Any, forms: Forms) -> Any:
    """The operand that is added to the answer: in the type of the core, or real values."""
    core, kind = group.core, _READ[group.core.data_type]
    if isinstance(group, IntegerGroup) and group.addition is None:
        kind = OWN
    if isinstance(core, ConvConfig):
        return forms.get(var, TensorForm(True, kind))
    return forms.writer.shaped(forms.leaf(var, kind), rows(core)["c"])


def _window_sums(group: IntegerGroup, first: Any, shape: ConvShape | None, forms: Forms) -> Any:
    """The sums of what each pixel reads, made once for kernels that read the same."""
    windows = None if shape is None else window_sums.windows(shape)
    key = forms.integers.bases[group.input], group.zero, group.window, windows
    if key not in forms.window_sums:
        if isinstance(group.zero, relax.Var):
            zero = forms.writer.shaped(_stored_zero(group, forms), (1,))
        else:
            zero = relax.const(np.array([group.zero], np.int32))
        forms.window_sums[key] = window_sums.of(forms.writer, first, zero, shape)
    return forms.window_sums[key]


def _variable_scale(group: IntegerGroup, forms: Forms) -> Any:
    """A scale that is known when the model runs, one or one for each column; None if there is
    none."""
    if group.scale is None:
        return None
    sizes = extents(group.scale) or ()
    scale = forms.get(group.scale, PLAIN)
    return forms.writer.shaped(scale, sizes[-1:] if math.prod(sizes) > 1 else ())


def _with_variables(
    group: IntegerGroup, argument: Argument, value: Any, scale: Any, forms: Forms
) -> Any:
    """The argument multiplied by what is known when the model runs."""
    op, emit = relax.op, forms.writer.emit
    if argument.role == "factor" and scale is not None:
        return emit(op.multiply(scale, value))
    if not isinstance(group.zero, relax.Var) or argument not in (START, SCALARS):
        return value
    zero = _stored_zero(group, forms)
    if argument == START:
        return emit(op.multiply(zero, value))
    return forms.writer.shaped(emit(op.astype(zero, FP32)), (1,))


def _stored_zero(group: IntegerGroup, forms: Forms) -> Any:
    """The byte that stands for zero, in int32, where that is known when the model runs."""
    signed = forms.integers.signed[forms.integers.bases[group.input]]
    zero = forms.writer.shaped(forms.get(group.zero, PLAIN), ())
    return forms.writer.emit(relax.op.add(zero, relax.const(128 * signed)))


def _in_blocks(core: Any, values: Any, block: int) -> Any:
    """A value for each channel or column, in blocks."""
    blocks = -(-values.size // block)
    if isinstance(core, GemmConfig):
        blocks = column_blocks(values.size, block)
    return packed(values.reshape(-1), channels_in_blocks(blocks, block))
