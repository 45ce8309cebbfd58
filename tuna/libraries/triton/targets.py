"""Architectures that Triton kernels are compiled for, and the environments made of them."""

from __future__ import annotations

from dataclasses import dataclass

from tuna.configs.values import DataType


@dataclass(frozen=True)
class Target:
    """One architecture, as far as a compiler must know it."""

    arch: str  #: such as sm_90 or gfx942
    shared_bytes: int  #: largest dynamic shared memory of a block
    warp_size: int
    fp8: DataType | None  #: the 8-bit type with 4 bits of exponent that it multiplies
    #: shared-memory buffers of a pipelined loop beyond `num_stages - 1`, where tiles of 64 rows or
    #: more are multiplied asynchronously
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
