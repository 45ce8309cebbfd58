"""Where MITuna is wrong, and what its own tests expect where it is right: which test of ours
asserts each, in `assets/mituna.tsv`.

The rows are those of the study of MITuna (its section "Expected values worth re-stating as tests"):
the test to read first, and MITuna's mistake said the right way round, or the file of its tests with
the value. A test that is renamed or goes must be put right there.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_test_that_is_named_is_there() -> None:
    lines = (ROOT / "tests" / "assets" / "mituna.tsv").read_text().splitlines()
    tests = [line.partition("\t")[0].partition("::") for line in lines]
    assert len(tests) > 50
    gone = [
        f"{path}::{name}"
        for path, _, name in tests
        if not (ROOT / path).is_file() or f"\ndef {name}(" not in (ROOT / path).read_text()
    ]
    assert gone == []
