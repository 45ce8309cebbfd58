"""Large pages for weights: the measured model and the example ask for them in the same way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: Prints the KiB in large pages before and after, of a program with 8 MiB of weights; NumPy asks
#: for large pages by itself.
PROGRAM = """
import runpy, sys
def large():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
weights = b"w" * (8 << 20)
before, ask = large(), runpy.run_path(sys.argv[1])["use_large_pages"]
ask()
assert weights.count(b"w") == 8 << 20
print(before, large())
"""


@pytest.mark.parametrize("file", ["tuna/libraries/tvm/large_pages.py", "examples/run_model.py"])
@pytest.mark.skipif(
    not SETTING.is_file() or "[madvise]" not in SETTING.read_text(),
    reason="Linux gives large pages here always, or never",
)
def test_weights_lie_in_large_pages_after_the_request(file: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, ROOT / file], capture_output=True, text=True, check=True
    )
    before, after = map(int, ran.stdout.split())
    assert after >= before + 6 * 1024
