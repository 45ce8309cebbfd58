"""The arguments of a kernel in order, each with role, type, form, and the steps that pack it.

They are X, W (of a product A, B), those of the epilogue (`configs.task.arguments_of`), and Y (C).
Processes without TVM and NumPy read this too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tuna.configs import AttentionConfig, Config, ConvConfig, GemmConfig, TaskConfig
from tuna.configs.task import (
    ANSWER,
    CHANNELS,
    COMPENSATION,
    LANES,
    WEIGHT_SUMS,
    Argument,
    arguments_of,
    interleaving,
    pads,
    steps_of,
)
from tuna.configs.values import Direction
from tuna.errors import BadInput
from tuna.libraries.tvm.kernels import packing
from tuna.libraries.tvm.kernels import shape as shapes
from tuna.libraries.tvm.kernels.families import FAMILIES, WIDTHS, Family, parts_of
from tuna.libraries.tvm.kernels.instructions import word_types
from tuna.libraries.tvm.kernels.packing import Steps
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.types import INT8, SIGN, TYPES, Types

INPUT, WEIGHTS = "input", "weights"
#: Arguments of attention, of which the mask is fp32
_ATTENDED, MASK = ("queries", "keys", "values"), "mask"


def added(epilogue: Sequence[str], types: Types, *, padded: bool) -> list[Argument]:
    """Return the arguments between the weights and the answer. `padded`: the input is."""
    return [
        replace(argument, type=types.resolved(argument.type))
        for argument in arguments_of(epilogue, padded=padded)
    ]


def answer_type(epilogue: Sequence[str], types: Types) -> str:
    """Return the type of the values that a kernel writes."""
    plain = types.sums if types is INT8 else types.input
    return next((step.writes for step in reversed(steps_of(epilogue)) if step.writes), plain)


def key_blocks(core: AttentionConfig, width: int) -> int:
    """Return the vectors of keys that an attention computes."""
    return packing.column_blocks(core.keys, width)


def mask_extents(core: AttentionConfig, width: int) -> tuple[int, ...]:
    """Return the extents of the mask of an attention's kernel: whole vectors of keys."""
    extents = core.shapes["m"]
    return (*extents[:-1], key_blocks(core, width) * width) if "K" in core.mask else extents


def _of_attention(core: AttentionConfig, width: int, epilogue: Sequence[str]) -> list[Argument]:
    types = TYPES[core.data_type]
    arguments = [Argument(name, name[0].upper(), INPUT, types.input) for name in _ATTENDED]
    if core.mask:
        extents, steps = list(mask_extents(core, width)), None
        if tuple(extents) != core.shapes["m"]:
            steps = {"filled": extents, "split": extents, "permuted": [*range(len(extents))]}
        arguments.append(Argument(MASK, "M", MASK, "float32", steps))
    return [*arguments, Argument(ANSWER, "Y", ANSWER, answer_type(epilogue, types))]


def _attention_packing(
    core: AttentionConfig, arguments: Sequence[Sequence[Any]]
) -> list[Steps | None] | None:
    """Return the steps to each argument of an attention's kernel: its mask may be filled up."""
    widths = [width for width in WIDTHS if core.mask]
    given = [tuple(extents) for *_, extents in arguments]
    width = next((width for width in widths if mask_extents(core, width) in given), WIDTHS[0])
    steps = [argument.steps for argument in _of_attention(core, width, ())]
    return steps if any(steps) else None


def of(
    core: ConvConfig | GemmConfig | AttentionConfig,
    family: Family,
    mode: Mode,
    width: int,
    epilogue: Sequence[str] = (),
    word_type: str = "",
) -> list[Argument]:
    """Return the arguments of a family's kernel, for vectors of `width` values and words of
    `word_type`."""
    if isinstance(core, AttentionConfig):
        return _of_attention(core, width, epilogue)
    native, types = mode is Mode.NATIVE, TYPES[core.data_type]
    steps = dict[str, Steps | None]()
    summed: Steps = {"of": 1, "summed": -SIGN}
    if isinstance(core, GemmConfig):
        steps[WEIGHTS] = packing.panels(core, width, word_type) if native else None
        blocks = packing.column_blocks(core.n, width)
        steps[LANES] = packing.channels_in_blocks(blocks, width)
        summed |= {} if core.trans_b else {"order": [1, 0]}
    elif family.packing is not None:
        sizes = shapes.of(core, width, word_type, interleaving(epilogue))
        order = {"order": packing.CHANNELS_FIRST} if core.fil_layout.endswith("C") else {}
        backward = core.direction is Direction.BACKWARD_DATA
        turned = {"turned": core.group_count} if backward else {}
        steps[WEIGHTS] = {**order, **turned, **family.packing(sizes)}
        if native:
            if not sizes.image:
                steps[INPUT] = packing.in_blocks(sizes.native_input(), core.in_layout)
            in_blocks = packing.channels_in_blocks(sizes.out_blocks, width)
            steps[CHANNELS] = steps[LANES] = in_blocks
            steps[ANSWER] = packing.in_blocks(sizes.native_output(), core.in_layout)
            if sizes.interleaved != (1, 1):
                steps[ANSWER] = packing.interleaved(sizes)
            summed |= in_blocks
    steps[WEIGHT_SUMS] = summed
    if COMPENSATION in epilogue:
        steps[INPUT] = {**(steps.get(INPUT) or {}), "offset": SIGN}
    arguments = [
        Argument(INPUT, "X", INPUT, types.input),
        Argument(WEIGHTS, "W", WEIGHTS, types.input),
        *added(epilogue, types, padded=pads(core)),
        Argument(ANSWER, "Y", ANSWER, answer_type(epilogue, types)),
    ]
    return [replace(argument, steps=steps.get(argument.form)) for argument in arguments]


def packing_for(
    config: Config, family: str, arguments: Sequence[Sequence[Any]]
) -> list[Steps | None] | None:
    """Return the steps to each argument of the kernel of a layer or task, of whose arguments the
    type and the extents are last, as a TVM record has them; None if all stay. Raises BadInput for
    weights that the family does not have."""
    core = config.core if isinstance(config, TaskConfig) else config
    if isinstance(core, AttentionConfig):
        return _attention_packing(core, arguments)
    if not family or not isinstance(core, ConvConfig | GemmConfig):
        return None
    (*_, first), (*_, kind, weights), *_, (*_, answer) = arguments
    packed = len(answer) > 4
    if isinstance(core, GemmConfig):
        packed = len(weights) > len(first)
    mode = Mode.NATIVE if packed else Mode.LAYER
    for width, word_type in itertools.product(WIDTHS, word_types(core.data_type)):
        signature = of(core, FAMILIES[family], mode, width, parts_of(config), word_type)
        steps = [argument.steps for argument in signature]
        own = steps[1]
        if own is None or (
            packing.type_of(own) == kind and packing.extents_of(own) == tuple(weights)
        ):
            return steps if any(steps) else None
    raise BadInput(f"no kernel of the family {family} takes weights of {list(weights)}, {kind}")
