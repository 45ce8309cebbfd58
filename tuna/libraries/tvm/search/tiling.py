"""What tells of the speed of a tiled loop nest whatever it computes: features that are the same for
every problem. No TVM.

MetaSchedule tiles a nest for a CPU as SSRSRS: the spatial loops four times (from 0, outermost, to
3), the reductions twice. The innermost part of the last spatial loop becomes vectors; those of the
others are values that are kept in registers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_SPATIAL, _REDUCTION = 4, 2
#: Values of fp32 in a vector, from the longest on.
_LANES = (16, 8, 4)


def features(
    tiles: Sequence[Sequence[int]], unrolling: int, location: int, instructions: Sequence[str]
) -> dict[str, float]:
    """Logarithms to the base 2 of products of factors; none of a nest that has no spatial tiles.

    `tiles`: the factors of each tiled loop, the outermost first; `unrolling`: statements that a
    nest is unrolled to at most; `location`: the sum of sampled compute locations; `instructions`:
    names of the trace's.
    """
    spatial = [tile for tile in tiles if len(tile) == _SPATIAL]
    reductions = [tile for tile in tiles if len(tile) == _REDUCTION]
    if not spatial:
        return {}
    *others, last = spatial
    found = {f"tiling.last{part}": math.log2(last[part]) for part in range(_SPATIAL)}
    found |= {
        f"tiling.others{part}": sum(math.log2(tile[part]) for tile in others)
        for part in range(_SPATIAL)
    }
    found |= {
        f"tiling.tiled{part}": float(sum(tile[part] > 1 for tile in others)) for part in (2, 3)
    }
    inner = sum(math.log2(tile[-1]) for tile in reductions)
    kept = found["tiling.last3"] + found["tiling.others3"]
    lanes = next((lanes for lanes in _LANES if last[3] % lanes == 0), 1)
    unrolled = math.log2(unrolling + 1)
    return {
        **found,
        "tiling.lanes": math.log2(lanes),
        "tiling.inner_reduction": inner,
        "tiling.outer_reduction": sum(math.log2(tile[0]) for tile in reductions),
        "tiling.registers": math.log2(2**kept / lanes + 1),
        "tiling.body": kept + inner,
        "tiling.unrolling": unrolled,
        "tiling.beyond_unrolling": kept + inner - unrolled,
        "tiling.location": float(location),
        "tiling.caches": float(instructions.count("CacheWrite")),
        "tiling.moved": float(instructions.count("ReverseComputeAt")),
    }
