"""Which messages are taken for those of a coordinator, and what is told of the others."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Queue
from structlog.testing import capture_logs

from tuna.queue import envelopes
from tuna.queue.envelopes import TASK, DroppedMessages, dropped, fault_of, fault_of_bytes


@pytest.fixture()
def sent() -> Any:
    """The message that a coordinator's Celery sends, as a worker gets it."""
    app = Celery(broker="memory://")
    with app.connection() as connection:
        app.send_task(TASK, kwargs={"chunk": "{}"}, queue="q", time_limit=7, connection=connection)
        message = Queue("q")(connection.default_channel).get()
    assert message is not None
    return message


def raw(**changes: Any) -> bytes:
    """An item of a queue in Redis, as kombu writes it but for the changes."""
    place = {"exchange": "", "routing_key": "q"}
    named = {"body_encoding": "base64", "delivery_tag": "t", "delivery_info": place}
    found = {"body": "W10=", "headers": {}, "properties": named} | changes
    return json.dumps(found).encode()


def test_what_a_coordinator_sends_has_no_fault(sent: Any) -> None:
    assert fault_of(sent) == ""
    assert fault_of_bytes(raw()) == ""
    assert fault_of_bytes(json.dumps(sent._raw).encode()) == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{",
        b"null",
        b"[]",
        b"[" * 100_000,
        raw(properties=None),
        raw(properties={"delivery_info": {}}),
        raw(headers=None),
        raw(headers=[]),
        raw(headers={"compression": "application/x-gzip"}),
        raw(body=None),
        raw(body={"a": 1}),
        raw(body="no base64"),
        raw(properties={**json.loads(raw())["properties"], "delivery_tag": {}}),
        raw(properties={**json.loads(raw())["properties"], "body_encoding": "rot13"}),
    ],
)
def test_what_kombu_would_raise_errors_of_has_a_fault(data: bytes) -> None:
    assert fault_of_bytes(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"content_type": "application/x-python-serialize"},
        {"content_type": None},
        {"content_encoding": "utf-16"},
        {"headers": {}},
        {"headers": {"task": "os.system", "id": "1"}},
        {"headers": {"task": ["a"], "id": "1"}},
        {"headers": {"task": TASK}},
        {"headers": {"task": TASK, "id": "1", "timelimit": {"a": 1}}},
        {"headers": {"task": TASK, "id": "1", "timelimit": [-1, None]}},
        {"headers": {"task": TASK, "id": "1", "eta": "2999-01-01"}},
        {"headers": {"task": TASK, "id": "1", "root_id": {}}},
        {"headers": {"task": TASK, "id": "1", "retries": "many"}},
        {"body": b"["},
        {"body": b"\xff"},
        {"body": b"[" * 100_000},
        {"body": b"[]"},
        {"body": b"[[1], {}, {}]"},
        {"body": b"[[], {}, {}]"},
        {"body": b'[[], {"chunk": 1}, {}]'},
        {"body": b'[[], {"chunk": "{}"}, {"callbacks": [{"task": "tuna.run_chunk"}]}]'},
        {"body": b'[[], {"chunk": {"__type__": "decimal", "__value__": "x"}}, {}]'},
    ],
)
def test_what_no_coordinator_sends_has_a_fault(sent: Any, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(sent, name, value)
    assert fault_of(sent)


def test_more_than_is_parsed_is_a_fault(sent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelopes, "MAX_MESSAGE_BYTES", 10)
    assert "more than" in fault_of(sent)
    assert "more than" in fault_of_bytes(raw())


def test_what_is_compressed_is_not_unpacked() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(1 << 20))).decode()
    assert fault_of_bytes(raw(body=bomb, headers={"compression": "application/x-gzip"}))


def test_a_flood_is_one_line_and_one_number(redis_client: redis.Redis) -> None:
    strange = DroppedMessages()
    with capture_logs() as lines:
        strange.tell(redis_client)
        for number in range(1000):
            strange.add(f"fault {number}")
        strange.tell(redis_client)
        strange.add("too soon")
        strange.tell(redis_client)
    assert [(line["number"], line["last"]) for line in lines] == [(1000, "fault 999")]
    assert dropped(redis_client) == 1000


def test_a_broker_other_than_redis_is_checked_by_the_same_rules() -> None:
    with Connection("memory://") as connection, connection.Producer() as producer:
        producer.publish("{", content_type="application/json", routing_key="other", exchange="")
        queue = Queue("other")(connection.default_channel)
        queue.declare()
        producer.publish("{", content_type="application/json", routing_key="other", exchange="")
        message = queue.get()
    assert message is not None
    assert fault_of(message) == "it is for no task of Tuna"
