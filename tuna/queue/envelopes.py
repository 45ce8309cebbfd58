"""Messages on a queue that no coordinator sent: whatever is in them, they are dropped and counted,
and who takes from the queue goes on.

Key: `tuna:dropped`, a number: how many were dropped since Redis is there.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import redis
import structlog

log = structlog.get_logger(__name__)

#: Name of the only task that workers have
TASK = "tuna.run_chunk"
#: Number of messages that were dropped
DROPPED_KEY = "tuna:dropped"
#: Maximum of bytes of a message, above which it is not parsed; chunks have some ten kilobytes
MAX_MESSAGE_BYTES = 64 << 20
#: Minimum of seconds between two lines about dropped messages
_EVERY_S = 5.0
_TEXTS = ("id", "task", "shadow", "group", "root_id", "parent_id", "argsrepr", "kwargsrepr")
#: Headers and options with which Celery does more than to call a task
_UNUSED = ("eta", "expires", "compression", "chord", "chain", "callbacks", "errbacks")


class DroppedMessages:
    """Counts what one process drops, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number, self._fault, self._due_at = 0, "", 0.0

    def add(self, fault: str) -> None:
        """Count one."""
        with self._lock:
            self._number, self._fault = self._number + 1, fault

    def tell(self, client: redis.Redis) -> None:
        """Log and count in Redis what was dropped since the last time, unless that was just now."""
        with self._lock:
            number, now = self._number, time.monotonic()
            if not number or now < self._due_at:
                return
            self._number, self._due_at = 0, now + _EVERY_S
        log.error("messages dropped: no coordinator sent them", number=number, last=self._fault)
        client.incrby(DROPPED_KEY, number)


def dropped(client: redis.Redis) -> int:
    """How many messages were dropped since Redis is there."""
    found = client.get(DROPPED_KEY)
    return int(found) if isinstance(found, bytes) and found.isdigit() else 0


def fault_of_bytes(data: bytes) -> str:
    """Why an item of a queue of Redis is no message of kombu's, which would end who takes it; empty
    if it is one."""
    if len(data) > MAX_MESSAGE_BYTES:
        return f"it has more than {MAX_MESSAGE_BYTES} bytes"
    try:
        found = json.loads(data)
        properties, headers = found["properties"], found["headers"]
        place = properties["delivery_info"]
        texts = (properties["delivery_tag"], place["exchange"], place["routing_key"])
        if not all(isinstance(text, str) for text in (*texts, found["body"])):
            return "its place or its body is no text"
        if properties.get("body_encoding") != "base64" or headers.get("compression"):
            return "its encoding"
        base64.b64decode(found["body"], validate=True)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def fault_of(message: Any) -> str:
    """Why a message of kombu's is none of a coordinator; empty if it is one."""
    headers, kind = message.headers, (message.content_type, message.content_encoding)
    if kind != ("application/json", "utf-8"):
        return f"its content is {kind[0]!a}, {kind[1]!a}"[:200]
    if len(message.body) > MAX_MESSAGE_BYTES:
        return f"it has more than {MAX_MESSAGE_BYTES} bytes"
    if not isinstance(headers, Mapping) or headers.get("task") != TASK:
        return "it is for no task of Tuna"
    if not isinstance(headers.get("id"), str):
        return "its task has no id"
    texts = [headers.get(name) for name in _TEXTS]
    limits = headers.get("timelimit") or (None, None)
    if not (
        all(text is None or isinstance(text, str) for text in texts)
        and isinstance(headers.get("retries", 0), int)
        and isinstance(limits, list | tuple)
        and len(limits) == 2
        and all(limit is None or _is_limit(limit) for limit in limits)
        and not any(headers.get(name) for name in _UNUSED)
    ):
        return "its headers"
    try:
        arguments, named, options = message.payload
        if arguments or list(named) != ["chunk"] or not isinstance(named["chunk"], str):
            return "its arguments"
        return "its options" if any(options.values()) else ""
    except Exception as error:  # of kombu's decoders, or of what was decoded
        return f"{type(error).__name__}: {error}"[:200]


def _is_limit(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < 1e9
