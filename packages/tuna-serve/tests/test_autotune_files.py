"""Times in files of Triton's autotuner become reports."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa

from tuna.results.core_tables import reported
from tuna_serve import autotune_files

CONFIG = {"kwargs": {"BLOCK_M": 64, "EVEN": True}, "num_warps": 8, "maxnreg": None}
REPORTER = '{"device": "gfx942", "versions": {"triton": "3.6.0"}}'


def _reported(engine: sa.Engine, data: Any, reporter: str = REPORTER) -> list[Any]:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    with engine.begin() as connection:
        autotune_files.report(connection, "gpu", "mm.autotune.json", text, "a1b2", reporter)
        columns = [reported.c[name] for name in ("subject", "implementation", "time_ms", "device")]
        query = sa.select(*columns, reported.c.versions, reported.c.who, reported.c.origin)
        return [tuple(row) for row in connection.execute(query.order_by(reported.c.id))]


def test_each_config_is_reported_with_its_median(sqlite_engine: sa.Engine) -> None:
    timings = [[CONFIG, [0.5, 0.4, 0.6]], [{"kwargs": {}, "num_warps": 4}, [float("inf")] * 3]]
    found = _reported(sqlite_engine, {"key": [64, "fp16"], "configs_timings": timings})
    facts = ("gfx942", {"triton": "3.6.0"}, "a1b2", "space gpu")
    subject = 'mm [64, "fp16"]'
    assert found == [
        (subject, "BLOCK_M=64 EVEN=true num_warps=8", 0.5, *facts),
        (subject, "num_warps=4", None, *facts),
    ]


@pytest.mark.parametrize(
    ("data", "reporter"),
    [
        (b"", REPORTER),
        (b"\xff{", REPORTER),
        ([], REPORTER),
        ({"key": [1]}, REPORTER),
        ({"key": [1], "configs_timings": [[CONFIG, float("nan")]]}, REPORTER),
        ({"key": [1], "configs_timings": [[CONFIG, []]]}, REPORTER),
        ({"key": [1], "configs_timings": [[CONFIG, -1.0]]}, REPORTER),
        ({"key": ["x" * autotune_files.MAX_BYTES], "configs_timings": []}, REPORTER),
        ({"key": [1], "configs_timings": [[{}, 1.0]] * 10_001}, REPORTER),
        ({"key": [1], "configs_timings": [[CONFIG, 1.0]]}, "gfx942"),
        ({"key": [1], "configs_timings": [[CONFIG, 1.0]]}, json.dumps({"device": "g" * 129})),
    ],
)
def test_a_broken_file_makes_no_report(sqlite_engine: sa.Engine, data: Any, reporter: str) -> None:
    assert _reported(sqlite_engine, data, reporter) == []
