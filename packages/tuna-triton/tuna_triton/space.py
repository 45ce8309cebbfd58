"""The candidates of a kernel as a space of `tuna.libraries.search`, with features that mean the
same at every batch size. Needs no Triton."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from random import Random

from tuna.configs import Config
from tuna.errors import BadInput
from tuna.libraries.search.cost_model import Features
from tuna.libraries.search.proposal import Point, Space
from tuna_triton.artifact import ELEMENT_BYTES
from tuna_triton.descriptions import Description, TunedKernel
from tuna_triton.tiles import KernelCall, Plan, Target, Tile, tile_of, tile_text

#: Mutations of a point that are tried until one is a point of the space.
_TRIES = 20


class TileSpace(Space):
    """The tiles of a config that differ and can run; a point is a tile's values. A search begins
    with the consumer's default."""

    def __init__(self, description: TunedKernel, config: Config, target: Target) -> None:
        self._description, self._config, self._target = description, config, target
        space = description.space(config, target)
        self._tiles = {tuple(tile.values()): tile for tile in map(self._in_order, space.tiles)}
        self._values = [sorted(set(values)) for values in zip(*self._tiles, strict=True)]
        self.begins_with = [tuple(self._in_order(space.default).values())] if space.default else []

    def points(self) -> Iterator[Point]:
        """All points, in the order of the consumer's own space."""
        return iter(self._tiles)

    def size(self) -> int:
        """The number of points."""
        return len(self._tiles)

    def point_of(self, params: str) -> Point | None:
        """Return the tile's values; None for a tile that is not in the space."""
        try:
            point = tuple(self._tile_of(params).values())
        except BadInput:
            return None
        return point if self.params_of(point) == params else None

    def params_of(self, point: Point) -> str | None:
        """Return the tile as JSON."""
        return tile_text(self._tiles[point]) if point in self._tiles else None

    def features(self, point: Point) -> Features:
        """Return those of the point's tile."""
        return self._features(self._config, self._tiles[point])

    def features_of(self, params: str, config: Config | None = None) -> Features | None:
        """Return those of a tile, which need not be in the space; None for other params."""
        try:
            return self._features(config or self._config, self._tile_of(params))
        except BadInput:
            return None

    def random(self, chance: Random) -> Point:
        """Return any point."""
        return chance.choice(list(self._tiles))

    def mutated(self, point: Point, chance: Random) -> Point:
        """Return a point with another value of one axis; any point where none is found."""
        for _ in range(_TRIES):
            axis = chance.randrange(len(point))
            found = (*point[:axis], chance.choice(self._values[axis]), *point[axis + 1 :])
            if found != point and found in self._tiles:
                return found
        return self.random(chance)

    def crossed(self, one: Point, other: Point, chance: Random) -> Point:
        """Return a point with the values of either; `one` where that is not a point."""
        found = tuple(map(chance.choice, zip(one, other, strict=True)))
        return found if found in self._tiles else one

    def _tile_of(self, params: str) -> Tile:
        return tile_of(params, self._description.tile_names)

    def _in_order(self, tile: Tile) -> Tile:
        """Return the tile with its axes in the order of its text."""
        return self._tile_of(tile_text(tile))

    def _features(self, config: Config, tile: Tile) -> Features:
        """A tile's values, and what they make of each launch."""
        plan = self._description.plan(config, tile, self._target)
        shared = self._description.least_shared_bytes(plan, tile, self._target)
        found = {name: float(value) for name, value in tile.items()}
        if shared:
            found |= {"shared bytes": shared, "resident tiles": self._target.shared_bytes // shared}
        for number, call in enumerate(plan.calls):
            launch: dict[str, float] = {"programs": math.prod(call.grid)}
            if isinstance(self._description, Description):
                launch |= _product(plan, call, tile)
            found |= {f"{name} of launch {number}": value for name, value in launch.items()}
        return found


def _product(plan: Plan, call: KernelCall, tile: Tile) -> Mapping[str, float]:
    """Return the features of a launch that is a matrix product, or one for each expert.

    How many rows an expert has is not known: those of Poisson's distribution are assumed, for
    experts without any are not met.
    """
    values, buffers = call.arguments, {buffer.name: buffer for buffer in plan.buffers}
    a, b = (buffers[str(values[name])] for name in ("a_ptr", "b_ptr"))
    rows = values.get("M") or values["num_valid_tokens"]
    columns, depth = values["N"], values["K"]
    assert isinstance(rows, int)
    assert isinstance(columns, int)
    assert isinstance(depth, int)
    block_m, block_n, block_k = (tile[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    wide = math.ceil(columns / block_n)
    if len(b.shape) == 3:
        met = b.shape[0] * -math.expm1(-rows / b.shape[0])
        tall = met * max(1.0, rows / met / block_m + 0.5)
    else:
        met, tall = 1.0, math.ceil(rows / block_m)
    loaded = depth * (block_m * ELEMENT_BYTES[a.element] + block_n * ELEMENT_BYTES[b.element])
    flops = 2 * depth * block_m * block_n
    return {
        "rows": rows,
        "tiles": tall * wide,
        "fill": rows / met / block_m,
        "padded rows": tall * block_m / rows,
        "padded columns": wide * block_n / columns,
        "steps": depth / block_k,
        "bytes of a program": loaded,
        "flops of a program": flops,
        "flops of a byte": flops / loaded,
        "bytes": loaded * tall * wide,
        "sums of a warp": block_m * block_n / tile["num_warps"],
    }
