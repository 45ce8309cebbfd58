"""Resizes images in blocks of channels. Imports TVM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import te, topi
from tvm.s_tir import Schedule

from tuna.libraries.tvm.kernels import stages
from tuna_models.compiler.blocked import FP32, opaque
from tuna_models.compiler.sharing import in_rows

_OUT = "out"


@dataclass(frozen=True)
class Resizing:
    """Parameters of a two-dimensional resizing in Relax."""

    method: str
    coordinates: str
    rounding: str
    cubic_alpha: float
    cubic_exclude: int


def resized(
    extents: tuple[int, ...], size: tuple[int, ...], way: Resizing, kind: str = FP32
) -> Any:
    """Images of another size, computed in fp32 as TVM does it."""
    x = te.placeholder(extents, name="X", dtype=kind)
    batch, blocks, *_, block = extents
    wide = te.compute(extents, lambda *at: x[at].astype(FP32), name="wide")
    image = topi.image.resize2d(
        wide,
        (0.0, 0.0, 0.0, 0.0),
        size,
        layout=f"NCHW{block}c",
        method=way.method,
        coordinate_transformation_mode=way.coordinates,
        rounding_method=way.rounding,
        bicubic_alpha=way.cubic_alpha,
        bicubic_exclude=way.cubic_exclude,
    )
    y = te.compute((batch, blocks, *size, block), lambda *at: image[at].astype(kind), name=_OUT)
    sch = Schedule(stages.module_of([x, y]))
    for stage in sch.get_child_blocks(sch.get_sblock("root"))[:-1]:
        sch.compute_inline(stage)
    in_rows(sch, sch.get_sblock(_OUT))
    return opaque(sch.mod["main"])
