"""Operators on single values, which are the same in blocks of channels: which of them work there,
and on what arguments. Imports TVM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import relax

from tuna_models.compiler import blocked, fillers
from tuna_models.compiler.graph import Node, constant_of, extents

#: Numbers of axes of tensors that can be in blocks.
IMAGES = (3, 4, 5)
_TRUTH = "its values are no fp32, the one type of operators in blocks"
_SEPARATE = "the importer leaves none"
#: Why operators on single values leave the blocks, where `fillers.BOUNDS` has none for them.
OUTSIDE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("equal", "greater", "greater_equal", "isfinite", "isinf", "isnan", "less"),
            *("less_equal", "not_equal", "where", "astype"),
        ),
        _TRUTH,
    ),
    **dict.fromkeys(("collapse_sum_like", "nn.dropout", "ones_like", "zeros_like"), _SEPARATE),
    "nn.prelu": "its slopes have one axis",
    "squeeze": "it changes the axes",
    **dict.fromkeys(("tril", "triu"), "they read the index of a value"),
}


def works(node: Node, block: int) -> bool:
    """Whether an operator works on blocks, where the values that fill the last one stay finite."""
    if node.op != "divide":
        return node.op in fillers.BOUNDS
    values, shape = constant_of(node.args[1]), extents(node.var)
    whole = shape is not None and len(shape) in IMAGES and shape[1] % block == 0
    return whole or (values is not None and values.size == 1 and bool(np.all(values)))


def fits(arg: Any, shape: tuple[int, ...], block: int) -> bool:
    """Whether an elementwise operator's argument fits blocks: one value, or all channels."""
    values = constant_of(arg)
    if values is not None and not np.all(np.isfinite(values)):
        return False  # zero times infinity is NaN
    if values is not None and values.size == 1:
        return True
    given = (extents(arg) if hasattr(arg, "ty") else None) if values is None else values.shape
    if values is None and not isinstance(arg, relax.Var):
        return given is None  # a bound of a clip
    if given is None or len(given) != len(shape) or given[1] != shape[1]:
        return False
    images = (blocked.blocked_extents(each, block)[0] for each in (given, shape))
    return next(images) in (1, next(images))  # so that frames are those of the same batch
