"""Runs a Python module whose wall clock (`time.time`) is off by the seconds that the file FAULTS_CLOCK holds now.

A time namespace moves only the monotonic clocks, and setting the machine's clock would move everybody's. So this is the wall
clock as Python code reads it (Celery, kombu, Tuna); `datetime.now` and C code see the true one.
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
