"""Lets `triton.autotune` choose among all tiles of a consumer's tuner, one after the other as it
does, and prints a line of JSON for each tile, then one with what it took:

    python -m benchmarks.gpu_autotune CONFIG SOLVER SECONDS TILES

TILES: so many of them; 0: all. They come in an order that chance decides. After the seconds no
further one is tried: what all of them would take is then told by the share that was. Each tile is
both products of the experts, with inputs and an order of rows that lie ready, so that the clock
counts nothing but Triton's own work: to compile by its JIT, and `triton.testing.do_bench`.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import triton

from benchmarks.gpu_triton import JitCuda
from tuna.configs import from_json_text
from tuna_triton.cuda_measuring import DeviceBench, PlacedCandidate
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.tiles import AXES, OPTIONS, TARGETS, Tile, tile_text

#: Milliseconds of `triton.testing.do_bench` by default: before its repeats, and of them.
_WARM_MS, _REPEAT_MS = 25, 100
#: Repeats without torch, which is where nothing is learnt from their times.
_FEW = 3
_QUANTILES = (0.5, 0.2, 0.8)
_NEVER = [math.inf] * 3


class Candidates:
    """All launches of a tile, in the place of the kernel that `triton.autotune` decorates."""

    def __init__(self, cuda: JitCuda, bench: DeviceBench, folder: Path) -> None:
        self.fn: Any = cuda.function  # whose signature it looks at
        self.arg_names = ["layer"]
        self._cuda, self._bench, self._path = cuda, bench, folder / "candidate"
        self._params = ""
        self._placed: PlacedCandidate | None = None
        self._stack = contextlib.ExitStack()

    def run(self, *_: object, **options: Any) -> None:
        """Launch the tile that the options are."""
        params = tile_text({name: options[name] for name in AXES})
        if params != self._params:
            self.place(params)
        assert self._placed is not None
        self._placed.run()

    def place(self, params: str) -> None:
        """Make a tile ready to be launched."""
        self.close()
        self._path.write_bytes(self._cuda.artifact(params).to_bytes())
        self._placed = self._stack.enter_context(self._bench.placed(str(self._path)))
        self._params = params

    def close(self) -> None:
        """Free the memory of the last tile."""
        self._stack.close()
        self._params = ""


@contextlib.contextmanager
def benchmarker(cuda: JitCuda) -> Iterator[Callable[..., Any]]:
    """Triton's own `do_bench`, or without torch one like it by the driver's events."""
    try:
        import torch
    except ImportError:
        yield lambda call, quantiles: _few_times(cuda, call)
        return
    from triton.testing import do_bench

    # its events and its emptying of the cache are in torch's current stream
    with torch.cuda.stream(torch.cuda.ExternalStream(cuda.stream)):
        yield lambda call, quantiles: do_bench(
            call, warmup=_WARM_MS, rep=_REPEAT_MS, quantiles=quantiles
        )


def _few_times(cuda: JitCuda, call: Callable[[], object]) -> list[float]:
    call()
    times = sorted(cuda.time_ms(call) for _ in range(_FEW))
    return [times[_FEW // 2], times[0], times[-1]]


def tiles_of(solver: str, config: Any, arch: str) -> list[Tile]:
    """Return each point of the consumer's space as its kernel takes it, in the order that they are
    tried."""
    description = DESCRIPTIONS[solver]
    family, target = description.family, TARGETS[arch]
    tiles = [
        family.canonical(config, tile, description.package)
        for tile in family.points(config, target)
    ]
    random.Random(1).shuffle(tiles)  # noqa: S311
    return tiles


def _config(tile: Tile) -> triton.Config:
    blocks = {name: value for name, value in tile.items() if name not in OPTIONS}
    return triton.Config(blocks, num_warps=tile["num_warps"], num_stages=tile["num_stages"])


def main() -> None:
    """Answer the command line."""
    config, solver, seconds = from_json_text(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    most = int(sys.argv[4]) or None
    cuda = JitCuda(solver, config)
    tiles = tiles_of(solver, config, cuda.facts.arch)[:most]
    bench = DeviceBench(cuda, config)
    with tempfile.TemporaryDirectory() as folder, benchmarker(cuda) as do_bench:
        candidates = Candidates(cuda, bench, Path(folder))
        for tile in {tile["BLOCK_SIZE_M"]: tile for tile in tiles}.values():
            candidates.place(tile_text(tile))  # its inputs, which depend on the tile's rows
        started = time.monotonic()
        until = started + seconds
        todo = iter(tiles)  # configs are timed in the order of their list
        done: list[tuple[str, float]] = []

        def timed(call: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
            params = tile_text(next(todo))
            if time.monotonic() > until:
                return _NEVER
            cause, found = None, _NEVER
            try:
                found = list(do_bench(call, quantiles=_QUANTILES))
            except Exception as error:  # most of them would end `triton.autotune` without a result
                cause = f"{type(error).__name__}: {str(error)[:200]}"
            middle, low, high = (one if math.isfinite(one) else None for one in found)
            line = {"params": params, "time_ms": middle, "low_ms": low, "high_ms": high}
            print(json.dumps({**line, "cause": cause}), flush=True)
            done.append((params, found[0]))
            return found

        tuner = triton.autotune(configs=list(map(_config, tiles)), key=["layer"], do_bench=timed)
        try:
            tuner(candidates).run(0)
        except (
            Exception
        ) as error:  # it launches the best one at the end, which may be unable to run
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        took = time.monotonic() - started
        candidates.close()
    bench.close()
    best = min(done, key=lambda one: one[1], default=("", math.inf))
    facts: dict[str, Any] = {"seconds": took, "tiles": len(tiles), "tried": len(done)}
    facts |= {"best": best[0] if math.isfinite(best[1]) else None}
    facts |= {"torch": getattr(sys.modules.get("torch"), "__version__", None)}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
