"""The params of the fin double's perf configs, in the text forms of MIOpen's own classes.

How many numbers a solver's params have, and in which range each lies, is that of the perf dbs that
MIOpen ships, so that its classes read what the double wrote. They ship none for ConvAsm1x1UV2, the
Mlir solvers on XDLOPS devices and the grouped solvers of Composable Kernel: those forms follow the
sources of MIOpen 3.3 and were not read back by it.
"""

from __future__ import annotations

from itertools import product

from .fin_problem import Device, Problem
from .fin_solvers import PRECOMPILED, Solver

#: perf_compile sends the one kernel of these solvers once for each number of wave groups.
REPEATING = ("ConvBinWinogradRxSf3x2", "ConvBinWinogradRxSf2x3")
_REPETITIONS = 60
#: Perf configs of another solver at most; MIOpen has up to some thousands.
_MANY = 8
WORDS = {"F": "fwd", "B": "bwd", "W": "wrw"}
#: Rows and columns of a workgroup's tile.
_TILES = ((128, 64), (128, 128), (64, 64), (64, 128), (256, 64), (256, 128))
#: Block size, tile of a workgroup (rows, columns, depth), tile of a thread.
_BLOCKS = tuple(
    f"{16 * m * n // 64},{m},{n},{k},{t},{t}"
    for m, n, k, t in product((32, 64), (32, 64), (4, 8), (2, 4))
)
#: Each number of some solvers' params: the values that it takes here.
_NUMBERS: dict[str, tuple[tuple[int, ...], ...]] = {
    "ConvAsm1x1U": ((1, 2, 4), (8, 16), (2,), (16, 32), (1,), (2,), (1, 2), (2,)),
    "ConvAsm1x1UV2": ((4,), (1, 2), (8, 16), (1, 2), (1,), (1,), (1,), (4,), (1,), (1, 2)),
    "ConvAsm3x3U": ((0, 1), (2, 4), (1, 3, 7)),
    "ConvAsmBwdWrW1x1": ((1,), (16,), (2, 4), (2, 4), (2, 4), (1,), (1,), (4,), (0,), (0, 1)),
    "ConvAsmBwdWrW3x3": ((0, 1), (0,), (8, 16), (2, 4), (1, 2), (1, 2)),
    "ConvCkIgemmFwdV6r1DlopsNchw": (tuple(range(8)),),
    "ConvOclDirectFwd": ((8, 16), (8, 16), (16, 32), (16, 32), (2,), (2,), (4, 8), (1,), (1, 2)),
    "ConvOclDirectFwd1x1": ((1,), (64, 128), (1,), (1,), (0,), (1, 2, 4), (8, 16), (4,), (0,)),
    **{
        f"ConvOclBwdWrW2<{n}>": ((1, 3), (6, 7), (1, 3, 8), (1, 8), (7, 9))
        for n in (1, 2, 4, 8, 16)
    },
    **dict.fromkeys(
        ("ConvHipImplicitGemmV4R1Fwd", "ConvHipImplicitGemmV4R1WrW"),
        (
            (16,),
            (64, 128),
            (8, 16),
            (2,),
            (2, 4),
            (2, 4),
            (4,),
            (4,),
            (4,),
            (4,),
            (8,),
            (1,),
            (16,),
            (1,),
            (4,),
            (64,),
        ),
    ),
}


def perf_configs(solver: Solver, problem: Problem, device: Device) -> list[str]:
    """The params of every perf config of a solver; one empty string if it is not tunable."""
    if not solver.tunable:
        return [""]
    if solver.name in REPEATING:
        return [
            str(groups)
            for groups in sorted({*range(1, min(_REPETITIONS, device.num_cu)), device.num_cu})
        ]
    if "GTCDynamic" in solver.name:
        head = f"{WORDS[problem.direction]},nhwc,{problem.data_type.lower()},0,0"
        # The last number is the kernel's in MIOpen's list, in brackets the logarithm of how often
        # the sum is split.
        tail = "0,0,2,0,0,1,8,2,1,1,4,1,64,1,8,1,2,1,4,1,64"
        return [
            f"{head},{m},{n},16,32,32,2,1,1,2,2,{tail},{number}[2]"
            for number, (m, n) in enumerate(_TILES)
        ]
    if solver.name in PRECOMPILED:
        stem = f"DeviceGroupedConv{WORDS[problem.direction].title()}_Xdl_CShuffle"
        return [f"{stem}<256, {m}, {n}, 32, Default, 8, 8>" for m, n in _TILES]
    if solver.name in _NUMBERS:
        return [",".join(map(str, numbers)) for numbers in product(*_NUMBERS[solver.name])][:_MANY]
    if solver.name.endswith("Xdlops"):
        return [f"{m},{n},4,64,64,4,1,1" for m, n in _TILES]
    return list(_BLOCKS[:_MANY])
