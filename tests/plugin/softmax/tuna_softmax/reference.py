"""The right answer, by NumPy in double precision."""

from __future__ import annotations

import numpy as np

from tuna.libraries.reference import Problem
from tuna_softmax.kind import Softmax


def problem(config: Softmax, seed: int) -> Problem:
    """Random rows and their softmax."""
    x = np.random.default_rng(seed).uniform(-1, 1, (config.rows, config.cols)).astype(np.float32)
    powers = np.exp(x.astype(np.float64))
    return Problem((x,), powers / powers.sum(axis=1, keepdims=True), "float32", 1e-5)
