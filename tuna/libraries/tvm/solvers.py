"""The solvers of the TVM library: each is one way to compute a layer, and says where it applies.
Imports no TVM.

Five sorts: families of kernels of our own for fp32, bf16 and int8 on CPUs (`kernels/`), whose few
points are all tried in order; layers as expressions whose schedule MetaSchedule searches, for what
the families do not cover; functions of models without such a layer, searched too; whole models; and
the baseline, TVM without tuning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from tuna.configs import Config, ConvConfig, GemmConfig, TaskConfig
from tuna.configs.gemm import COMMANDS, LATER
from tuna.configs.model import WholeModelConfig
from tuna.configs.sources import SOURCES
from tuna.configs.task import CASTS, Core
from tuna.configs.values import DataType, Direction
from tuna.libraries.base import Solver
from tuna.libraries.tvm.kernels import shape
from tuna.libraries.tvm.kernels.families import FAMILIES, WIDTHS, Family, is_signed_batch
from tuna.libraries.tvm.kernels.instructions import dots_of
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.vocabulary import BASELINE, kind_text

#: Numbers of channels in one block of the blocked layout, the widest that divides both channel
#: counts: 16 fp32 fill an AVX-512 register
BLOCKS = (16, 8)
#: Number of terms of the longest sums for which a solver's `error_bound` is stated: rounding grows
#: with their square root
_BOUND_TERMS = 2048 * 3 * 3
#: Number of operations above which a layer has no baseline: TVM's default code makes about 2
#: GFLOP/s, and a check takes four runs
_BASELINE_FLOPS = 4_000_000_000


@dataclass(frozen=True)
class TvmSolver:
    """One row of the table. `workloads` defines the kernel of a solver without a family, but for
    FUNCTION, whose configs are functions themselves."""

    solver: Solver
    applies: Callable[[Config, Mode], bool]
    family: str = ""  #: name in `kernels.families.FAMILIES`

    @property
    def name(self) -> str:
        """The solver's name."""
        return self.solver.name


def applicable(config: Config, target: str, conditions: Mapping[str, str]) -> Sequence[str]:
    """The solvers for `config`, compiled for `target` (the JSON text of a session's), under a
    session's conditions.

    MetaSchedule's space is searched only where no family of kernels covers the layer on every CPU:
    sums of words need an instruction.
    """
    if isinstance(config, TaskConfig):
        return _applicable_to_task(config, target, conditions)
    if isinstance(config, WholeModelConfig):
        return [MODEL.name] if config.target == target else []
    mode, cpu = mode_of(conditions), _is_cpu(target)
    kind = getattr(config, "data_type", None)
    tiled = cpu and not is_signed_batch(config)
    names = _names(TILED, config, mode, conditions) if tiled else []
    if not names or kind is not DataType.FP32:
        names = [*names, *_names(SEARCHED, config, mode, conditions)]
    return [*names, UNTUNED.name] if cpu and UNTUNED.applies(config, mode) else names


def _applicable_to_task(
    task: TaskConfig, target: str, conditions: Mapping[str, str]
) -> Sequence[str]:
    """The families that compute the task's core with its epilogue; it says its layouts by
    itself."""
    if not _is_cpu(target):
        return []
    if task.core is None:
        return [] if _is_scheduled(task) else [FUNCTION.name]
    return _names(TILED, task.core, Mode(task.layouts), conditions)


def _is_scheduled(task: TaskConfig) -> bool:
    """Whether the source of a function also makes its schedule."""
    return any(task.name in source.scheduled for source in SOURCES.all().values())


def unsupported(config: Config) -> str:
    """Return the feature of a config that no solver supports, in a few words; empty for a function
    that is scheduled by rule."""
    if isinstance(config, WholeModelConfig):
        return "models for another target"
    if isinstance(config, TaskConfig):
        if config.core:
            return "functions like this one"
        return "" if _is_scheduled(config) else "this target"
    if isinstance(config, GemmConfig):
        if config.data_type not in COMMANDS:
            return f"{config.data_type.value} products"
        later = ", ".join(name for name in config.stated_fields() if name in LATER)
        return f"products with {later}"
    if not isinstance(config, ConvConfig):
        return kind_text(config.kind)
    if config.mode == "trans":
        return "transposed convolutions"
    if config.direction is not Direction.FORWARD:
        direction = config.direction.name.replace("_", " ").lower()
        return f"{direction} of this {config.data_type.value} convolution"
    return "convolutions without an answer"


def core_of(config: Config) -> Any:
    """Return the layer of a task, or the config itself."""
    return config.core if isinstance(config, TaskConfig) else config


def sums_words(solver: str, config: Config) -> bool:
    """Whether the solver sums words of the config's small values, by an instruction that not every
    CPU has."""
    family = FAMILIES.get(BY_NAME[solver].family)
    return family is not None and family.words and bool(dots_of(core_of(config).data_type))


def mode_of(conditions: Mapping[str, str]) -> Mode:
    """Return the layouts in which the families' kernels read and write, by the condition
    `layouts`."""
    return Mode(conditions.get("layouts", Mode.LAYER.value))


def _names(
    rows: Sequence[TvmSolver], config: Config, mode: Mode, conditions: Mapping[str, str]
) -> list[str]:
    """The solvers that apply; those of Winograd only where the session allows them."""
    winograd = conditions.get("winograd", "yes") == "yes"
    return [
        row.name
        for row in rows
        if row.applies(config, mode) and (winograd or row.solver.algorithm != "Winograd")
    ]


def error_bound(solver: str, config: Config) -> float:
    """The bound that the solver states, for the config's length of sums; infinite if it states
    none."""
    stated = BY_NAME[solver].solver.error_bound
    if stated is None:
        return math.inf
    terms = 1
    if isinstance(config, TaskConfig) and config.core is not None:
        if not CASTS.keys().isdisjoint(config.epilogue):
            return math.inf  # the answer's type has fewer digits; the reference's tolerance holds
        config = config.core
    if isinstance(config, Core) and config.data_type is not DataType.FP32:
        return math.inf
    if isinstance(config, GemmConfig):
        terms = config.k
    elif isinstance(config, ConvConfig):
        channels = max(config.in_channels, config.out_channels) // config.group_count
        terms = channels * config.fil_h * config.fil_w
        if config.direction is Direction.BACKWARD_WEIGHTS:
            terms = config.batchsize * math.prod(config.output_size)
    return stated * max(1.0, math.sqrt(terms / _BOUND_TERMS))


def block_of(config: ConvConfig) -> int | None:
    """The channel block for the blocked layout, None when the channels do not divide."""
    return next(
        (b for b in BLOCKS if config.in_channels % b == 0 and config.out_channels % b == 0), None
    )


def _is_cpu(target: str) -> bool:
    try:
        return bool(json.loads(target)["kind"] == "llvm")
    except (ValueError, KeyError, TypeError):
        return False


def _applies(family: Family) -> Callable[[Config, Mode], bool]:
    """Return the family's rule as one of configs, for vectors of any width: the target's width is
    known only where TVM is."""
    if family.kind != "convolution":
        return family.applies

    def applies(config: Config, mode: Mode) -> bool:
        if not shape.supported(config) or config.data_type not in family.data_types:
            return False
        if config.data_type is not DataType.FP32 and mode is Mode.LAYER:
            return False
        return all(
            sizes.direction is family.direction and family.applies(sizes, mode)
            for sizes in (shape.of(config, width) for width in WIDTHS)
        )

    return applies


def _forward(config: Config, mode: Mode) -> TypeGuard[ConvConfig]:
    if not isinstance(config, ConvConfig) or config.direction is not Direction.FORWARD:
        return False
    return config.mode == "conv" and min(config.output_shape) > 0


def _plain_2d(config: Config, mode: Mode) -> TypeGuard[ConvConfig]:
    return _forward(config, mode) and config.spatial_dim == 2 and config.group_count == 1


def _pointwise(config: Config, mode: Mode) -> bool:
    if not _plain_2d(config, mode):
        return False
    ones = (config.fil_h, config.fil_w, config.conv_stride_h, config.conv_stride_w)
    return ones == (1, 1, 1, 1) and (config.pad_h, config.pad_w) == (0, 0)


def _blocked(config: Config, mode: Mode) -> bool:
    return _plain_2d(config, mode) and block_of(config) is not None


def _gemm(config: Config, mode: Mode) -> bool:
    return isinstance(config, GemmConfig) and config.is_plain


def _untuned(config: Config, mode: Mode) -> bool:
    if not (_forward(config, mode) or _gemm(config, mode)):
        return False
    return config.flops is not None and config.flops <= _BASELINE_FLOPS


def _of_family(family: Family) -> TvmSolver:
    kinds, bound = (family.kind, TaskConfig.kind), family.error_bound
    solver = Solver(family.solver, kinds, family.algorithm, error_bound=bound)
    return TvmSolver(solver, _applies(family), family=family.name)


def _searched(
    name: str, kind: str, algorithm: str, applies: Callable[[Config, Mode], bool]
) -> TvmSolver:
    return TvmSolver(Solver(name, (kind,), algorithm), applies)


#: Solvers of the families of kernels. The layouts are those of the session's condition `layouts`;
#: weights are packed ahead of time.
TILED: tuple[TvmSolver, ...] = tuple(map(_of_family, FAMILIES.values()))
#: Solvers of layers whose schedule MetaSchedule searches. The kernel takes the config's own tensors
#: in the config's own layouts; one that works in another layout changes it inside the kernel, and
#: its time includes that.
SEARCHED: tuple[TvmSolver, ...] = (
    _searched("TvmConvDirectNCHW", "convolution", "Direct", _forward),
    _searched("TvmConvDirectNHWC", "convolution", "Direct", _plain_2d),
    _searched("TvmConvNCHWc", "convolution", "Direct", _blocked),
    _searched("TvmConvIm2colGemm", "convolution", "GEMM", _plain_2d),
    _searched("TvmConv1x1Gemm", "convolution", "GEMM", _pointwise),
    _searched("TvmGemmDirect", "gemm", "GEMM", _gemm),
)
#: Baseline: TVM's code for a layer without a tuning database, in the layer's own layouts
UNTUNED = TvmSolver(
    Solver("TvmUntuned", ("convolution", "gemm"), BASELINE, tunable=False),
    _untuned,
)
#: Solver of a function without a core: its schedule by rule, then points of MetaSchedule's space
FUNCTION = TvmSolver(
    Solver("TvmFunction", (TaskConfig.kind,), "Direct"), lambda config, mode: False
)
#: Solver of a whole model with kernels that were chosen for it, which it checks and times
MODEL = TvmSolver(
    Solver("TvmModel", (WholeModelConfig.kind,), "Direct", tunable=False),
    lambda config, mode: False,
)
TABLE: tuple[TvmSolver, ...] = (*TILED, *SEARCHED, FUNCTION, MODEL, UNTUNED)
BY_NAME = {row.name: row for row in TABLE}
