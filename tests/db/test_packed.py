"""Rows that go to and from the server as JSON are those that the driver would have written and
read, on both databases."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs
from queries import read_column, read_value
from sqlalchemy.exc import DataError, IntegrityError

from tuna.db.bulk import insert, packed, unpacked
from tuna.db.engine import writing
from tuna.db.models import Job, StepResultRow

HARD_TEXT = "it's \"broken\"; DROP TABLE job; -- \\' %s %(x)s :y \\u0041 \n\t\x01 é 🐟"
AT = datetime(2026, 3, 2, 9, 30, 0, 123456, timezone.utc)


def result(job_id: int, **values: object) -> dict[str, object]:
    row: dict[str, object] = {
        "job_id": job_id,
        "step": "build",
        "attempt": 1,
        "ok": True,
        "cause": None,
        "output_tail": "",
        "worker": "w",
        "device": "",
        "started_at": None,
        "ended_at": AT,
        "busy_s": 0.0,
        "drift": None,
    }
    return row | values


def test_inserted_rows_are_read_back_as_they_were(engine: sa.Engine) -> None:
    make_jobs(engine, 1)
    first, second, third = read_column(engine, sa.select(Job.id).order_by(Job.id).limit(3))
    rows = [
        result(first, output_tail=HARD_TEXT, worker="🐟", drift=0.1 + 0.2, busy_s=1e-300),
        result(second, ok=False, cause="run_error", output_tail="x" * 200_000, busy_s=1 / 3),
        result(third, started_at=AT.astimezone(timezone(timedelta(hours=2))), drift=-5e-324),
    ]
    with writing(engine) as connection:
        insert(connection, StepResultRow, rows)
        insert(connection, StepResultRow, [])
        columns = [getattr(StepResultRow, name) for name in rows[0]]
        found = connection.execute(sa.select(*columns).order_by(StepResultRow.job_id)).all()
    assert [dict(row._mapping) for row in found] == [*rows[:2], rows[2] | {"started_at": AT}]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"step": None}, IntegrityError),
        ({"attempt": 2**40}, DataError),
        ({"worker": "w" * 256}, DataError),
        ({"job_id": 10**9}, IntegrityError),
        ({"busy_s": float("nan")}, ValueError),
        ({"ended_at": AT.replace(tzinfo=None)}, ValueError),
    ],
)
def test_a_value_that_a_column_cannot_hold_is_refused_and_not_changed(
    engine: sa.Engine, values: dict[str, object], error: type[Exception]
) -> None:
    if error is DataError and engine.dialect.name == "sqlite":
        pytest.skip("SQLite does not limit its columns")
    make_jobs(engine, 1)
    job_id = read_value(engine, sa.select(sa.func.min(Job.id)))
    with pytest.raises(error), writing(engine) as connection:
        insert(connection, StepResultRow, [result(job_id), result(job_id + 1) | values])


def test_packed_columns_are_unpacked_in_the_order_of_the_rows(engine: sa.Engine) -> None:
    make_jobs(engine, 1)
    with writing(engine) as connection:
        ids = list(connection.execute(sa.select(Job.id).order_by(Job.id).limit(2)).scalars())
        changed = {"avoid": HARD_TEXT, "options": {"text": HARD_TEXT, "n": 2**53 + 1}, "attempt": 7}
        connection.execute(sa.update(Job).where(Job.id == ids[0]).values(changed))
        columns = packed([Job.id, Job.attempt, Job.isolate, Job.avoid, Job.options])
        query = (
            sa.select(columns)
            .where(Job.id.in_(sa.bindparam("ids", expanding=True)))
            .order_by(Job.id.desc())
        )
        second, first = unpacked(connection, query, {"ids": ids})
        assert unpacked(connection, query, {"ids": [-1]}) == []
    assert first[:4] == [ids[0], 7, 0, HARD_TEXT]
    assert json.loads(first[4]) == changed["options"]
    assert second == [ids[1], 0, 0, None, "{}"]
