"""Similarity of configs, to try a kernel's params where nothing was measured; each kind says what
makes its configs similar."""

from __future__ import annotations

import math

from tuna.configs import Config, kind_of
from tuna.configs.kind import Similar


def family(config: Config) -> tuple[object, ...] | None:
    """Return a key that is equal for similar configs; None for one that has no similar ones."""
    similar = _similar(config)
    return None if similar is None else (config.kind, *similar.family)


def size_distance(config: Config, other: Config) -> float | None:
    """Return the summed logarithms of the ratios of all sizes; None unless similar and distinct."""
    pair = _pair(config, other)
    if pair is None:
        return None
    mine, theirs = pair
    return sum(abs(math.log(one / two)) for one, two in zip(mine.sizes, theirs.sizes, strict=True))


def log_sizes(config: Config) -> tuple[float, ...]:
    """Return the logarithms of the sizes of a config that has a family: as many for each of it."""
    similar = _similar(config)
    return () if similar is None else tuple(map(math.log, similar.sizes))


def differ_in_batch(config: Config, other: Config) -> bool:
    """True if nothing but the batch size differs: images, tokens or, of a product, rows of A."""
    pair = _pair(config, other)
    if pair is None:
        return False
    mine, theirs = pair
    return mine.batch_first and mine.sizes[1:] == theirs.sizes[1:]


def _similar(config: Config) -> Similar | None:
    return kind_of(config).similar(config)


def _pair(config: Config, other: Config) -> tuple[Similar, Similar] | None:
    """Return the likeness of two configs of a family; None of others, and of the same config."""
    if config == other or config.kind != other.kind:
        return None
    mine, theirs = _similar(config), _similar(other)
    if mine is None or theirs is None or mine.family != theirs.family:
        return None
    return mine, theirs
