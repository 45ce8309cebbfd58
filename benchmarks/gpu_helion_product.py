"""The product in bf16 that Helion tunes, as its documentation writes it. Helion reads the source of
a module's function, and its settings from the environment when this is imported."""

from __future__ import annotations

from typing import Any

import helion
import helion.language as hl
import torch


@helion.kernel(static_shapes=True)  # type: ignore[untyped-decorator]
def matmul(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return x y, summed in fp32."""
    m, k = x.size()
    _, n = y.size()
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, x[tile_m, tile_k], y[tile_k, tile_n])
        out[tile_m, tile_n] = acc
    return out
