"""Candidates of Triton kernels: architectures, tiles, and the launches that a tile becomes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna_triton.artifact import ELEMENT_BYTES, Buffer

#: A candidate under the names that consumers' files have.
Tile = Mapping[str, int]
AXES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
#: Further axes on AMD, which are options of its compiler.
AMD_AXES = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
#: Axes that are arguments of the compiler rather than of the kernel.
OPTIONS = ("num_warps", "num_stages", *AMD_AXES)


@dataclass(frozen=True)
class Target:
    """One architecture, as far as a compiler must know it."""

    arch: str  #: such as sm_90 or gfx942
    shared_bytes: int  #: largest dynamic shared memory of a block
    warp_size: int
    #: The 8-bit float with 4 bits of exponent that it multiplies; None: it has none.
    fp8: DataType | None
    #: Shared-memory buffers of a pipelined loop beyond `num_stages - 1`: tiles of 64 rows or more
    #: are multiplied asynchronously.
    more_buffers: int = 0

    @property
    def backend(self) -> str:
        """Triton's name of the vendor's backend."""
        return "hip" if self.arch.startswith("gfx") else "cuda"


#: CUDA: "Maximum amount of shared memory per thread block" of the programming guide's table of
#: compute capabilities. AMD: the local data share of a compute unit.
TARGETS = {
    one.arch: one
    for one in (
        Target("sm_80", 163 << 10, 32, None),
        Target("sm_90", 227 << 10, 32, DataType.FP8_E4M3, more_buffers=1),
        Target("gfx90a", 64 << 10, 64, None),
        Target("gfx942", 64 << 10, 64, DataType.FP8_E4M3FNUZ),
    )
}


@dataclass(frozen=True)
class Element:
    """A `tl.constexpr` argument that is a type."""

    name: str  #: a key of ELEMENT_BYTES


#: Value of an argument: a buffer by its name, a number, a type, or None for a pointer that the
#: kernel does not use.
Value = str | int | float | bool | Element | None


@dataclass(frozen=True)
class KernelCall:
    """One launch before it is compiled: every argument that a version of the kernel may have."""

    arguments: Mapping[str, Value]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """The launches of one candidate for one config, and the buffers that they share."""

    buffers: tuple[Buffer, ...]
    calls: tuple[KernelCall, ...]


def tile_text(tile: Tile) -> str:
    """Return a candidate's params: JSON with the axes in their usual order, after others."""
    order = {name: number for number, name in enumerate((*AXES, *AMD_AXES))}
    return json.dumps(
        {name: tile[name] for name in sorted(tile, key=lambda one: order.get(one, -1))}
    )


def tile_of(params: str, names: Collection[str] = AXES) -> Tile:
    """Return the candidate that `tile_text` wrote; raises BadInput for anything but a tile with
    these names."""
    try:
        found = json.loads(params)
        tile = {str(name): int(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError):
        tile = {}
    if not set(names) <= tile.keys() or not tile.keys() <= {*names, *AMD_AXES}:
        raise BadInput(f"{params[:200]!r} are no params of a Triton kernel.")
    return tile


def least_shared_bytes(plan: Plan, tile: Tile, target: Target) -> int:
    """Return a lower bound of the shared memory that a candidate's pipelined loop takes.

    Triton keeps `num_stages - 1` tiles of both inputs there, and one more where it multiplies
    asynchronously (tiles of 64 rows or more on sm_90).
    """
    elements = {one.name: ELEMENT_BYTES[one.element] for one in plan.buffers}
    wide = tile["BLOCK_SIZE_M"] >= 64
    buffers = tile["num_stages"] - 1 + (target.more_buffers if wide else 0)
    found = 0
    for call in plan.calls:
        a, b = (elements[str(call.arguments[name])] for name in ("a_ptr", "b_ptr"))
        each = tile["BLOCK_SIZE_K"] * (a * tile["BLOCK_SIZE_M"] + b * tile["BLOCK_SIZE_N"])
        found = max(found, buffers * each)
    return found
