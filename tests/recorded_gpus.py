"""Results of TunableOp as eight GPUs of one machine leave them: `python tests/recorded_gpus.py
FOLDER` writes the files."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

GPUS, KEYS = 8, 2000
VALIDATORS = {
    "PT_VERSION": "2.10.0",
    "ROCM_VERSION": "7.0.0.0-12969-1544e39",
    "HIPBLASLT_VERSION": "1000-a6254b89",
    "ROCBLAS_VERSION": "5.0.0-72e57364",
    "GCN_ARCH_NAME": "gfx942:sramecc+:xnack-",
}
LAYERS = [
    f"GemmTunableOp_{kind}_TN,tn_{m}_{n}_{k}_ld_{k}_{k}_{m}"
    for kind in ("BFloat16", "Half", "float")
    for m in range(64, 64 * 40, 64)
    for n in (1, 16, 128, 1024)
    for k in (256, 4096, 8192, 14336, 28672)
][:KEYS]


def text(rows: Sequence[Sequence[str]], validators: Mapping[str, str] = VALIDATORS) -> str:
    """A file in the order in which PyTorch writes it."""
    lines = [f"Validator,{name},{value}" for name, value in validators.items()]
    return "".join(f"{line}\n" for line in [*lines, *map(",".join, rows)])


def record(
    folder: Path, validators: Mapping[str, str] = VALIDATORS
) -> dict[str, tuple[float, set[str]]]:
    """Write a file for each GPU, which met nine tenths of the layers; return the least time of each
    layer with the solutions that have it."""
    generator = random.Random(29)
    best: dict[str, tuple[float, set[str]]] = {}
    for gpu in range(GPUS):
        rows = []
        for layer in generator.sample(LAYERS, len(LAYERS) * 9 // 10):
            library, index = generator.choice(("Hipblaslt", "Rocblas")), generator.randrange(10**6)
            solution, time = f"Gemm_{library}_{index}", f"{generator.lognormvariate(-3, 2):.6g}"
            rows.append((layer, solution, time))
            time_ms, solutions = best.get(layer, (float("inf"), set()))
            if float(time) < time_ms:
                best[layer] = (float(time), {solution})
            elif float(time) == time_ms:
                solutions.add(solution)
        (folder / f"tunableop_results{gpu}.csv").write_text(text(rows, validators))
    return best


if __name__ == "__main__":
    record(Path(sys.argv[1]))
