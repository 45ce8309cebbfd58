"""Times two tiles of each layer in turn, through Triton's own JIT, by torch's events where torch is
installed, and prints a line of JSON for each layer:

    python -m benchmarks.gpu_versus PAIRS.json SECONDS

PAIRS.json: a list of {"config", "solver", "default", "tuned"}, the tiles as their params. Each pair
shares its inputs; runs take turns with copies of them, and with experts, as when Tuna measures.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_triton import JitCuda, timer
from tuna.configs import from_json
from tuna.libraries.repeats import median_interval
from tuna_triton.cuda_measuring import DeviceBench

_MIN, _MAX = 10, 60


def main() -> None:
    """Answer for each pair, within the seconds together."""
    pairs, seconds = json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[2])
    until = time.monotonic() + seconds
    for place, pair in enumerate(pairs):
        share_s = (until - time.monotonic()) / (len(pairs) - place)
        print(json.dumps(compared(pair, time.monotonic() + share_s)), flush=True)


def compared(pair: Mapping[str, Any], until: float) -> dict[str, Any]:
    """How many times slower the default is than the tuned tile: the median over the rounds, and
    its 95 % interval."""
    config = from_json(pair["config"])
    cuda = JitCuda(pair["solver"], config)
    bench, time_ms = DeviceBench(cuda, config), timer(cuda)
    ratios, times = [], {"default": [], "tuned": []}  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, name) for name in times}
        for name, path in paths.items():
            path.write_bytes(cuda.artifact(pair[name]).to_bytes())
        with (
            bench.placed(str(paths["default"])) as default,
            bench.placed(str(paths["tuned"])) as tuned,
        ):
            both = {"default": default, "tuned": tuned}
            for name, one in both.items():
                error, tolerance = one.error()
                if not error <= tolerance:
                    return {"config": config.to_json(), "failed": f"{name}: error {error:.3g}"}
            with default.graph(default.once_ms()) as a, tuned.graph(tuned.once_ms()) as b:
                while len(ratios) < _MIN or (len(ratios) < _MAX and time.monotonic() < until):
                    order = [("default", a), ("tuned", b)]
                    for name, (graph, runs) in order if len(ratios) % 2 else order[::-1]:
                        launch = lambda graph=graph: cuda.launch_graph(graph)  # noqa: E731
                        times[name].append(time_ms(launch) / runs)
                    ratios.append(times["default"][-1] / times["tuned"][-1])
    bench.close()
    low, high = median_interval(ratios)
    return {
        "config": config.to_json(),
        "default_ms": statistics.median(times["default"]),
        "tuned_ms": statistics.median(times["tuned"]),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "events": "torch" if "torch" in sys.modules else "driver",
    }


if __name__ == "__main__":
    main()
