"""Lets Helion tune a product in bf16 with full effort, then times what it chose beside a tile of
Tuna's in turn, and prints a line of JSON with what it took:

    python -m benchmarks.gpu_helion CONFIG PARAMS SECONDS FOLDER

PARAMS: Tuna's tile; empty: nothing is compared. Helion ends by itself when most of the seconds have
passed (`autotune_budget_seconds`), and then its full effort would have taken longer. It writes a
line for each of its candidates into `FOLDER/helion.csv`. Where Helion or torch cannot be imported
the line says `left_out`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuna.configs import GemmConfig, from_json_text
from tuna.libraries.repeats import median_interval

_SOLVER = "TritonGemm"
#: Launches that are timed together, and pairs of them.
_LAUNCHES, _PAIRS = 20, 30
#: Sets of tensors that launches take turns with, as a search of Tuna's has them.
_SETS = 2


def main() -> None:
    """Answer the command line."""
    config, params = from_json_text(sys.argv[1]), sys.argv[2]
    seconds, folder = float(sys.argv[3]), Path(sys.argv[4])
    assert isinstance(config, GemmConfig)
    os.environ |= {
        "HELION_AUTOTUNE_EFFORT": "full",
        "HELION_AUTOTUNE_BUDGET_SECONDS": str(int(seconds)),
        "HELION_AUTOTUNE_LOG": str(folder / "helion"),
        "HELION_AUTOTUNE_PROGRESS_BAR": "0",
        "HELION_FORCE_AUTOTUNE": "1",
    }
    try:
        import torch

        from benchmarks.gpu_helion_product import matmul
    except Exception as error:  # it reads the versions of torch and Triton when it is imported
        print(json.dumps({"left_out": f"Helion: {type(error).__name__}: {error}"}), flush=True)
        return
    chance = torch.Generator(device="cuda").manual_seed(1)
    shapes = (config.m, config.k), (config.k, config.n)
    inputs = [
        [
            (2 * torch.rand(shape, device="cuda", generator=chance) - 1).to(torch.bfloat16)
            for shape in shapes
        ]
        for _ in range(_SETS)
    ]
    started = time.monotonic()
    chosen = matmul.autotune(tuple(inputs[0]), force=True)
    facts: dict[str, Any] = {"seconds": time.monotonic() - started, "chosen": repr(chosen)}
    facts["whole"] = facts["seconds"] < 0.7 * seconds  # it keeps up to a quarter for its finals
    print(json.dumps(facts), flush=True)
    if params:
        print(json.dumps(_versus(torch, matmul, inputs, config, params)), flush=True)


def _versus(
    torch: Any, kernel: Any, inputs: list[list[Any]], config: GemmConfig, params: str
) -> dict[str, Any]:
    """Return how many times slower Helion's choice is than the tile: the median over the pairs, and
    its 95 % interval."""
    from benchmarks.gpu_triton import JitCuda, timer
    from tuna_triton.cuda_measuring import DeviceBench

    cuda = JitCuda(_SOLVER, config)
    bench, time_ms = DeviceBench(cuda, config), timer(cuda)
    ratios: list[float] = []
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "candidate")
        path.write_bytes(cuda.artifact(params).to_bytes())
        with bench.placed(str(path)) as tile:
            error, tolerance = tile.error()
            if not error <= tolerance:
                return {"failed": f"Tuna's tile: error {error:.3g}"}
            stream = torch.cuda.ExternalStream(cuda.stream)

            def theirs() -> None:
                with torch.cuda.stream(stream):
                    for number in range(_LAUNCHES):
                        kernel(*inputs[number % _SETS])

            def ours() -> None:
                for number in range(_LAUNCHES):
                    tile.run(number)

            both: dict[str, Callable[[], None]] = {"theirs": theirs, "ours": ours}
            for work in both.values():
                work()  # compiles
            cuda.synchronize()
            for number in range(_PAIRS):
                for name in list(both)[:: 1 if number % 2 else -1]:
                    times[name].append(time_ms(both[name]) / _LAUNCHES)
                ratios.append(times["theirs"][-1] / times["ours"][-1])
    bench.close()
    low, high = median_interval(ratios)
    facts = {f"{name}_ms": statistics.median(some) for name, some in times.items()}
    return {**facts, "ratio": statistics.median(ratios), "low": low, "high": high}


if __name__ == "__main__":
    main()
