"""What a worker makes of messages that no coordinator sends: nothing is unpickled, and it goes on
working."""

from __future__ import annotations

import json
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu
import psutil
import pytest
import redis
from settings_changes import change_setting

from tuna.queue.connection import broker_url
from tuna.queue.envelopes import dropped
from tuna.services.embedded_redis import EmbeddedRedis
from tuna.settings import get_settings

QUEUE = "compile.noop-1"
DEEP = 100_000


#: Items of a list in Redis that kombu raises errors of
RAW = [
    b"",
    b"\xff\xfe",
    b"{",
    b"null",
    b"[]",
    b"17",
    b"[" * DEEP,
    b"{}",
    b'{"properties": 1, "headers": {}, "body": ""}',
    b'{"properties": {"delivery_tag": {}}, "headers": null, "body": []}',
    b'{"__type__": "uuid", "__value__": {}}',
]


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture()
def worker(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Popen]:
    """A worker as a person starts it, whose log is in TUNA_HOME/log."""
    change_setting(monkeypatch, "TUNA_LOG_LEVEL", "INFO")
    server = EmbeddedRedis(get_settings().run_dir)
    server.acquire()
    words = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "tuna.celery_app",
        "worker",
        "-Q",
        QUEUE,
        "-c",
        "1",
        "-n",
        "one@here",
    ]
    with open(home / "log", "wb") as log:
        process = psutil.Popen(
            [*words, "-l", "INFO"], stdout=log, stderr=log, start_new_session=True
        )
    yield process
    for one in [*process.children(recursive=True), process]:
        one.kill()
    process.wait()
    server.release()


def _headers(task: str = "tuna.run_chunk") -> dict[str, Any]:
    name = uuid.uuid4().hex
    return {
        "lang": "py",
        "task": task,
        "id": name,
        "root_id": name,
        "argsrepr": "()",
        "kwargsrepr": "{}",
        "retries": 0,
    }


def test_a_pickle_is_not_opened_and_the_worker_lives(
    worker: psutil.Popen, home: Path, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    made = tmp_path / "made"
    bomb = pickle.dumps(((_Bomb(made),), {}, {}))
    body = [[], {"chunk": "{}"}, {}]
    hostile: list[tuple[bytes | str, str, str, dict[str, Any]]] = [
        (bomb, "application/x-python-serialize", "binary", _headers()),
        (bomb, "application/x-python-serialize", "binary", {}),
        (bomb, "application/json", "binary", _headers()),
        (b"!!python/object/apply:os.system ['id']", "application/x-yaml", "utf-8", _headers()),
        (json.dumps(body), "application/json", "utf-8", _headers("os.system")),
        (json.dumps(body), "application/json", "utf-8", {}),
        ("[" * DEEP, "application/json", "utf-8", _headers()),
        (json.dumps([[5, 6, 7], {"evil": 1}, {}]), "application/json", "utf-8", _headers()),
        (json.dumps([[], {"chunk": "[" * DEEP}, {}]), "application/json", "utf-8", _headers()),
        (json.dumps([[], {"chunk": {"a": 1}}, {}]), "application/json", "utf-8", _headers()),
        (json.dumps(body), "application/json", "utf-8", _headers()),
    ]
    with (
        kombu.Connection(broker_url(get_settings())) as connection,
        connection.Producer() as producer,
    ):
        for text, content_type, encoding, headers in hostile:
            producer.publish(
                text,
                exchange="",
                routing_key=QUEUE,
                content_type=content_type,
                content_encoding=encoding,
                headers=headers,
            )
    client = redis.Redis.from_url(EmbeddedRedis(get_settings().run_dir).url)
    last = hostile[-1][3]["id"]
    for data in RAW:  # a worker takes from the right: before those above
        client.rpush(QUEUE, data)
    log = home / "log"
    eventually(
        lambda: last in log.read_text() and "dropped" in log.read_text().partition(last)[2], 60
    )
    eventually(lambda: client.llen(QUEUE) == 0 and client.hlen("unacked") == 0, 120)
    assert worker.is_running()
    assert worker.children()
    assert not made.exists()
    eventually(lambda: dropped(client) == len(RAW) + len(hostile) - 2, 60)
    assert "messages dropped: no coordinator sent them" in log.read_text()
    assert "Traceback" not in log.read_text()
    pickle.loads(bomb)
    assert made.exists(), "the bomb would have worked"
