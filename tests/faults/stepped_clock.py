"""Shifts the wall clock of a Python process: `time.time` adds the seconds in the file FAULTS_CLOCK.

A time namespace shifts only the monotonic clocks, and setting the system clock would affect other
processes. So only Python's `time.time` is shifted (used by Celery, kombu, Tuna); `datetime.now` and
C code see the true time.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

CLOCK = "FAULTS_CLOCK"
#: A `sitecustomize.py` on PYTHONPATH: what a worker starts has its clock, too.
SITE = "import stepped_clock\nstepped_clock.install()\n"
_true_time = time.time


def install() -> None:
    """Shift the clock of this process, if it has a shifted one, and of those that are forked from
    it."""
    if CLOCK in os.environ:
        time.time = _stepped


def _stepped() -> float:
    with contextlib.suppress(OSError, ValueError):
        return _true_time() + float(Path(os.environ[CLOCK]).read_text())
    return _true_time()
