"""A session's timeline has each attempt as SQL has it, in Chrome's trace event format, on both
databases."""

from __future__ import annotations

import itertools
import json
import random
import time
import tracemalloc
from collections import Counter, defaultdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from jobs_builder import make_jobs, make_searches

from tuna.common.messages import one_line
from tuna.db.engine import reading, writing
from tuna.db.models import ConfigRow, Job, SolverRow, StepResultRow, TrialRow
from tuna.errors import BadInput, NotFound
from tuna.reports.timeline import write_timeline

_AT = datetime(2026, 3, 2, 9, 30, tzinfo=timezone.utc)
_LABEL = 'a "layer" of <script>, \u202eright to left\nand ' + "long" * 50
Events = list[dict[str, Any]]


def attempt(
    job: int, step: str, number: int, *times: float | None, worker: str = "", **facts: Any
) -> dict[str, Any]:
    """A row of `step_result`; `times`: seconds of its start and its end."""
    began, ended = (None if one is None else _AT + timedelta(seconds=one) for one in times)
    row = {"job_id": job, "step": step, "attempt": number, "started_at": began, "ended_at": ended}
    usual = {"ok": "cause" not in facts, "cause": None, "output_tail": "", "busy_s": 1.0}
    return {**usual, **row, "worker": worker, "device": "", **facts}


def write(engine: sa.Engine, session_id: int, path: Path) -> Events:
    """The events of the session's timeline."""
    write_timeline(engine, session_id, path)
    document = json.loads(path.read_bytes())
    assert document["otherData"]["session"] == session_id
    events: Events = document["traceEvents"]
    return events


def check(engine: sa.Engine, events: Events) -> None:
    """Compare every item with SQL, and that what a thread does never overlaps."""
    names = {(one["name"], one["tid"]): one["args"]["name"] for one in events if one["ph"] == "M"}
    busy = defaultdict(list)
    found = Counter[tuple[Any, ...]]()
    for one in (one for one in events if one["ph"] == "X"):
        end, args = one["ts"] + one["dur"], one["args"]
        busy[one["tid"]].append((one["ts"], end))
        if "job" in args:
            process = names["process_name", one["pid"]]
            thread = names["thread_name", one["tid"]].partition(" (")[0]
            of_job = (args["job"], args["attempt"], args["solver"], args["trials"], args["layer"])
            place = (process, thread, args.get("cause"))
            found[(one["name"], one["ts"], end, *place, *of_job)] += 1
    for times in map(sorted, busy.values()):
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(times))
    trials = sa.select(sa.func.count()).where(TrialRow.job_id == Job.id).scalar_subquery()
    query = (
        sa.select(
            *StepResultRow.__table__.c, SolverRow.name, trials.label("trials"), ConfigRow.label
        )
        .join_from(StepResultRow, Job)
        .join(SolverRow, SolverRow.id == Job.solver_id)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .where(StepResultRow.started_at.is_not(None), StepResultRow.ended_at.is_not(None))
    )
    expected = Counter[tuple[Any, ...]]()
    with reading(engine) as connection:
        for row in connection.execute(query):
            machine, _, process = row.worker.rpartition(":")
            thread = row.device or (f"process {process}" if row.worker else "unknown")
            span = (round(one.timestamp() * 1e6) for one in (row.started_at, row.ended_at))
            of_job = (row.job_id, row.attempt, row.name, row.trials, one_line(row.label, 80))
            place = (machine or "lost workers", thread, row.cause)
            expected[(row.step, *span, *place, *of_job)] += 1
    assert found == expected


def test_each_attempt_is_where_and_when_it_was(engine: sa.Engine, tmp_path: Path) -> None:
    session_id = make_jobs(engine, 1, solvers=["Noop0", "Noop1", "Noop2"])
    first, second, third = 1, 2, 3
    card = {"worker": "b:9", "device": "card 0"}
    rows = [
        attempt(first, "build", 1, 0.0, 2.000001, worker="a:7"),
        attempt(first, "measure", 2, 5.0, 6.5, cause="run_error", **card),
        attempt(first, "measure", 3, 9.0, 9.25, **card),
        # two items of one process at the same time, and one of no duration
        attempt(second, "build", 1, 1.0, 4.0, worker="a:7"),
        attempt(second, "measure", 2, 6.5, 6.5, **card),
        attempt(third, "build", 1, 2.0, 8.0, cause="worker_lost"),
        attempt(third, "build", 2, None, None, worker="a:7", cause="infra"),
        attempt(third, "build", 3, 8.0, 8.5, worker="a:7", cause="build_error"),
    ]
    trials = [
        {"job_id": job, "number": number, "output_tail": "", "times_ms": "[]"}
        for job, count in ((first, 3), (second, 1))
        for number in range(count)
    ]
    with writing(engine) as connection:
        connection.execute(sa.update(ConfigRow).values(label=_LABEL))
        connection.execute(sa.insert(StepResultRow), rows)
        connection.execute(sa.insert(TrialRow), trials)
    events = write(engine, session_id, tmp_path / "trace.json")
    check(engine, events)
    items = {
        (one["args"]["job"], one["args"]["attempt"]): one for one in events if one["ph"] == "X"
    }
    arrows = {key: (one.get("flow_in"), one.get("flow_out")) for key, one in items.items()}
    assert arrows == {
        (first, 1): (None, True),
        (first, 2): (True, True),
        (first, 3): (True, None),
        (second, 1): (None, True),
        (second, 2): (True, None),
        (third, 1): (None, True),
        (third, 3): (True, None),
    }
    assert items[first, 2]["args"]["waited_ms"] == 2999.999
    marks = [(one["name"], one["tid"], one["ts"]) for one in events if one["ph"] == "i"]
    assert marks == [
        (name, items[key]["tid"], items[key]["ts"] + items[key]["dur"])
        for name, key in (
            ("retry: worker_lost", (third, 1)),
            ("retry: run_error", (first, 2)),
            ("failed: build_error", (third, 3)),
        )
    ]
    found = write_timeline(engine, session_id, tmp_path / "trace.json")
    assert (found.items, found.machines, found.untimed) == (7, 2, 1)


def test_rounds_of_searches_have_rows_of_their_own(engine: sa.Engine, tmp_path: Path) -> None:
    session_id = make_jobs(engine, 1, solvers=["Noop0", "Noop1"])
    rows = []
    with writing(engine) as connection:
        make_searches(connection)
        names = [column.name for column in Job.__table__.c if column.name not in ("id", "round")]
        columns = [Job.__table__.c[name] for name in names]
        for number in (1, 2):
            more = sa.select(sa.literal(number), *columns).where(Job.round == 0)
            connection.execute(sa.insert(Job).from_select(["round", *names], more))
        jobs = connection.execute(sa.select(Job.id, Job.search_id, Job.round)).all()
        for job, search, number in jobs:
            start = 10.0 * (number or 0) + (
                search or 0
            )  # round n + 1 is proposed while n is measured
            rows += [
                attempt(job, "search", 1, start, start + 1, worker="a:7"),
                attempt(job, "measure", 2, start + 9, start + 12, worker="a:8", device="card"),
            ]
        connection.execute(sa.insert(StepResultRow), rows)
    events = write(engine, session_id, tmp_path / "trace.json")
    check(engine, events)
    (searches,) = (one["pid"] for one in events if one["args"].get("name") == "searches")
    spans = [one for one in events if one["ph"] == "X" and one["pid"] == searches]
    assert [(one["name"], one["args"]["search"], one["dur"] / 1e6) for one in spans] == [
        (f"round {number}", search, 12.0) for search in (1, 2) for number in (0, 1, 2)
    ]
    assert len({one["tid"] for one in spans}) == 4, "two of each search overlap"
    items = [one["args"] for one in events if one["ph"] == "X" and one["pid"] != searches]
    assert Counter(one["round"] for one in items) == {0: 4, 1: 4, 2: 4}


def test_a_session_of_which_nothing_was_done_has_none(
    sqlite_engine: sa.Engine, tmp_path: Path
) -> None:
    session_id = make_jobs(sqlite_engine, 1)
    with pytest.raises(BadInput, match="Nothing of session 1 has been done yet"):
        write_timeline(sqlite_engine, session_id, tmp_path / "trace.json")
    with pytest.raises(NotFound):
        write_timeline(sqlite_engine, 77, tmp_path / "trace.json")
    assert not list(tmp_path.glob("*trace*"))


@pytest.mark.drill(only=True)
def test_a_timeline_with_100_000_items_is_small_and_takes_no_memory(
    engine: sa.Engine, tmp_path: Path
) -> None:
    session_id = make_jobs(engine, 5000)
    rng, free = random.Random(1), defaultdict[str, float](float)
    rows = []
    for job in range(1, 50_001):
        ready = 0.0
        for number, step, names in ((1, "build", "abcdefgh"), (2, "measure", "ijkl")):
            name = rng.choice(names)
            start = max(free[name], ready)
            ready = free[name] = start + rng.random()
            facts = {"device": f"card {name}"} if number == 2 else {}
            rows.append(attempt(job, step, number, start, ready, worker=f"host {name}:1", **facts))
    with writing(engine) as connection:
        label = "conv 128x28x28 -> 512, 3x3, stride 2, pad 1, FP16, F"
        connection.execute(sa.update(ConfigRow).values(label=label))
        for place in range(0, len(rows), 5000):
            connection.execute(sa.insert(StepResultRow), rows[place : place + 5000])
    del rows
    path, began_s = tmp_path / "trace.json", time.process_time()
    found = write_timeline(engine, session_id, path)
    took_s = time.process_time() - began_s
    tracemalloc.start()
    try:
        write_timeline(engine, session_id, path)
        peak_mib = tracemalloc.get_traced_memory()[1] / (1 << 20)
    finally:
        tracemalloc.stop()
    print(f"{took_s:.1f} s of CPU time, {found.size_bytes / 1e6:.1f} MB, {peak_mib:.1f} MiB")
    assert found.items == 100_000
    assert took_s <= 10.0
    assert found.size_bytes <= 30e6
    assert peak_mib <= 8
    check(engine, json.loads(path.read_bytes())["traceEvents"])
