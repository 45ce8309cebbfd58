"""The arguments of a kernel in order, each with role, type, form, and the steps that pack it.

They are X, W (of a product A, B), those of the epilogue (`configs.task.arguments_of`), and Y (C).
Processes without TVM and NumPy read this too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig
from tuna.configs.task import (
    ANSWER,
    CHANNELS,
    COMPENSATION,
    LANES,
    WEIGHT_SUMS,
    Argument,
    arguments_of,
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


def of(
    core: ConvConfig | GemmConfig,
    family: Family,
    mode: Mode,
    width: int,
    epilogue: Sequence[str] = (),
    word_type: str = "",
) -> list[Argument]:
    """Return the arguments of a family's kernel, for vectors of `width` values and words of
    `word_type`."""
    native, types = mode is Mode.NATIVE, TYPES[core.data_type]
    steps = dict[str, Steps | None]()
    summed: Steps = {"of": 1, "summed": -SIGN}
    if isinstance(core, GemmConfig):
        steps[WEIGHTS] = packing.panels(core, width, word_type) if native else None
        blocks = packing.column_blocks(core.n, width)
        steps[LANES] = packing.channels_in_blocks(blocks, width)
        summed |= {} if core.trans_b else {"order": [1, 0]}
    elif family.packing is not None:
        sizes = shapes.of(core, width, word_type)
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
    if not family or not isinstance(core, ConvConfig | GemmConfig):
        return None
    (*_, first), (*_, kind, weights), *_, (*_, answer) = arguments
    packed = len(answer) == 5
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
