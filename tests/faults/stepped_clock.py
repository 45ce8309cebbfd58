"""Runs a Python module with a shifted wall clock: `time.time` adds the seconds in the file FAULTS_CLOCK.

A time namespace shifts only the monotonic clocks, and setting the system clock would affect other processes. So only Python's
`time.time` is shifted (used by Celery, kombu, Tuna); `datetime.now` and C code see the true time.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from pathlib import Path

CLOCK = "FAULTS_CLOCK"
_true_time = time.time


def _stepped() -> float:
    with contextlib.suppress(OSError, ValueError):
        return _true_time() + float(Path(os.environ[CLOCK]).read_text())
    return _true_time()


if __name__ == "__main__":
    time.time = _stepped
    del sys.argv[0], sys.path[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
