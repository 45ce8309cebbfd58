"""Reported times are stored once each, and are no results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa
from builders import START

from tuna.errors import BadInput
from tuna.results.core_tables import reported
from tuna.results.reported import Recorded, ReportedTime, find, of_release, record

ONE = ReportedTime("triton", "add_kernel n=1024", "BLOCK 128", 0.5, "ab12", "space a", "gfx942")


def test_a_later_report_replaces_the_time_of_the_same(engine: sa.Engine) -> None:
    other = replace(ONE, versions={"triton": "3.6.0"})
    with engine.begin() as connection:
        assert record(connection, [ONE, other, replace(ONE, implementation="BLOCK 64")]) == (
            Recorded(3, 0)
        )
        failed = replace(ONE, time_ms=None, who="cd34")
        assert record(connection, [ONE, failed]) == Recorded(0, 1)
        query = sa.select(reported.c.time_ms, reported.c.who, reported.c.versions)
        rows = connection.execute(query.order_by(reported.c.id)).all()
        found = find(connection, 10, layer="add_kernel", arch="gfx942", since=START)
        assert [row.time_ms for row in found] == [0.5, 0.5, None], "failures come last"
        assert not find(connection, 10, layer="add%")
        best, others = of_release(connection, "triton", "gfx942", "3.6")
    assert rows[0] == (None, "cd34", {})
    assert rows[1] == (0.5, "ab12", {"triton": "3.6.0"})
    assert [row.versions for row in best] == [{"triton": "3.6.0"}]
    assert others == {"of another device or release than triton 3.6.0": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        replace(ONE, source="helios"),
        *(replace(ONE, time_ms=time) for time in (0.0, -1.0, float("nan"), float("inf"), 1e12)),
        replace(ONE, device="g" * 129),
    ],
)
def test_what_cannot_be_a_report_is_refused(sqlite_engine: sa.Engine, wrong: ReportedTime) -> None:
    with sqlite_engine.begin() as connection, pytest.raises(BadInput):
        record(connection, [ONE, wrong])
    with sqlite_engine.connect() as connection:
        assert not connection.execute(sa.select(reported.c.id)).all()
