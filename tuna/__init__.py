"""Tuna finds the fastest implementation of a deep-learning layer for a device and ships the answer
as databases. Its functions for Python are in `tuna.api`."""

from tuna.common.version import DISTRIBUTION, __version__

__all__ = ["DISTRIBUTION", "__version__"]
