"""`tuna token` and `tuna workers`."""

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
from rich.console import Console

from tuna.api import open_database
from tuna.cli import status as live_view
from tuna.cli.tokens import join_line
from tuna.db import joined_workers, sessions
from tuna.db.engine import reading, writing
from tuna.db.models import Job
from tuna.errors import BadInput
from tuna.queue.announcements import control_key
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
from tuna.reports.status import Watcher
from tuna.settings import get_settings
from tuna_remote.gateway import joined
from tuna_remote.gateway.tokens import JoinToken

URL = "https://gate.example:7117"


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


def _token(type_in: Callable, *words: str) -> str:
    made = type_in("tuna", "token", "create", "--role", "eval", "--url", URL, *words)
    assert made.code == 0
    return made.out.strip()


def _joined(type_in: Callable, client: redis.Redis) -> str:
    """A worker that joined; its name."""
    token, engine = JoinToken.parse(_token(type_in)), open_database()
    worker = joined_workers.NewWorker("eval-h-1", "eval", "h", "card", ("e" * 16,), (), "d" * 64, 1)
    with writing(engine) as connection:
        assert joined.admit(connection, token.id, worker)
        namespace = sessions.namespace(connection)
    HeartbeatBoard(client, namespace, 20).announce(
        WorkerStatus(f"{worker.name}:1", "eval", "h", 1, "card", "e", (), (7,), 1.0, 1.0, 3)
    )
    return worker.name


def test_a_token_is_one_line_and_lists_show_no_secret(
    type_in: Callable, client: redis.Redis
) -> None:
    line = _token(type_in, "--ttl", "30m")
    assert line.startswith(f"{URL}#")
    token_id, secret = line.split(".")[-2:]
    listed = type_in("tuna", "token", "list", "--json")
    assert [(entry["id"], entry["role"], entry["state"]) for entry in json.loads(listed.out)] == [
        (token_id, "eval", "open")
    ]
    assert secret not in listed.out + type_in("tuna", "token", "list").out
    assert type_in("tuna", "token", "revoke", token_id).code == 0
    assert json.loads(type_in("tuna", "token", "list", "--json").out)[0]["state"] == "revoked"
    again = type_in("tuna", "token", "revoke", token_id)
    assert (again.code, "There is no token" in again.err) == (3, True)


def test_a_worker_is_listed_cordoned_and_revoked(type_in: Callable, client: redis.Redis) -> None:
    name = _joined(type_in, client)

    def listed() -> dict:
        (document,) = json.loads(type_in("tuna", "workers", "--json").out)
        return document

    document = listed()
    assert (document["worker"], document["joined"], document["state"], document["jobs"]) == (
        name,
        True,
        "busy",
        [7],
    )
    assert "d" * 64 not in json.dumps(document)
    assert name in type_in("tuna", "workers").out
    for verb, state in (("cordon", "cordoned"), ("drain", "draining")):
        assert type_in("tuna", "workers", verb, name).code == 0
        assert listed()["state"] == state
    assert type_in("tuna", "workers", "uncordon", f"{name}:1").code == 0
    assert type_in("tuna", "workers", "revoke", name).code == 0
    assert listed()["state"] == "revoked"
    again = type_in("tuna", "workers", "uncordon", name)
    assert (again.code, "revoked already" in again.err) == (2, True)


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


def test_a_token_needs_a_gateway(type_in: Callable) -> None:
    refused = type_in("tuna", "token", "create", "--role", "eval")
    assert refused.code == 2
    assert "tuna gateway" in refused.err
    assert type_in("tuna", "token", "create", "--role", "owner").code == 2


def test_a_token_of_a_visitor_needs_no_gateway(type_in: Callable) -> None:
    made = type_in("tuna", "token", "create", "--role", "read", "--label", "page of the team")
    assert re.fullmatch(r"[0-9a-f]{12}\.[\w-]{32}\n", made.out)
    (listed,) = json.loads(type_in("tuna", "token", "list", "--json").out)
    assert (listed["id"], listed["label"]) == (made.out.partition(".")[0], "page of the team")
    assert (listed["role"], listed["state"]) == ("read", "open")
    for words in (("--role", "read", "--url", "https://h:1"), ("--role", "eval", "--label", "x")):
        assert type_in("tuna", "token", "create", *words).code == 2


def test_a_bad_length_of_time_and_a_bad_token_are_refused(
    type_in: Callable, client: redis.Redis
) -> None:
    for ttl in ("soon", "99999999999d", f"{'9' * 5000}s"):
        assert type_in("tuna", "token", "create", "--role", "eval", "--ttl", ttl).code == 2
    refused = type_in("tuna", "worker", "eval", "--join", f"{URL}#not.a.token")
    assert refused.code == 2
    assert "not.a" not in refused.err


def test_the_line_may_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "line").write_text("https://h#n.i.s\n")
    monkeypatch.setenv("TUNA_JOIN", str(tmp_path / "line"))
    assert join_line(str(tmp_path / "line")) == "https://h#n.i.s"
    assert join_line(None) == "https://h#n.i.s"
    assert join_line(None) is None, "it is taken out of the environment"
    assert join_line("https://h#direct") == "https://h#direct"


def test_a_task_of_an_array_takes_the_line_of_its_number(
    type_in: Callable, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _token(type_in, "--count", "3").split()
    assert len({JoinToken.parse(line).id for line in lines}) == 3
    given = "\n".join(lines)
    for name in ("AWS_BATCH_JOB_ARRAY_INDEX", "JOB_COMPLETION_INDEX", "SLURM_ARRAY_TASK_ID"):
        with monkeypatch.context() as task:
            task.setenv(name, "2")
            task.setenv("TUNA_JOIN", given)
            assert join_line(None) == lines[2]
            assert join_line(lines[0]) == lines[0]
            task.setenv(name, "3")
            refused = type_in("tuna", "worker", "eval", "--join", given)
            assert (refused.code, "none for task 3" in refused.err) == (2, True)
            assert not any(line in refused.err for line in lines)
    with pytest.raises(BadInput, match="3 lines of tokens, and this is no task of an array"):
        join_line(given)


def test_a_worker_that_is_aside_is_said_in_the_status_of_a_session_with_jobs_in_flight(
    client: redis.Redis, type_in: Callable
) -> None:
    """R8: only `tuna workers` said it, and a session stood still."""
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
    with writing(engine) as connection:
        connection.execute(sa.update(Job).values(state="eval_queued", step="measure"))
    assert words in type_in("tuna", "status").out
    watched = Watcher(engine, get_settings()).look()
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(live_view.view(watched, 100))
    assert words in console.export_text()
