"""Requests as a gateway reads them, of bounded size, time and number; checks of what they say; its
answers."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import TypeVar

import anyio
import redis
import structlog
from kombu.exceptions import OperationalError
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from tuna.api import WorkerStatus
from tuna.api.rows import RemoteWorker, server_errors
from tuna.common.messages import first_fault
from tuna.errors import DatabaseError, ServiceError, StorageFull
from tuna_remote.gateway.protocol import Heartbeat

log = structlog.get_logger(__name__)

#: A body has this long, and a second more for each of so many bytes.
_BODY_S, _BODY_BYTES_PER_S = 10.0, 1 << 18
#: Bytes of bodies that are held at a time in each direction, and the share of one worker, which has
#: room for the largest artifact.
_BODIES_BYTES, _WORKER_SHARE = 512 << 20, 1 / 4
#: An artifact is sent in parts, so that a reader's pace is known.
_PART_BYTES = 64 << 10
_Body = TypeVar("_Body", bound=BaseModel)


def of_path(request: Request, name: str, form: re.Pattern[str]) -> str:
    """A part of the path; answers 404 for what has not this form."""
    text = str(request.path_params[name])
    if not form.fullmatch(text):
        raise HTTPException(404, f"no such {name}")
    return text


def parsed(model: type[_Body], body: bytes) -> _Body:
    """The body as a message; answers 422 for what is none."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(422, first_fault(error.errors())[:300]) from None


class BytesHeld:
    """Bytes of bodies in memory, bounded for each worker and together."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()  # by worker; empty: of strangers

    def add(self, worker: str, number: int) -> None:
        """Count bytes, until `remove`; answers 503, which clients repeat, where the worker or
        everybody together holds too much."""
        self._held[worker] += number
        of_worker = self._held[worker] > _BODIES_BYTES * _WORKER_SHARE
        if of_worker or self._held.total() > _BODIES_BYTES:
            raise HTTPException(503, "too many bytes are on their way", {"retry-after": "1"})

    def remove(self, worker: str, number: int) -> None:
        """Count bytes no more."""
        self._held[worker] -= number
        if not self._held[worker]:
            del self._held[worker]


class ArtifactResponse(Response):
    """An artifact, whose bytes count until the reader has taken them or is gone."""

    def __init__(self, data: bytes, held: BytesHeld, worker: str) -> None:
        super().__init__(data, media_type="application/octet-stream")
        self._held, self._worker = held, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it as fast as it is taken."""
        data, size = self.body, len(self.body)
        try:
            self._held.add(self._worker, size)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for start in range(0, size, _PART_BYTES):
                part = data[start : start + _PART_BYTES]
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            self._held.remove(self._worker, size)


class Bodies:
    """Reads the bodies of requests, each of bounded size and time, and all together within a share
    of memory."""

    def __init__(self) -> None:
        self._held = BytesHeld()

    @contextlib.asynccontextmanager
    async def read(
        self, request: Request, most_bytes: int, worker: str = ""
    ) -> AsyncIterator[bytes]:
        """Yield the body, which counts until the block ends; answers 503 as `BytesHeld` does."""
        declared = request.headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared[:19]) > most_bytes:
            raise HTTPException(413, f"the body has more than {most_bytes} bytes")
        parts: list[bytes] = []
        try:
            try:
                await self._receive(request, most_bytes, worker, parts)
            except TimeoutError:
                raise HTTPException(408, "the body came too slowly") from None
            yield b"".join(parts)
        finally:
            self._held.remove(worker, sum(map(len, parts)))

    async def _receive(
        self, request: Request, most_bytes: int, worker: str, parts: list[bytes]
    ) -> None:
        size = 0
        with anyio.fail_after(_BODY_S) as scope:
            began_at = anyio.current_time()
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                self._held.add(worker, len(part))
                if size > most_bytes:
                    raise HTTPException(413, f"the body has more than {most_bytes} bytes")
                scope.deadline = began_at + _BODY_S + size / _BODY_BYTES_PER_S


def answered(body: BaseModel) -> Response:
    """The answer with a message."""
    return Response(body.model_dump_json(), media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # what was not read of a body is not read as the next request
    closes = {"connection": "close"} if error.status_code in (408, 413, 503) else {}
    headers = {**closes, **(error.headers or {})}
    return JSONResponse({"error": error.detail}, error.status_code, headers)


async def _unavailable(_: Request, error: Exception) -> Response:
    if not server_errors.is_passing(error):
        log.error("request failed", error=str(error))
    return JSONResponse({"error": "a server is not available"}, 503)


async def _full(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 507)


async def _gone(_: Request, _error: Exception) -> Response:
    return Response(status_code=400)


async def _failed(_: Request, error: Exception) -> Response:
    if server_errors.is_passing(error):
        return JSONResponse({"error": "a server is not available"}, 503)
    log.error("request failed", error=type(error).__name__, exc_info=error)
    return JSONResponse({"error": "the gateway failed"}, 500)


#: What is answered to an error of a request.
HANDLERS = {
    HTTPException: _refused,
    redis.RedisError: _unavailable,
    DatabaseError: _unavailable,
    ServiceError: _unavailable,
    OperationalError: _unavailable,
    SQLAlchemyError: _failed,
    StorageFull: _full,
    ClientDisconnect: _gone,
    Exception: _failed,
}


#: Current jobs of one process that are shown.
_JOBS = 1000


def place_of_remote(worker: str, claimed: str) -> str:
    """The place that a remote worker names if that is itself or a device of it; else the worker."""
    own = claimed == worker or claimed.startswith(f"{worker}/")
    return claimed if own and claimed.isprintable() and len(claimed) <= 255 else worker


def status_of(worker: RemoteWorker, process: int, said: Heartbeat) -> WorkerStatus:
    """The status of a process, under the name of its worker and with what that was admitted to."""
    claimed, now = said.environment.split(", "), time.time()
    checked = {
        "environment": ", ".join(name for name in worker.environments if name in claimed),
        "toolchains": tuple(name for name in worker.toolchains if name in said.toolchains),
        "job_ids": said.job_ids[:_JOBS],
        "started_at": min(said.started_at, now),
        "place": place_of_remote(worker.name, said.place),
    }
    known = {"role": worker.role, "host": worker.host, "pid": process, "seen_at": now}
    return WorkerStatus(f"{worker.name}:{process}", **{**vars(said), **checked, **known})
