"""Kernels that Tuna can tune: where each is found, and the candidates of a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuna.configs import Config
from tuna.errors import BadInput
from tuna.libraries.triton import kernel_file
from tuna.libraries.triton.kernel_arguments import BLOCK_FP8, GEMM, MOE, KernelFamily
from tuna.libraries.triton.kernel_file import KernelFile
from tuna.libraries.triton.tiles import (
    Target,
    Tile,
    least_shared_bytes,
    tile_of,
    tile_text,
)

#: End of the names of solvers that have one candidate, the consumer's default.
DEFAULT = "Default"


@dataclass(frozen=True)
class KernelSpace:
    """Candidates of a config on a target."""

    tiles: Sequence[Tile]  #: different kernels that may run, in a fixed order
    default: Tile | None  #: of the consumer, one of them; None: it cannot run
    size: int  #: points of the consumer's own space
    same: int  #: points left out, for another one is the same kernel
    too_large: int  #: different kernels left out, which need more shared memory than there is


@dataclass(frozen=True)
class Description:
    """A kernel that is a solver."""

    name: str
    family: KernelFamily
    function: str
    package: str = ""  #: whose installed file has it; empty: Tuna's own
    path: str = "own_kernels.py"

    def file(self) -> Path | None:
        """Return the Python file that has the kernel; None where its package is not installed."""
        if not self.package:
            return Path(__file__).with_name(self.path)
        return kernel_file.installed(self.package, self.path)

    def kernel(self) -> KernelFile:
        """Return the kernel file; raises BadInput where there is none."""
        found = self.file()
        if found is None:
            raise BadInput(f"{self.package} is not installed here, or has no {self.path}.")
        return kernel_file.read(found, self.function)

    def space(self, config: Config, target: Target) -> KernelSpace:
        """Return the candidates that differ and can run."""
        family = self.family
        points = [tile_text(family.canonical(config, one)) for one in family.points(config, target)]
        default = tile_text(family.canonical(config, family.default(config, target)))
        different = dict.fromkeys([*points, default])
        runs = [
            tile
            for tile in map(tile_of, different)
            if least_shared_bytes(family.plan(config, tile, target), tile, target)
            <= target.shared_bytes
        ]
        return KernelSpace(
            tiles=runs,
            default=next((tile for tile in runs if tile_text(tile) == default), None),
            size=len(points),
            same=len(points) - len(set(points)),
            too_large=len(different) - len(runs),
        )


_SGLANG_MOE = "srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_kernels.py"
DESCRIPTIONS = {
    one.name: one
    for one in (
        Description("TritonGemm", GEMM, "gemm"),
        Description("TritonBlockFp8", BLOCK_FP8, "block_fp8_gemm"),
        Description("TritonMoe", MOE, "moe"),
        Description(
            *("VllmBlockFp8", BLOCK_FP8, "_w8a8_block_fp8_matmul", "vllm"),
            "model_executor/layers/quantization/utils/fp8_utils.py",
        ),
        Description(
            *("VllmMoe", MOE, "fused_moe_kernel", "vllm"),
            "model_executor/layers/fused_moe/fused_moe.py",
        ),
        Description(
            *("SglangBlockFp8", BLOCK_FP8, "_w8a8_block_fp8_matmul", "sglang"),
            "srt/layers/quantization/fp8_kernel.py",
        ),
        Description("SglangMoe", MOE, "fused_moe_kernel", "sglang", _SGLANG_MOE),
    )
}
