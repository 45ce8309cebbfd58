"""Search for the tiles of fused experts at 18 batch sizes, on a simulated H100: nothing is compiled
or launched, and no time here is that of a device.

A tile's time is made of what a launch does: waves of programs, their loops, loads from memory and
from the L2 cache with as many bytes in flight as stages and shared memory allow, products at a rate
that depends on the tile, registers that do not suffice, programs without rows, and a factor of some
percent that is drawn for each kernel, as a compiler's luck. A measurement has one percent of noise.

Of each way the geometric mean, over batch sizes and seeds, of the time of the tile that it finds
over that of the best one; `random`: as many trials by chance; `alone`: each search learns from its
own trials; `beside`: all begin at once, and learn from each other from their third round on;
`after`: one begins when the one before has ended. All trials are `exhaustive_trials`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

from benchmarks.harness import Outcome, command_line
from benchmarks.triton_builds import layer
from tuna.libraries.kernels import Known, Past
from tuna.libraries.search.proposal import Strategy, propose
from tuna_triton.descriptions import DESCRIPTIONS
from tuna_triton.moe import FP8, MoeConfig
from tuna_triton.space import TileSpace
from tuna_triton.tiles import TARGETS, tile_of
from tuna_triton.tuned_files import GRID

#: Layers by a name: the one that vLLM #44830 tuned, and Mixtral on two ranks.
LAYERS: Mapping[str, Callable[[int], MoeConfig]] = {
    "E512": layer,
    "Mixtral": lambda tokens: MoeConfig(tokens, 8, 7168, 4096, 2),
}
#: Of the simulated device: multiprocessors, bytes a second of memory, and operations a second in 8
#: bits; in 16 bits they are half as many.
_UNITS, _MEMORY, _RATE = 132, 3.0e12, 1.5e15
_SHARED, _REGISTERS, _LATENCY_S = 227 << 10, 65536, 650e-9
#: Logarithmic standard deviations: of a kernel's luck, of its luck at a batch size, of a
#: measurement, and of a measurement in finals.
_KERNEL, _BATCH, _NOISE, _FINAL = 0.03, 0.01, 0.01, 0.004
_ROUND, _ROUNDS, _FINALISTS = 16, 4, 4
#: The round whose proposals are the first that may learn from results, and the number of searches
#: that one learns from.
_INFORMED, _SIBLINGS = 2, 8


class SimulatedGpu:
    """The times of one layer's tiles."""

    def __init__(self, config: MoeConfig) -> None:
        self._config = config
        chance, rows = Random(config.tokens), Counter[int]()  # noqa: S311
        for _ in range(config.tokens):
            rows.update(chance.sample(range(config.experts), config.topk))
        self._rows = list(rows.values())  # of each expert that has any
        self._seconds = functools.cache(self._time)

    def seconds(self, params: str) -> float:
        """The true time of a tile."""
        return self._seconds(params)

    def _time(self, params: str) -> float:
        config, tile = self._config, tile_of(params)
        m, n, k, _, warps, stages = tile.values()
        width, rate = (1, _RATE) if config.scheme == FP8 else (2, _RATE / 2)
        loaded = (m + n) * k * width  # by a step of a loop
        registers = 40 + m * n / (32 * warps) + (24 if m < 64 else 0)
        spilled = 1 + 2.5 * max(0.0, registers - 255) / 255
        resident = min(
            _SHARED // ((stages - 1 + (m >= 64)) * loaded),
            _REGISTERS // int(min(255, registers) * 32 * warps),
            64 // warps,
        )
        share = (0.8 if m >= 64 else 0.42) * min(1.0, (m / 128) ** 0.35 * (n / 128) ** 0.25)
        share *= 0.75 if warps == 8 and m * n < 128 * 64 else 1.0
        share *= 0.7 if warps == 4 and m * n >= 128 * 256 else 1.0
        tall = sum(math.ceil(rows / m) for rows in self._rows)
        routed, ungrouped = sum(self._rows), tile["GROUP_SIZE_M"] == 1
        padded = min(routed * m, routed + config.experts * (m - 1))
        seconds = 4e-6
        for columns, depth in (
            (2 * config.intermediate, config.hidden),
            (config.hidden, config.intermediate),
        ):
            wide = math.ceil(columns / n)
            programs = tall * wide
            together = max(1, min(resident, math.ceil(programs / _UNITS)))
            products_s = 2 * m * n * k / (rate / _UNITS) * together * spilled
            products_s /= min(1.0, share * (1 + 0.25 * (together - 1)))
            new = len(self._rows) / tall  # of the weights loaded those that are met first
            far = (n * new + m * 0.1) * k * width
            in_flight = together * (stages - 1) * loaded / _LATENCY_S
            bandwidth = min(1.1 * _MEMORY / _UNITS, in_flight) / together
            loads_s = (far + (loaded - far) / 2.2) / bandwidth
            loads_s *= 1.15 if ungrouped and new < 0.8 else 1.0
            step_s = max(products_s, loads_s) + min(products_s, loads_s) / (4 * (stages - 1))
            step_s += 60e-9 if warps == 8 else 45e-9
            program_s = 1.2e-6 + 0.08e-6 * (stages - 1) + math.ceil(depth / k) * step_s
            program_s += m * n / (_MEMORY / _UNITS) * together + (0.3e-6 if warps == 8 else 0.0)
            waves = programs / (_UNITS * together)
            launch_s = (math.ceil(waves) if waves < 4 else waves + 0.5) * program_s
            empty = math.ceil(padded / m) * wide - programs
            launch_s += empty * 0.25e-6 / (_UNITS * min(resident, 8))
            moved = len(self._rows) * columns * depth * width
            moved += routed * (depth * width + columns * 2)
            seconds += 2e-6 + max(launch_s, 1.05 * moved / _MEMORY)
        kernel = (m, n, k, warps, stages)
        return seconds * _luck(kernel, _KERNEL) * _luck((params, config.tokens), _BATCH)


def _luck(of: object, deviation: float) -> float:
    """A factor that is the same wherever it is drawn."""
    chance = Random(hashlib.sha256(repr(of).encode()).digest())  # noqa: S311
    return math.exp(chance.gauss(0, deviation))


class Search:
    """One search for a layer's tile at one batch size."""

    def __init__(self, make: Callable[[int], MoeConfig], tokens: int, seed: int) -> None:
        self.tokens, self.config, self._seed = tokens, make(tokens), seed
        self.device, self.space = _world(make, tokens)
        self.rounds: list[list[Past]] = []
        self.others: Sequence[Known] = ()
        self._chance = Random(f"{seed} {tokens}")  # noqa: S311

    def open_round(self, strategy: Strategy) -> None:
        """Propose and measure a round; of the one before it the results are not known yet."""
        proposed = propose(
            self.space,
            [
                *(trial for one in self.rounds[:-1] for trial in one),
                *(Past(trial.params) for one in self.rounds[-1:] for trial in one),
            ],
            count=_ROUND,
            seed=self._seed * 100_000 + self.tokens,
            strategy=strategy,
            others=self.others,
        )
        self.rounds.append([Past(one, 1e3 * self._measured(one, _NOISE)) for one in proposed])

    def learn_from(self, searches: Sequence[Search], rounds: int) -> None:
        """Let further rounds learn from the first `rounds` of the nearest of these."""
        near = sorted(searches, key=lambda one: abs(math.log(one.tokens / self.tokens)))
        self.others = [
            Known(
                str(one.tokens),
                [trial for part in one.rounds[:rounds] for trial in part],
                same=False,
                config=one.config,
            )
            for one in near[:_SIBLINGS]
        ]

    def over_best(self) -> float:
        """The true time of the tile that finals choose over that of the best."""
        trials = [trial for one in self.rounds for trial in one]
        ranked = sorted(trials, key=lambda trial: trial.time_ms or math.inf)[:_FINALISTS]
        chosen = min((one.params for one in ranked), key=lambda one: self._measured(one, _FINAL))
        every = (self.space.params_of(point) for point in self.space.points())
        return self.device.seconds(chosen) / min(map(self.device.seconds, filter(None, every)))

    def _measured(self, params: str, noise: float) -> float:
        return self.device.seconds(params) * math.exp(self._chance.gauss(0, noise))


@functools.cache
def _world(make: Callable[[int], MoeConfig], tokens: int) -> tuple[SimulatedGpu, TileSpace]:
    config = make(tokens)
    return SimulatedGpu(config), TileSpace(DESCRIPTIONS["TritonMoe"], config, TARGETS["sm_90"])


def searched(make: Callable[[int], MoeConfig], way: str, seed: int) -> list[Search]:
    """The searches of all batch sizes, done in this way."""
    searches = [Search(make, tokens, seed) for tokens in GRID]
    if way == "after":
        for number, search in enumerate(searches):
            search.learn_from(searches[:number], _ROUNDS)
            for _ in range(_ROUNDS):
                search.open_round("search")
        return searches
    for number in range(_ROUNDS):
        if way == "beside" and number == _INFORMED:
            for search in searches:
                others = [one for one in searches if one is not search]
                search.learn_from(others, _INFORMED - 1)
        for search in searches:
            search.open_round("random" if way == "random" else "search")
    return searches


def main() -> int:
    """Print the figures of both layers; 1 if the budget is missed."""
    parser = command_line(__doc__, seeds=5)
    parser.add_argument("--layer", action="append", choices=list(LAYERS))
    given = parser.parse_args()
    figures: dict[str, float] = {}
    for name in given.layer or LAYERS:
        spaces = [_world(LAYERS[name], tokens)[1] for tokens in GRID]
        figures[f"{name} exhaustive_trials"] = sum(space.size() for space in spaces)
        figures[f"{name} trials"] = sum(min(space.size(), _ROUND * _ROUNDS) for space in spaces)
        for way in ("random", "alone", "beside", "after"):
            began = time.process_time()
            ratios_of_way = [
                search.over_best()
                for seed in range(given.seeds)
                for search in searched(LAYERS[name], way, seed)
            ]
            figures[f"{name} {way}"] = statistics.geometric_mean(ratios_of_way)
            figures[f"{name} {way} worst"] = max(ratios_of_way)
            figures[f"{name} {way} cpu_s"] = (time.process_time() - began) / given.seeds
    limits = {name: 1.01 for name in figures if name.endswith((" beside", " after"))}
    return Outcome("tile_search", figures, limits=limits).print()


if __name__ == "__main__":
    raise SystemExit(main())
