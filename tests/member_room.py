"""A coordinator in this process, turn by turn, with jobs, an own worker, and members by hand."""

from __future__ import annotations

from pathlib import Path

import redis
import sqlalchemy as sa
from jobs_builder import accepted, make_jobs, states
from member_double import MemberDouble, admit

from tuna.artifacts.store import Artifacts
from tuna.coordinator.coordinator import Coordinator
from tuna.coordinator.publisher import Backends
from tuna.db import sessions
from tuna.db.engine import reading
from tuna.db.models import StepResult
from tuna.jobs.serving import SessionWork
from tuna.libraries.context import RunContext
from tuna.libraries.registry import get_library
from tuna.membership import members as store
from tuna.queue.celery_internals import task_arguments
from tuna.queue.connection import make_celery
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk
from tuna.settings import get_settings
from tuna.workers.runner import Runner

LIBRARY = get_library("noop")


class Room:
    """A coordinator of one session; the settings name its Redis."""

    def __init__(self, engine: sa.Engine, client: redis.Redis, layers: int) -> None:
        """`client`: the owner's."""
        self.engine, self.client, self.jobs = engine, client, 10 * layers
        session_id = make_jobs(engine, layers)
        with reading(engine) as connection:
            environment = sessions.get(connection, session_id).environment
            self.namespace = sessions.namespace(connection)
        self.work = SessionWork(session_id, self.namespace, environment, LIBRARY)
        self.leases = Leases(client, self.namespace, get_settings().lease_s)
        self.coordinator = self.another()

    def another(self) -> Coordinator:
        settings = get_settings()
        backends = Backends(self.engine, self.client, make_celery(settings), settings)
        return Coordinator(backends, [self.work])

    def key(self, name: str) -> str:
        return f"tuna:{{{self.namespace}}}:{name}"

    def member(self, name: str, role: str = "compile") -> MemberDouble:
        """A member without a Redis user, with a heartbeat."""
        admit(self.engine, name, role)
        double = MemberDouble(self.client, self.namespace, name, role)
        double.beat()
        return double

    def turn(self, coordinator: Coordinator | None = None) -> None:
        """What is due in a second, at once."""
        coordinator = coordinator or self.coordinator
        members = coordinator._members
        members._looked_at = members._checked_at = float("-inf")
        members._roster.expire()
        coordinator.publisher._no_work.clear()
        coordinator.publish()
        members.tick()
        coordinator.drain.once()
        for chore in coordinator.chores.all:
            chore.run()

    def is_done(self) -> bool:
        """Whether all jobs have ended well."""
        return states(self.engine) == {"evaluated": self.jobs}

    def each_once(self) -> bool:
        """Whether each step of each job has one good result."""
        found = accepted(self.engine)
        return len(found) == 2 * self.jobs and {count for *_, count in found} == {1}

    def state(self, name: str) -> str:
        """State of a member, a former one included."""
        with reading(self.engine) as connection:
            return {one.name: one.state for one in store.members(connection, include_former=True)}[
                name
            ]

    def failures(self) -> list[tuple[str | None, str]]:
        """(cause, worker) of each failure."""
        with reading(self.engine) as connection:
            rows = connection.execute(
                sa.select(StepResult.cause, StepResult.worker).where(StepResult.ok.is_(False))
            )
            return [(row.cause, row.worker) for row in rows]

    def faults(self) -> int:
        """Bad values of all members so far."""
        return sum(map(int, self.client.hvals(self.key("faults"))))


class OwnWorker:
    """A worker with the owner's credentials, in this process."""

    def __init__(self, room: Room, folder: Path) -> None:
        environment = room.work.environment
        self.queues = [f"compile.{environment.toolchain}", f"eval.{environment.machine_key}"]
        context = RunContext(Artifacts(folder.as_uri(), folder), folder, (0,))
        self._runner = Runner(room.client, get_settings().lease_s, context, "own")
        self._connection = make_celery(get_settings()).connection_for_read()
        self._channel = self._connection.channel()

    def next_chunk(self) -> Chunk | None:
        """Take a message from a shared queue."""
        for queue in self.queues:
            if message := self._channel.basic_get(queue):
                message.ack()
                return Chunk.model_validate_json(task_arguments(message)["chunk"])
        return None

    def run(self, chunk: Chunk) -> str:
        """Do a chunk."""
        return self._runner.run(chunk, LIBRARY)

    def work(self) -> None:
        """Do all that there is."""
        while chunk := self.next_chunk():
            self.run(chunk)

    def close(self) -> None:
        self._connection.release()
