"""Kernels that Tuna can tune: where each is found, and the candidates of a config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuna.configs import Config
from tuna.errors import BadInput
from tuna_triton import kernel_file
from tuna_triton.artifact import SampledAnswer
from tuna_triton.kernel_arguments import BLOCK_FP8, GEMM, MOE, KernelFamily
from tuna_triton.kernel_file import KernelFile
from tuna_triton.tiles import (
    AXES,
    Plan,
    Target,
    Tile,
    least_shared_bytes,
    tile_of,
    tile_text,
)

#: End of the names of solvers that have one candidate, the consumer's default.
DEFAULT = "Default"
#: The solver of kernels that come in files.
USER_KERNEL = "TritonKernel"


@dataclass(frozen=True)
class KernelSpace:
    """Candidates of a config on a target."""

    tiles: Sequence[Tile]  #: candidates that differ and may run, in a fixed order
    default: Tile | None  #: the consumer's default, one of `tiles`; None: it cannot run
    size: int  #: points of the consumer's own space
    same: int  #: points left out because another one is the same kernel
    too_large: int  #: points left out because they need more shared memory than the target has


class TunedKernel(ABC):
    """A kernel with its candidates: a consumer's, Tuna's own, or one that came in a file."""

    name: str  #: the solver's name, or the file's

    @abstractmethod
    def kernel(self) -> KernelFile | None:
        """Return the kernel file; None where it is not installed."""

    @property
    def tile_names(self) -> Sequence[str]:
        """The names that a tile has, but for those of AMD's compiler."""
        return AXES

    @abstractmethod
    def space(self, config: Config, target: Target) -> KernelSpace:
        """Return the candidates that differ and can run."""

    @abstractmethod
    def plan(self, config: Config, tile: Tile, target: Target) -> Plan:
        """Return the launches of a candidate."""

    def least_shared_bytes(self, plan: Plan, tile: Tile, target: Target) -> int:
        """Return a lower bound of a candidate's shared memory, as far as it is known before it is
        compiled."""
        return 0

    def answers(self, config: Config) -> tuple[SampledAnswer, ...]:
        """Return the right answers for the artifact; none where whoever measures computes them."""
        return ()


@dataclass(frozen=True)
class Description(TunedKernel):
    """A kernel that is a solver."""

    name: str
    family: KernelFamily
    function: str  #: the kernel's name, unless `places` says another: "module.py:function"
    package: str = ""  #: name of the package whose file has the kernel; empty: Tuna's own
    places: tuple[str, ...] = ()  #: path of that file in the package's releases, newest first

    def kernel(self) -> KernelFile | None:
        """Return the kernel file; None where its package is not installed, raises BadInput where
        the package has none."""
        if not self.package:
            return kernel_file.read(Path(__file__).with_name("own_kernels.py"), self.function)
        if kernel_file.installed(self.package, "__init__.py") is None:
            return None
        for place in self.places:
            path, _, function = place.partition(":")
            source = kernel_file.installed(self.package, path)
            text = "" if source is None else source.read_text(errors="replace")
            if source is not None and f"def {function or self.function}(" in text:
                return kernel_file.read(source, function or self.function)
        raise BadInput(f"This version of {self.package} has no kernel {self.function}.")

    def plan(self, config: Config, tile: Tile, target: Target) -> Plan:
        """Return the launches of a candidate."""
        return self.family.plan(config, tile, target, self.package)

    def least_shared_bytes(self, plan: Plan, tile: Tile, target: Target) -> int:
        """Return what the tiles of the pipelined loop take."""
        return least_shared_bytes(plan, tile, target)

    def space(self, config: Config, target: Target) -> KernelSpace:
        """Return the candidates that differ and can run."""
        family = self.family
        points = [
            tile_text(family.canonical(config, tile, self.package))
            for tile in family.points(config, target)
        ]
        default = tile_text(
            family.canonical(config, family.default(config, target, self.package), self.package)
        )
        different = dict.fromkeys([*points, default])
        runs = [
            tile
            for tile in map(tile_of, different)
            if least_shared_bytes(self.plan(config, tile, target), tile, target)
            <= target.shared_bytes
        ]
        return KernelSpace(
            tiles=runs,
            default=next((tile for tile in runs if tile_text(tile) == default), None),
            size=len(points),
            same=len(points) - len(set(points)),
            too_large=len(different) - len(runs),
        )


_VLLM = "model_executor/layers/"
_SGLANG_MOE = (
    "kernels/ops/moe/fused_moe_triton_kernels.py",
    "srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_kernels.py",
    "srt/layers/moe/fused_moe_triton/fused_moe_triton_kernels.py",
)
_VLLM_BLOCK_FP8 = _VLLM + "quantization/utils/fp8_utils.py"
_SGLANG_BLOCK_FP8 = (
    "kernels/ops/gemm/fp8_kernel.py",
    "srt/layers/quantization/fp8_kernel.py",
)
#: Every kernel by the name of its solver. SGLang's Hopper variant of block-wise products is not
#: among them: it runs where a file has SWAP_AB or SPLIT_K.
DESCRIPTIONS = {
    one.name: one
    for one in (
        Description("TritonGemm", GEMM, "gemm"),
        Description("TritonBlockFp8", BLOCK_FP8, "block_fp8_gemm"),
        Description("TritonMoe", MOE, "moe"),
        Description(
            *("VllmBlockFp8", BLOCK_FP8, "_w8a8_triton_block_scaled_mm", "vllm"),
            (_VLLM_BLOCK_FP8, _VLLM_BLOCK_FP8 + ":_w8a8_block_fp8_matmul"),
        ),
        Description(
            *("VllmMoe", MOE, "fused_moe_kernel", "vllm"), (_VLLM + "fused_moe/fused_moe.py",)
        ),
        Description("SglangMoe", MOE, "fused_moe_kernel", "sglang", _SGLANG_MOE),
        Description(
            *("SglangBlockFp8", BLOCK_FP8, "_w8a8_block_fp8_matmul", "sglang"), _SGLANG_BLOCK_FP8
        ),
    )
}
