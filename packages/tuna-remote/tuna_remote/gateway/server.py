"""The gateway: an ASGI application that offers remote workers what own workers do with Redis.

It holds no state that matters: what is to be done stands in SQL and Redis, so that any gateway of a
database answers any request, and one that is killed costs its clients a retry.
"""

from __future__ import annotations

import hashlib
import re
import time
from typing import Any, TypeVar

import anyio
import redis
import sqlalchemy as sa
import structlog
from celery import Celery
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tuna.api import Settings
from tuna.api.rows import RemoteWorker, needed_artifacts, reading, sessions, writing
from tuna.artifacts.store import Artifacts
from tuna.libraries.items import MAX_TRIALS, StepResult
from tuna.queue.announcements import is_open
from tuna.queue.heartbeat import HeartbeatBoard
from tuna.queue.messages import MAX_REPORT_BYTES, Chunk, Report, ReportKind
from tuna.vocabulary import Cause
from tuna.workers.link import elsewhere
from tuna_remote.gateway import joined
from tuna_remote.gateway.access import Access, KnownWorker, threaded
from tuna_remote.gateway.handout import HandedChunk, Handout
from tuna_remote.gateway.protocol import (
    DIGEST,
    MAX_ARTIFACT_BYTES,
    Handed,
    JoinRequest,
    NextRequest,
    Renewed,
    RenewRequest,
)
from tuna_remote.gateway.requests import (
    HANDLERS,
    ArtifactResponse,
    Bodies,
    BytesHeld,
    answered,
    of_path,
    parsed,
    place_of_remote,
    status_of,
)

log = structlog.get_logger(__name__)

#: How often an idle queue is looked at for somebody who waits.
_POLL_S = 0.04
#: How often a worker's last heartbeat is written to SQL.
_SEEN_EVERY_S = 30.0
#: Bodies: of most requests, and of one result.
_BODY_BYTES, _RESULT_BYTES = 1 << 16, 256 << 10
#: Artifacts that are read at a time, before their bytes count.
_READERS = 4
#: Bytes of the artifacts that a worker may store for one chunk.
_CHUNK_BYTES = 256 << 20
#: Pause in handing chunks to a worker that returned one; doubled until it finishes one.
_PAUSE_S, _MAX_PAUSE_S = 0.5, 60.0
_REASON_CHARS = 2000
_NOT_STORED = "The worker did not store an artifact that its result names."
_LEASE = re.compile(r"[0-9a-f]{32}", re.ASCII)
_PROCESS = re.compile(r"[0-9]{1,10}", re.ASCII)
_Body = TypeVar("_Body", bound=BaseModel)


class GatewayApp:
    """The state of one gateway."""

    def __init__(
        self,
        engine: sa.Engine,
        client: redis.Redis,
        celery: Celery,
        settings: Settings,
    ) -> None:
        self._engine = engine
        self._client = client
        self._settings = settings
        with reading(engine) as connection:
            self._namespace = sessions.namespace(connection)
        self._handout = Handout(client, celery, self._namespace, settings.lease_s)
        self.dropped = self._handout.dropped
        self._artifacts = Artifacts.from_settings(
            settings, self._namespace, self._read_keys(), self._read_keys, waits=False
        )
        self._board = HeartbeatBoard(client, self._namespace, settings.lease_s)
        self._access = Access(engine, settings.lease_s)
        self._bodies = Bodies()
        self._sent = BytesHeld()  # of artifacts on their way to workers
        self._readers = anyio.CapacityLimiter(_READERS)

    def asgi(self) -> Starlette:
        """The application."""
        lease = "/v1/leases/{process}/{id}"
        artifact = f"{lease}/artifacts/{{digest}}"
        return Starlette(
            routes=[
                Route("/v1/join", self._join, methods=["POST"]),
                Route("/v1/next", self._next, methods=["POST"]),
                Route("/v1/renew", self._renew, methods=["POST"]),
                Route("/v1/leave/{process}", self._leave, methods=["POST"]),
                Route(f"{lease}/report", self._report, methods=["POST"]),
                Route(f"{lease}/return", self._return, methods=["POST"]),
                Route(f"{lease}/elsewhere", self._elsewhere, methods=["GET"]),
                Route(artifact, self._get_artifact, methods=["GET"]),
                Route(artifact, self._put_artifact, methods=["PUT"]),
                Route(lease, self._forfeit, methods=["DELETE"]),
            ],
            exception_handlers=HANDLERS,
        )

    def close(self) -> None:
        """Close the connection to the broker."""
        self._handout.close()

    # -- requests

    async def _join(self, request: Request) -> Response:
        self._access.count_join()
        asked = await self._parsed(JoinRequest, request)
        return answered(await threaded(self._access.admit, asked))

    async def _next(self, request: Request) -> Response:
        known = await self._access.authenticated(request)
        asked = await self._parsed(NextRequest, request, known.worker.name)
        token = _token(known.worker, asked.process, asked.id)
        until = time.monotonic() + asked.wait_s
        while True:
            queues = await self._access.queues(known.worker)
            may_have = known.worker.state == "active" and time.monotonic() >= known.paused_until
            if may_have and self._handout.may_have(queues):
                known = await self._access.authenticated(request, counts=False, known_s=0.0)
                held = await threaded(self._handout.hand, known.worker, queues, token)
                if held is not None:
                    handed = Handed(
                        id=held.chunk,
                        chunk=held.message,
                        limit_s=held.limit_s,
                        begun=held.begun,
                    )
                    return answered(handed)
            if time.monotonic() >= until or await request.is_disconnected():
                goes_on = await threaded(is_open, self._client, [self._namespace], queues)
                return Response(status_code=204 if goes_on else 404)
            await anyio.sleep(_POLL_S)
            known = await self._access.authenticated(request, counts=False)

    async def _renew(self, request: Request) -> Response:
        known = await self._access.authenticated(request)
        asked = await self._parsed(RenewRequest, request, known.worker.name)
        return answered(await threaded(self._renewed, known, asked))

    async def _leave(self, request: Request) -> Response:
        known = await self._access.authenticated(request)
        process = of_path(request, "process", _PROCESS)
        await threaded(self._board.remove, f"{known.worker.name}:{int(process)}")
        return Response(status_code=204)

    async def _report(self, request: Request) -> Response:
        known, held = await self._held(request)
        most = min(MAX_REPORT_BYTES, _RESULT_BYTES * (len(held.jobs) + 1))
        async with self._bodies.read(request, most, known.worker.name) as body:
            known = await self._access.authenticated(request, counts=False)
            await threaded(self._take_in, known, held, body)
        return Response(status_code=204)

    async def _elsewhere(self, request: Request) -> Response:
        known, held = await self._held(request)
        chunk = Chunk.model_validate_json(held.message)
        place = place_of_remote(known.worker.name, request.query_params.get("place", "")[:255])
        return answered(await threaded(elsewhere, self._board, chunk, place))

    async def _get_artifact(self, request: Request) -> Response:
        known, held = await self._held(request)
        digest = of_path(request, "digest", DIGEST)
        if digest not in await threaded(self._readable, held, [digest]):
            self._access.log(known.worker.name, "asks for an artifact of others")
            raise HTTPException(404, "no artifact of this chunk")
        try:
            data = await anyio.to_thread.run_sync(
                self._artifacts.get, digest, limiter=self._readers
            )
        except KeyError:
            raise HTTPException(404, "the artifact is gone") from None
        return ArtifactResponse(data, self._sent, known.worker.name)

    async def _put_artifact(self, request: Request) -> Response:
        known, held = await self._held(request)
        name, digest = known.worker.name, of_path(request, "digest", DIGEST)
        async with self._bodies.read(request, MAX_ARTIFACT_BYTES, name) as data:
            await self._access.authenticated(request, counts=False)
            if hashlib.sha256(data).hexdigest() != digest:
                self._access.refuse(name, 422, "the bytes are not those of the digest")
            if await threaded(self._handout.count_bytes, held, digest, len(data)) > _CHUNK_BYTES:
                self._access.refuse(name, 413, "too many bytes for one chunk")
            await threaded(self._artifacts.put, data)
        return Response(status_code=204)

    async def _forfeit(self, request: Request) -> Response:
        known = await self._access.authenticated(request)
        await threaded(self._handout.forfeit, known.worker.name, _path_token(request, known))
        return Response(status_code=204)

    async def _return(self, request: Request) -> Response:
        known, held = await self._held(request)
        report = Report(
            kind=ReportKind.RETURNED,
            chunk=held.chunk,
            worker=known.worker.name,
            reason="worker shutdown",
        )
        await threaded(self._handout.report, known.worker.name, held, report)
        return Response(status_code=204)

    async def _parsed(self, model: type[_Body], request: Request, worker: str = "") -> _Body:
        async with self._bodies.read(request, _BODY_BYTES, worker) as body:
            return parsed(model, body)

    # -- who asks

    async def _held(self, request: Request) -> tuple[KnownWorker, HandedChunk]:
        """The worker, and the chunk that it holds by the lease in the path."""
        known = await self._access.authenticated(request)
        held = await threaded(self._handout.find, _path_token(request, known))
        if held is None or not await threaded(self._handout.leases.is_held, held.chunk, held.token):
            raise HTTPException(409, "the lease is lost")
        return known, held

    def _read_keys(self) -> Any:
        with reading(self._engine) as connection:
            return sessions.artifact_keys(connection, self._settings)

    # -- what is done for them, in a thread

    def _renewed(self, known: KnownWorker, asked: RenewRequest) -> Renewed:
        worker = known.worker
        if asked.heartbeat is not None:
            self._board.announce(status_of(worker, asked.process, asked.heartbeat))
        if time.monotonic() - known.seen_at > _SEEN_EVERY_S:
            known.seen_at = time.monotonic()
            with writing(self._engine) as connection:
                joined.set_seen(connection, worker.name)
        lost = tuple(
            one
            for one in asked.leases
            if not self._handout.renew(worker.name, _token(worker, asked.process, one))
        )
        return Renewed.model_validate({"state": worker.state, "lost": lost})

    def _take_in(self, known: KnownWorker, held: HandedChunk, body: bytes) -> None:
        """Check a report, and append it to the results."""
        name = known.worker.name
        try:
            report = Report.model_validate_json(body)
        except ValidationError:
            self._access.refuse(name, 422, "the report is unreadable")
        if report.chunk != held.chunk:
            self._access.refuse(name, 422, "the report is about another chunk")
        if report.kind is ReportKind.ABANDONED or report.jobs or report.artifacts:
            self._access.refuse(name, 422, "what a chunk left is reported by the gateway")
        if report.results and report.kind is ReportKind.STARTED:
            self._access.refuse(name, 422, "results in a report that a chunk was started")
        if any(result.job_id not in held.jobs for result in report.results):
            self._access.refuse(name, 422, "results of jobs that are not in the chunk")
        if sum(len(result.trials) for result in report.results) > MAX_TRIALS:
            self._access.refuse(name, 422, "too many trials")
        if not self._handout.count_results(held, len(report.results)):
            self._access.refuse(name, 422, "more results than items")
        process = held.token.removeprefix(f"{name}:").partition("/")[0]
        checked = report.model_copy(
            update={
                "remote": name,
                "worker": f"{name}:{process}"[:255],
                "place": place_of_remote(name, report.place),
                "reason": report.reason[:_REASON_CHARS],
                "results": self._with_artifacts(name, held, report),
            }
        )
        if not self._handout.report(name, held, checked):
            raise HTTPException(409, "the lease is lost")
        if report.kind is ReportKind.RETURNED:
            pause_s = min(_MAX_PAUSE_S, _PAUSE_S * 2.0**known.failures)
            known.failures = min(known.failures + 1, 16)
            known.paused_until = time.monotonic() + pause_s
        elif report.kind is ReportKind.FINISHED:
            known.failures, known.paused_until = 0, 0.0

    def _with_artifacts(
        self, worker: str, held: HandedChunk, report: Report
    ) -> tuple[StepResult, ...]:
        """The results, with failures in place of those that name artifacts which the worker neither
        stored nor was given."""
        named = {digest for result in report.results for digest in result.artifacts}
        missing = named - self._readable(held, sorted(named))
        if not missing:
            return report.results
        self._access.log(worker, "artifacts of its results are missing")
        return tuple(
            one.failed(Cause.INFRA, _NOT_STORED, bare=True) if missing & one.artifacts else one
            for one in report.results
        )

    def _readable(self, held: HandedChunk, digests: list[str]) -> set[str]:
        """The artifacts among `digests` that belong to a chunk."""
        found = self._handout.stored(held, digests)
        if len(found) < len(digests):
            found |= held.inputs() & set(digests)
        if len(found) < len(digests):
            with reading(self._engine) as connection:
                needed = needed_artifacts.of_jobs(connection, sorted(held.jobs))
            found |= needed & set(digests)
        return found


def _token(worker: RemoteWorker, process: int, lease: str) -> str:
    return f"{worker.name}:{process}/{lease}"


def _path_token(request: Request, known: KnownWorker) -> str:
    process = int(of_path(request, "process", _PROCESS))
    return _token(known.worker, process, of_path(request, "id", _LEASE))
