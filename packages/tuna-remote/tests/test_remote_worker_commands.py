"""`tuna token` and `tuna workers`, of workers that join."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tuna.api import open_database
from tuna.cli.tokens import join_line
from tuna.db import joined_workers, sessions
from tuna.db.engine import writing
from tuna.errors import BadInput
from tuna.queue.heartbeat import HeartbeatBoard, WorkerStatus
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
    assert (again.code, "is unknown or was revoked" in again.err) == (3, True)


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


def test_a_token_needs_a_gateway(type_in: Callable) -> None:
    refused = type_in("tuna", "token", "create", "--role", "eval")
    assert refused.code == 2
    assert "tuna gateway" in refused.err
    assert type_in("tuna", "token", "create", "--role", "owner").code == 2


def test_a_bad_length_of_time_and_a_bad_token_are_refused(
    type_in: Callable, client: redis.Redis
) -> None:
    for ttl in ("soon", "99999999999d", f"{'9' * 5000}s"):
        assert type_in("tuna", "token", "create", "--role", "eval", "--ttl", ttl).code == 2
    refused = type_in("tuna", "worker", "eval", "--join", f"{URL}#not.a.token")
    assert refused.code == 2
    assert "not.a" not in refused.err


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
    with pytest.raises(BadInput, match="3 lines of tokens, and this is not a task of an array"):
        join_line(given)
