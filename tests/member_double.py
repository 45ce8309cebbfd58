"""A member's worker in this process, by hand: what it writes can be anything."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis
import sqlalchemy as sa

from tuna.db.engine import writing
from tuna.db.models import Worker
from tuna.libraries.items import StepResult, WorkItem, result_of
from tuna.libraries.registry import get_library
from tuna.membership import members as store
from tuna.queue import keys
from tuna.queue.celery_internals import queue_keys
from tuna.queue.heartbeat import WorkerStatus
from tuna.queue.messages import Chunk, Report, ReportKind

HOME = get_library("noop").environment()


def admit(engine: sa.Engine, name: str, role: str = "compile", processes: int = 1) -> None:
    """Store a member that joined, without a Redis user."""
    with writing(engine) as connection:
        store.add_token(connection, name[:12], "d", role, store.utc_now())
        row = {
            "name": name,
            "token_id": name[:12],
            "password": "0" * 64,
            "role": role,
            "host": "h",
            "device": "",
        }
        row |= {"environment": HOME.machine_key if role == "eval" else "", "processes": processes}
        row |= {
            "toolchain": json.dumps([HOME.toolchain] if role == "compile" else []),
            "state": "active",
        }
        connection.execute(sa.insert(Worker).values(row))


class MemberDouble:
    """Takes, does and reports what was dealt to it, when it is told to."""

    def __init__(
        self, client: redis.Redis, namespace: str, name: str, role: str = "compile"
    ) -> None:
        """`client`: its own."""
        self.client = client
        self.name = name
        self.role = role
        self.url = ""  # of Redis with its credentials, if it joined
        self._prefix = keys.prefix(namespace, name)

    def key(self, name: str) -> str:
        return self._prefix + name

    def beat(self, pid: int = 7, **facts: Any) -> None:
        """One heartbeat of a process."""
        status = {
            "name": f"{self.name}:{pid}",
            "role": self.role,
            "host": "h",
            "pid": pid,
            "device": "",
            "environment": HOME.machine_key if self.role == "eval" else "",
            "toolchains": (HOME.toolchain,) if self.role == "compile" else (),
            "job_ids": (),
            "started_at": time.time(),
            "seen_at": time.time(),
        }
        self.client.hset(
            self.key("heartbeats"), str(pid), WorkerStatus(**(status | facts)).to_json()
        )

    def next_chunk(self) -> Chunk | None:
        """The next message of its queue."""
        for name in queue_keys(keys.WORK):
            if self.client.llen(self.key(name)):
                _, text = self.client.brpop([self.key(name)], timeout=5)
                body = base64.b64decode(json.loads(text)["body"])
                return Chunk.model_validate_json(json.loads(body)[1]["chunk"])
        return None

    def report(
        self, kind: ReportKind, chunk: str, results: Sequence[StepResult] = (), **facts: Any
    ) -> None:
        """Append a report."""
        fields = {"worker": f"{self.name}:7", "place": self.name} | facts
        text = Report(kind=kind, chunk=chunk, results=tuple(results), **fields).to_json()
        self.client.xadd(self.key("reports"), {"r": text})

    def put(self, chunk: str, name: str, data: bytes) -> None:
        """Put an artifact of a chunk."""
        self.client.hset(self.key("artifacts"), f"{chunk}/{name}", data)

    def artifacts(self, chunk: str) -> Mapping[str, bytes]:
        """What stands there for a chunk, by name."""
        found = self.client.hgetall(self.key("artifacts"))
        return {
            name.decode()[len(chunk) + 1 :]: data
            for name, data in found.items()
            if name.startswith(chunk.encode())
        }

    def work(self) -> int:
        """Do all chunks of its queue, with success; returns how many."""
        done = 0
        while chunk := self.next_chunk():
            if self.client.hget(self.key("dealt"), chunk.id) is None:
                continue
            self.report(ReportKind.STARTED, chunk.id)
            self.report(ReportKind.FINISHED, chunk.id, [good(item) for item in chunk.items])
            done += 1
        return done


def good(item: WorkItem, **facts: Any) -> StepResult:
    """A good result of an item."""
    now = time.time()
    return result_of(item, ok=True, simulated=True, started_at=now, ended_at=now, **facts)
