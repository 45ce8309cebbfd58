"""`tuna token` and `tuna workers`, of visitors and own workers."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from jobs_builder import make_jobs
from queries import execute
from rich.console import Console

from tuna.api import open_database
from tuna.cli import status as live_view
from tuna.cli.tokens import join_line
from tuna.db import sessions
from tuna.db.engine import reading
from tuna.db.models import Job
from tuna.queue.announcements import control_key
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.reports.status import Watcher
from tuna.settings import get_settings


@pytest.fixture
def client(
    home: Path,
    redis_client: redis.Redis,
    redis_urls: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    type_in: Callable,
) -> redis.Redis:
    for name, value in redis_urls.items():
        monkeypatch.setenv(name, value)
    get_settings.cache_clear()
    assert type_in("tuna", "init-session", "noop", "-l", "r").code == 0
    return redis_client


def test_a_worker_that_did_not_join_takes_orders_and_cannot_be_revoked(
    type_in: Callable, client: redis.Redis
) -> None:
    with reading(open_database()) as connection:
        namespace = sessions.namespace(connection)
    HeartbeatBoard(client, namespace, 20).announce(
        WorkerStatus("box:4", "compile", "box", 4, "", "", ("t",), (), 1.0, 1.0)
    )
    assert type_in("tuna", "workers", "cordon", "box").code == 0
    assert client.get(control_key(namespace, "box")) == b"cordoned"
    refused = type_in("tuna", "workers", "revoke", "box")
    assert (refused.code, "did not join" in refused.err) == (2, True)
    assert type_in("tuna", "workers", "cordon", "nobody").code == 3


def test_a_token_of_a_visitor_needs_no_gateway(type_in: Callable) -> None:
    made = type_in("tuna", "token", "create", "--role", "read", "--label", "page of the team")
    assert re.fullmatch(r"[0-9a-f]{12}\.[\w-]{32}\n", made.out)
    (listed,) = json.loads(type_in("tuna", "token", "list", "--json").out)
    assert (listed["id"], listed["label"]) == (made.out.partition(".")[0], "page of the team")
    assert (listed["role"], listed["state"]) == ("read", "open")
    for words in (("--role", "read", "--url", "https://h:1"), ("--role", "eval", "--label", "x")):
        assert type_in("tuna", "token", "create", *words).code == 2


def test_the_line_may_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "line").write_text("https://h#n.i.s\n")
    monkeypatch.setenv("TUNA_JOIN", str(tmp_path / "line"))
    assert join_line(str(tmp_path / "line")) == "https://h#n.i.s"
    assert join_line(None) == "https://h#n.i.s"
    assert join_line(None) is None, "it is taken out of the environment"
    assert join_line("https://h#direct") == "https://h#direct"


def test_a_worker_that_is_aside_is_said_in_the_status_of_a_session_with_jobs_in_flight(
    client: redis.Redis, type_in: Callable
) -> None:
    """`tuna status` says why the session stands still, as `tuna workers` does."""
    engine = open_database()
    with reading(engine) as connection:
        namespace = sessions.namespace(connection)
    status = WorkerStatus(
        name="box:7",
        role="eval",
        host="box",
        pid=7,
        device="gpu0",
        environment="e",
        toolchains=(),
        job_ids=(),
        started_at=0.0,
        seen_at=0.0,
        aside="jobs fail here in a row",
    )
    HeartbeatBoard(client, namespace, 60.0).announce(status)
    words = "box:7 is aside: jobs fail here in a row"
    assert words not in type_in("tuna", "status").out, "nothing waits for it"
    make_jobs(engine, 1)
    execute(engine, sa.update(Job).values(state="eval_queued", step="measure"))
    assert words in type_in("tuna", "status").out
    watched = Watcher(engine, get_settings()).look()
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(live_view.view(watched, 100))
    assert words in console.export_text()
