"""Tuna finds the fastest implementation of a deep-learning layer for a device and ships the answer
as databases.

import tuna

t = tuna.open()
t.session("tvm").layers("layers.txt").candidates(16).run().best()
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tuna.common.version import DISTRIBUTION, __version__

if TYPE_CHECKING:
    from tuna.api.client import Tuna

__all__ = ["DISTRIBUTION", "__version__", "open"]


def open(home: str | os.PathLike[str] | None = None) -> Tuna:
    """Tuna with the settings of this process, as the commands have them (`TUNA_*`); `home` replaces
    `TUNA_HOME`.

    Without settings everything is embedded: a SQLite file, and a Redis server that starts and stops
    by itself. Raises `tuna.errors.TunaError` where a command would end with a sentence, as do all
    methods.
    """
    from tuna.api.client import connect

    return connect(home)
