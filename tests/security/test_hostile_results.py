"""Validation of worker reports: each invalid result is refused with a cause, and other results are
kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import claim, make_jobs, states
from queries import read_column, read_rows, read_value

from tuna.artifacts.store import Artifacts
from tuna.coordinator import report_checks
from tuna.coordinator.drain import Drain
from tuna.db.engine import reading, writing
from tuna.db.models import DeadLetter, FindDb, Job, StepResultRow, TrialRow
from tuna.libraries.items import WIRE_VERSION
from tuna.libraries.registry import get_library
from tuna.queue import results
from tuna.queue.claim import ClaimedChunk
from tuna.queue.results import ResultStream
from tuna.settings import get_settings
from tuna.workers.worker_process import WorkerProcess

pytestmark = pytest.mark.both_databases_in_drills

LIBRARY = get_library("noop")
DEEP = 100_000
NAN, INF = float("nan"), float("inf")
#: Fields that make a result invalid, and a part of the recorded reason.
IMPOSSIBLE = {
    "a moment that is no number": ({"started_at": NAN}, "finite"),
    "an endless duration": ({"busy_s": INF}, "finite"),
    "a moment that no calendar has": ({"ended_at": 1e300}, "less than"),
    "a moment before all others": ({"started_at": -1e18}, "greater than"),
    "a huge workspace": ({"workspace_bytes": 10**400}, "less than"),
    "a negative workspace": ({"workspace_bytes": -1}, "greater than"),
    "a candidate of a huge number": ({"trials": [{"index": 10**30}]}, "less than"),
    "a wrong type": ({"ok": [1]}, "boolean"),
    "an unknown field": ({"surprise": 1}, "not permitted"),
    "an unknown cause": ({"ok": False, "cause": "witchcraft"}, "build_error"),
    "another version": ({"version": WIRE_VERSION + 1}, "less than"),
    "an endless name": ({"algorithm": "x" * 65}, "at most 64"),
    "endless params": ({"trials": [{"index": 0, "params": "x" * (1 << 21)}]}, "at most"),
    "a command for users to paste": ({"reproduce": "touch /tmp/X"}, "not permitted"),
    "a digest that is a path": ({"workload": "../" * 40}, "at most 64"),
    "more trials than any job asks for": (
        {"trials": [{"index": n} for n in range(10_001)]},
        "at most 10000",
    ),
    "more repeats than any clock is read for": (
        {"trials": [{"index": 0, "times_ms": [1.0] * 5000}]},
        "at most 4096",
    ),
    "more code objects than any solver has": (
        {"kernels": [{"artifact": "a"}] * 10_001},
        "at most 10000",
    ),
    "more trials than its job asked for": (
        {"trials": [{"index": n} for n in range(65)]},
        "asked for 64 at most",
    ),
    "another layer's key": (
        {"problem_key": "64-56-56-3x3-64-56-56-1-1x1-1x1-1x1-0-NCHW-FP32-F"},
        "not permitted",
    ),
}
#: Impossible times: the trial fails, whatever its other fields are.
TIMES = [NAN, INF, -INF, -1.0, 0.0, 5e-324, 9e-7, 8.65e7, 1e308]


@pytest.fixture()
def stream(redis_client: redis.Redis) -> ResultStream:
    return ResultStream(redis_client, "results", "me")


@pytest.fixture()
def drain(engine: sa.Engine, stream: ResultStream, tmp_path: Path) -> Drain:
    return Drain(engine, stream, Artifacts((tmp_path / "a").as_uri(), tmp_path / "c"), 3)


def _claim(engine: sa.Engine, session_id: int, step: str = "measure") -> ClaimedChunk:
    return claim(engine, session_id, step, 1000)[0]


def _good(item: Any, **facts: Any) -> dict[str, Any]:
    trial = {"index": 0, "params": "p", "times_ms": [1.5], "time_ms": 1.5}
    return {
        "job_id": item.job_id,
        "attempt": item.attempt,
        "step": item.step,
        "ok": True,
        "trials": [trial],
        **facts,
    }


def _report(chunk: ClaimedChunk, found: list[Any], **facts: Any) -> str:
    return json.dumps(
        {"kind": "finished", "chunk": chunk.id, "worker": "w", "results": found, **facts}
    )


def _failures(engine: sa.Engine) -> list[tuple[int, str, str]]:
    columns = (StepResultRow.job_id, StepResultRow.cause, StepResultRow.output_tail)
    return [
        tuple(row)
        for row in read_rows(engine, sa.select(*columns).where(StepResultRow.ok.is_(False)))
    ]


def test_an_impossible_result_fails_with_its_cause_and_its_neighbours_are_kept(
    engine: sa.Engine, drain: Drain, stream: ResultStream, redis_client: redis.Redis
) -> None:
    chunk = _claim(engine, make_jobs(engine, 3, steps="measure"))
    assert len(chunk.items) >= len(IMPOSSIBLE) + 4
    bad = {
        item.job_id: facts for item, facts in zip(chunk.items, IMPOSSIBLE.values(), strict=False)
    }
    found = [
        _good(item, **bad[item.job_id][0]) if item.job_id in bad else _good(item)
        for item in chunk.items
    ]
    redis_client.xadd("results", {"r": _report(chunk, found)})
    drain.once()
    told = {job_id: (cause, text) for job_id, cause, text in _failures(engine)}
    assert told.keys() == bad.keys()
    for job_id, (_, word) in bad.items():
        assert told[job_id][0] == "infra"
        assert word in told[job_id][1]
        assert len(told[job_id][1]) < 1200
    assert states(engine)["evaluated"] == len(chunk.items) - len(bad)
    assert stream.backlog() == 0


def test_a_time_that_cannot_be_fails_its_trial_alone(
    engine: sa.Engine, drain: Drain, redis_client: redis.Redis
) -> None:
    chunk = _claim(engine, make_jobs(engine, 1, steps="measure"))
    found = [_good(item) for item in chunk.items]
    for result, time_ms in zip(found, TIMES, strict=False):
        result["trials"] = [
            {"index": 0, "params": "a", "times_ms": [time_ms], "time_ms": time_ms},
            {"index": 1, "params": "b", "times_ms": [1.0], "time_ms": 1.0, "max_error": NAN},
        ]
    text = _report(chunk, found).replace("-1.0", "-1e400", 1)
    redis_client.xadd("results", {"r": text})
    drain.once()
    assert states(engine) == {"evaluated": len(chunk.items)}
    with reading(engine) as connection:
        causes = connection.execute(
            sa.select(TrialRow.number, TrialRow.cause, TrialRow.time_ms).where(
                TrialRow.cause.is_not(None)
            )
        )
        assert [tuple(row) for row in causes] == [(0, "run_error", None)] * len(TIMES)
        assert set(connection.execute(sa.select(FindDb.params, FindDb.time_ms)).all()) == {
            ("b", 1.0),
            ("p", 1.5),
        }


def test_many_small_trials_cost_little(
    engine: sa.Engine, drain: Drain, redis_client: redis.Redis
) -> None:
    """Each of these reports, 9.3 MB, took 11 s to write, a third of a gigabyte, and 600,000
    rows."""
    chunk = _claim(engine, make_jobs(engine, 1, steps="measure"))
    trials = json.dumps([{"index": number} for number in range(600_000)], separators=(",", ":"))
    text = _report(chunk, [_good(chunk.items[0], trials="X")], kind="results").replace(
        '"X"', trials
    )
    assert 9e6 < len(text) < 16e6
    for _ in range(2):
        redis_client.xadd("results", {"r": text})
    began_s = time.process_time()
    drain.once()
    took_s = time.process_time() - began_s
    redis_client.xadd("results", {"r": _report(chunk, [_good(item) for item in chunk.items[1:]])})
    drain.once()
    assert states(engine)["evaluated"] == len(chunk.items) - 1
    assert took_s < 5, "seconds of CPU time; to write them took 22"
    assert (
        read_value(engine, sa.select(sa.func.count()).select_from(TrialRow)) == len(chunk.items) - 1
    )


def test_what_is_no_report_is_dropped_and_the_reports_around_it_count(
    engine: sa.Engine, drain: Drain, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "MAX_REPORT_BYTES", 1 << 20)
    chunk = _claim(engine, make_jobs(engine, 1, steps="measure"))
    first, *rest = [_good(item) for item in chunk.items]
    hostile: list[Any] = [
        b"", b"null", b"[" * DEEP, b'{"a":' * DEEP, b"\xff\xfe", b'"\\ud800"', b"\x80\x04N.",
        b"{" + b"0" * 5000,
        b'"' + b"x" * (2 << 20) + b'"',
        _report(chunk, rest, version=WIRE_VERSION + 1),
        _report(chunk, rest, kind="conquered"),
        _report(chunk, rest, worker="w" * 256),
        _report(chunk, rest, surprise=True),
        _report(chunk, [rest[0] | {"job_id": 10**30}, {}, None, 5, "x", [],
         rest[0] | {"job_id": NAN}]),
    ]  # fmt: skip
    redis_client.xadd("results", {"r": _report(chunk, [first], kind="results")})
    for text in hostile:
        redis_client.xadd("results", {"r": text})
    redis_client.xadd("results", {"something": "else"})
    redis_client.xadd("results", {"r": _report(chunk, rest)})
    drain.once()
    assert states(engine) == {"evaluated": len(chunk.items)}
    # the last one can be read, though none of its results
    assert drain.counts.unreadable == len(hostile) + 1
    bodies = read_column(engine, sa.select(DeadLetter.body).order_by(DeadLetter.id))
    sent = [text.encode() if isinstance(text, str) else text for text in hostile]
    assert bodies[: len(hostile)] == [text[: report_checks.KEPT_BYTES] for text in sent]
    assert bodies[-1] == b"{b'something': b'else'}"
    assert drain.counts.causes == {}


def test_a_result_for_a_job_of_another_chunk_or_session_is_refused(
    engine: sa.Engine, drain: Drain, redis_client: redis.Redis
) -> None:
    mine = _claim(engine, make_jobs(engine, 1, steps="measure"))
    with writing(engine) as connection:
        from tuna.db import jobs, sessions, solvers

        other, _ = sessions.create(connection, LIBRARY.environment(), "another")
    solvers.update_applicability(engine, LIBRARY, other, "t")
    with writing(engine) as connection:
        jobs.load(connection, jobs.JobRequest(other, "noop", ["measure"], "test", "new", tag="t"))
    theirs = _claim(engine, other)
    assert {item.attempt for item in mine.items} == {item.attempt for item in theirs.items}
    redis_client.xadd(
        "results", {"r": _report(mine, [_good(item) for item in [*mine.items, *theirs.items]])}
    )
    drain.once()
    assert drain.counts.refused == len(theirs.items)
    done = set(read_column(engine, sa.select(Job.session_id).where(Job.state == "evaluated")))
    assert done == {mine.items[0].session_id}


def test_of_a_key_that_stands_twice_the_last_counts(
    engine: sa.Engine, drain: Drain, redis_client: redis.Redis
) -> None:
    chunk = _claim(engine, make_jobs(engine, 1, steps="measure"))
    text = _report(chunk, [_good(item) for item in chunk.items]).replace(
        '"ok": true', '"ok": false, "ok": true'
    )
    redis_client.xadd("results", {"r": text})
    drain.once()
    assert states(engine) == {"evaluated": len(chunk.items)}


@pytest.mark.parametrize(
    "message",
    [
        "",
        "null",
        "[" * DEEP,
        '{"id":' * DEEP,
        "\ud800",
        "\x00",
        "gASVCgAAAAAAAAB9lC4=",
        5,
        None,
        [],
        {"id": 1},
        "9" * 5000,
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_message_that_is_no_chunk_is_dropped_with_a_word(message: Any) -> None:
    assert WorkerProcess(get_settings()).run_chunk(message).startswith("unreadable: ")


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"version": WIRE_VERSION + 1}, f"version {WIRE_VERSION + 1}"),
        ({"library": "../../evil"}, "Unknown library"),
        ({"step": "os.system"}, "no step"),
        ({"items": [{"job_id": 1}]}, "required"),
        ({"surprise": 1}, "not permitted"),
    ],
)
def test_a_chunk_that_this_worker_cannot_understand_is_dropped_with_a_word(
    facts: dict[str, Any], word: str
) -> None:
    chunk = {
        "id": "c",
        "namespace": "n",
        "library": "noop",
        "step": "build",
        "environment": "",
        "toolchain": "t",
        "items": [],
    }
    assert word in WorkerProcess(get_settings()).run_chunk(json.dumps(chunk | facts))


def test_the_version_travels_with_every_message() -> None:
    from tuna.queue.messages import Report, ReportKind

    text = Report(kind=ReportKind.STARTED, chunk="c", worker="w").model_dump_json(
        exclude_defaults=True
    )
    assert json.loads(text)["version"] == WIRE_VERSION


def test_half_a_character_in_an_output_does_not_lose_the_result() -> None:
    from tuna.libraries.items import StepResult as Result

    result = Result(job_id=1, attempt=1, step="s", ok=False, output_tail="x\ud800y")
    assert Result.model_validate_json(result.model_dump_json()).output_tail == "x?y"
