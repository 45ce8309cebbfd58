"""The worker's side of the gate: a member's chunks, reports and artifacts, all in its own keys,
without a script.

`membership.keys` lists the keys. What a member writes there are claims: a coordinator holds the
leases, and checks each report and each artifact before it counts.
"""

from __future__ import annotations

import functools
import os

import redis
import structlog

from tuna.artifacts.files import MemberFiles
from tuna.artifacts.store import Artifacts
from tuna.queue import keys
from tuna.queue.announcements import artifact_keys
from tuna.queue.heartbeat import MemberBoard, WorkerStatus
from tuna.queue.leases import Leases, WorkerLeases
from tuna.queue.messages import Report, ReportKind
from tuna.settings import Settings

log = structlog.get_logger(__name__)


class MemberLeases:
    """The chunks that were dealt to this member; the methods are those of the worker's side of
    `Leases`."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._client = client
        self._worker = f"{settings.worker_name}:{os.getpid()}"
        self._dealt, self._reports = keys.of(settings, "dealt"), keys.of(settings, "reports")
        self._held: dict[str, str] = {}  # chunk -> token
        self._given_up: dict[str, str] = {}

    def take(self, chunk: str, token: str, entry: str) -> bool:
        """Mark a chunk that was dealt as taken, and append `entry`; False if it is taken or no
        longer dealt.

        A coordinator that withdraws it between the two steps costs this member the time of one
        chunk, and nothing else.
        """
        if self._client.hget(self._dealt, chunk) not in (b"", token.encode()):
            return False
        with self._client.pipeline() as pipe:
            pipe.hset(self._dealt, chunk, token)
            pipe.xadd(self._reports, {"r": entry})
            try:
                pipe.execute()
            except redis.RedisError:
                self._given_up[chunk] = token  # the answer may have been lost
                raise
        self._held[chunk] = token
        return True

    def renew(self, chunk: str, token: str) -> bool:
        """False if the chunk was withdrawn. The coordinator renews the lease for as long as this
        process has a heartbeat."""
        return self._client.hget(self._dealt, chunk) == token.encode()

    def report(self, chunk: str, token: str, entry: str) -> bool:
        """Append `entry` to the reports; False (and nothing appended) if the chunk was
        withdrawn."""
        if not self.renew(chunk, token):
            return False
        self._client.xadd(self._reports, {"r": entry})
        return True

    def finish(self, chunk: str, token: str, entry: str) -> bool:
        """Append the last `entry`; False (and nothing appended) if the chunk was withdrawn."""
        return self.renew(chunk, token) and self._end(chunk, entry)

    def return_chunk(self, chunk: str, entry: str) -> bool:
        """Append the last `entry` of a chunk, whichever process of this worker holds it; False if
        it is done."""
        return bool(self._client.hexists(self._dealt, chunk)) and self._end(chunk, entry)

    def forfeit(self, chunk: str) -> None:
        """Tell the coordinator that the process which held the chunk is dead."""
        lost = Report(kind=ReportKind.LOST, chunk=chunk, worker=self._worker)
        self.return_chunk(chunk, lost.model_dump_json(exclude_defaults=True))

    def give_up(self, chunk: str) -> None:
        """Stop work on a chunk, which this process may have ended or not.

        A coordinator holds the lease for as long as this process has a heartbeat, so it gets a
        report: now, or by `tell`.
        """
        if token := self._held.pop(chunk, ""):
            self._given_up[chunk] = token
            try:
                self.tell()
            except redis.RedisError as error:
                log.warning("chunk given up", chunk=chunk, error=str(error))

    def tell(self) -> None:
        """Report the chunks that were given up and not withdrawn."""
        for chunk, token in list(self._given_up.items()):
            if self.renew(chunk, token):
                self.forfeit(chunk)
            self._given_up.pop(chunk, None)

    def _end(self, chunk: str, entry: str) -> bool:
        with self._client.pipeline() as pipe:  # a transaction: a full Redis refuses both
            pipe.xadd(self._reports, {"r": entry})
            pipe.hdel(self._dealt, chunk)
            pipe.execute()
        self._held.pop(chunk, None)
        return True


class Member:
    """What the processes of a member use of Redis."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self.leases = MemberLeases(client, settings)
        self.board = _Board(client, keys.of(settings, "heartbeats"), self.leases)
        self._client = client
        self._key = keys.of(settings, "artifacts")
        cache = settings.home / "cache" / "artifacts"
        #: The artifacts of no chunk; its keys are those of all.
        self.store = Artifacts(
            MemberFiles(client, self._key, ""),
            cache,
            cache_bytes=settings.cache_mib << 20,
            newest=functools.partial(artifact_keys, client, settings, settings.namespace),
        )

    def artifacts(self, chunk: str) -> Artifacts:
        """What the items of a chunk need, and what they make."""
        return self.store.over(MemberFiles(self._client, self._key, chunk))


class _Board(MemberBoard):
    """With each heartbeat the chunks are reported that could not be before."""

    def __init__(self, client: redis.Redis, key: str, leases: MemberLeases) -> None:
        super().__init__(client, key)
        self._leases = leases

    def announce(self, status: WorkerStatus) -> None:
        """Publish `status`."""
        super().announce(status)
        self._leases.tell()


def leases_of(client: redis.Redis, settings: Settings, namespace: str) -> WorkerLeases:
    """The leases of a worker with these settings."""
    if settings.is_member:
        return MemberLeases(client, settings)
    return Leases(client, namespace, settings.lease_s)
