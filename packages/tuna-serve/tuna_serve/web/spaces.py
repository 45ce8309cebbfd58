"""Routes of caches that programs share: put and get entries of a space, with signatures, and list
them."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterable
from functools import cached_property
from typing import IO, Annotated

import sqlalchemy as sa
import structlog
from anyio import CancelScope, CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from tuna.api import get_settings
from tuna.api.rows import access_tokens, open_database, reading, sessions, transaction, utc_now
from tuna.artifacts.signatures import Keys
from tuna.artifacts.store import Artifacts
from tuna.errors import BadInput, NotFound, TunaError
from tuna_serve.db import cache_entries
from tuna_serve.db.cache_entries import (
    INDEX,
    MAX_FILE_BYTES,
    CacheBounds,
    CacheEntry,
    EntryName,
    PutOutcome,
)
from tuna_serve.requests.asked import Conflict
from tuna_serve.requests.uploads import Upload, folder, forget
from tuna_serve.settings import service_settings
from tuna_serve.web.answers import answered, file_parts
from tuna_serve.web.visitors import CacheVisitor, Role, Visitor

log = structlog.get_logger(__name__)

#: The path below which bodies are read here, in parts.
UPLOADS = "/v1/cache/"
router = APIRouter(prefix="/v1/cache")
#: Bodies of one token that are received at a time; others wait.
_AT_A_TIME = 32
#: Threads that read entries, and that put some: more take the interpreter from each other.
_READERS, _WRITERS = 2, 2
#: Seconds before a use is written down again, and between two writings.
_USED_S, _WRITTEN_S = 60.0, 2.0
#: Files and bytes of a batch; files beyond are left out.
_MAX_FILES, _MAX_BYTES = 64, 64 << 20
#: Seconds after which the signing key is looked up again.
_KNOWN_S = 1.0
#: Bytes of an answer that are held in memory.
_IN_MEMORY = 1 << 20
_BODY = {"content": {"application/octet-stream": {"schema": {"type": "string"}}}, "required": True}


class Caches:
    """The entries of one database, their bytes, and which of them were used."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._keys: tuple[float, Keys] | None = None
        self._used: set[int] = set()
        self._written_at = time.monotonic()
        self._lock = threading.Lock()
        # SQLite lets writers try again until it is their turn, which may be late
        self._writing = threading.Lock()
        self._receiving: dict[str, CapacityLimiter] = {}
        self.reading, self.writing = CapacityLimiter(_READERS), CapacityLimiter(_WRITERS)

    def receiving(self, token: str) -> CapacityLimiter:
        """Return what bounds the bodies of a token, whose slow ones delay no other's."""
        return self._receiving.setdefault(token, CapacityLimiter(_AT_A_TIME))

    @cached_property
    def artifacts(self) -> Artifacts:
        """The store with the bytes; entries have signatures of their own."""
        with reading(self._engine) as connection:
            namespace = sessions.namespace(connection)
        return Artifacts.from_settings(get_settings(), namespace, waits=False)

    @cached_property
    def _folder(self) -> str:
        return str(folder())

    def _signing(self) -> Keys:
        """Return the keys, as they were in SQL a moment ago."""
        if self._keys is None or time.monotonic() - self._keys[0] > _KNOWN_S:
            with reading(self._engine) as connection:
                found = sessions.artifact_keys(connection, get_settings())
            self._keys = time.monotonic(), found
        return self._keys[1]

    def put(self, name: EntryName, upload: Upload, token: str) -> bool:
        """Store what was received; False if it is there already. Raises Conflict for other bytes,
        unless the store has lost them, CacheFull, StorageFull; then nothing is kept."""
        with reading(self._engine) as connection:
            stored = cache_entries.entries_of(connection, name.space, name.key, [name.file])
        others = [entry for entry in stored if entry.digest != upload.digest]
        lost = [entry for entry in others if not self.artifacts.is_whole(entry.digest)]
        if not others or lost:
            upload.store(self.artifacts)  # also where they are: they may be damaged there
        bounds = CacheBounds.of(service_settings())
        facts = name, upload.digest, upload.size_bytes, token, bounds, lost
        with self._writing:
            outcome, evicted = transaction(self._engine, cache_entries.put, *facts)
        if outcome is PutOutcome.OTHER:
            raise Conflict(
                f"Other bytes are in {name.space} as {name.key}/{name.file}.",
                hint="what is there stays until it is pruned",
            )
        upload.keep()
        if evicted:
            log.info("cache entries evicted", space=name.space, entries=len(evicted))
            forget(*evicted)
        return outcome is PutOutcome.STORED

    def read(
        self, space: str, key: str, files: list[str]
    ) -> tuple[list[tuple[CacheEntry, str]], IO[bytes]]:
        """Return the entries with these files whose bytes are good, each with its signature, in
        this order, and their bytes. Lists of files that were put one by one, before that was
        refused, are as if they were not there."""
        with reading(self._engine) as connection:
            stored = cache_entries.entries_of(connection, space, key, files)
            entry_of = {entry.file: entry for entry in stored}
        keys = self._signing()
        content = tempfile.SpooledTemporaryFile(_IN_MEMORY, dir=self._folder)  # noqa: SIM115
        entries = []
        for file in files:
            if file not in entry_of or file.startswith(INDEX):
                continue
            entry = entry_of[file]
            start = content.tell()
            if start and start + entry.size_bytes > _MAX_BYTES:
                continue
            try:
                self.artifacts.copy(entry.digest, content)
            except KeyError:
                log.warning("cache entry damaged", space=space, key=key, file=entry.file)
                content.seek(start)
                content.truncate()
            else:
                entries.append((entry, entry.name.signed(entry.digest, keys)))
        self._note(entry for entry, _ in entries)
        return entries, content

    def _note(self, entries: Iterable[CacheEntry]) -> None:
        """Keep in mind that entries were used; written down for many at a time."""
        now = utc_now()
        with self._lock:
            self._used |= {
                one.id for one in entries if (now - one.used_at).total_seconds() > _USED_S
            }
            if not self._used or time.monotonic() - self._written_at < _WRITTEN_S:
                return
            used, self._used, self._written_at = self._used, set(), time.monotonic()
        try:
            with self._writing:
                transaction(self._engine, cache_entries.touch, used)
        except TunaError as error:  # as where the disk is full: what is there is given all the same
            log.warning("use of cache entries not written", error=str(error))


def _check(visitor: Visitor, space: str) -> None:
    """Raise NotFound for a space that the visitor does not reach, as for one that is not there."""
    if visitor.role is not Role.ADMIN and visitor.space != space:
        raise NotFound(f"Unknown space {space[:80]!a}.")


@router.put("/{space}/{key}/{file}", openapi_extra={"requestBody": _BODY})
async def put_entry(
    request: Request, visitor: CacheVisitor, space: str, key: str, file: str
) -> Response:
    """Put a file into a cache: 201, or 200 where the same bytes are there; other bytes are
    refused, and so are lists of files, which may be those of several writers."""
    if visitor.role is Role.ADMIN:
        raise HTTPException(403, "only holders of a token of the space put into it")
    _check(visitor, space)
    name = EntryName(space, key, file)
    if file.startswith(INDEX):
        raise BadInput(
            "The files of a kernel are put as one.",
            hint="install tuna-cache-client where the program runs",
        )
    if int(request.headers.get("content-length", "0")) > MAX_FILE_BYTES:
        raise HTTPException(413, f"the file has more than {MAX_FILE_BYTES >> 20} MiB")
    caches: Caches = request.app.state.caches
    async with caches.receiving(visitor.token):
        upload = await to_thread.run_sync(Upload, MAX_FILE_BYTES)
        try:
            async for part in request.stream():
                upload.write(part)
            facts = name, upload, visitor.token
            new = await to_thread.run_sync(caches.put, *facts, limiter=caches.writing)
        finally:
            with CancelScope(shield=True):  # the visitor may have gone
                await to_thread.run_sync(upload.close)
    return Response(status_code=201 if new else 200, headers={"ETag": f'"{upload.digest}"'})


@router.get("/{space}/{key}/{file}")
async def get_entry(
    request: Request, visitor: CacheVisitor, space: str, key: str, file: str
) -> Response:
    """Return a file of a cache, with its signature."""
    _check(visitor, space)
    EntryName(space, key, file)
    found, content = await _read(request, space, key, [file])
    if not found:
        raise NotFound(f"{space} has no {key}/{file}.")
    ((entry, signature),) = found
    return _sent(content, {"Tuna-Signature": signature, "ETag": f'"{entry.digest}"'})


@router.get("/{space}/{key}")
async def get_entries(
    request: Request,
    visitor: CacheVisitor,
    space: str,
    key: str,
    file: Annotated[list[str], Query(min_length=1, max_length=_MAX_FILES)],
) -> Response:
    """Return those of these files of a key that are there: a line of JSON that names them, then
    their bytes."""
    _check(visitor, space)
    for name in file:
        EntryName(space, key, name)
    entries, content = await _read(request, space, key, list(dict.fromkeys(file)))
    named = [
        {
            "file": entry.file,
            "bytes": entry.size_bytes,
            "sha256": entry.digest,
            "signature": signature,
        }
        for entry, signature in entries
    ]
    return _sent(content, {}, json.dumps(named).encode() + b"\n")


@router.get("/{space}")
def list_entries(
    visitor: CacheVisitor,
    space: str,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    suffix: Annotated[str, Query(max_length=255)] = "",
) -> Response:
    """Return keys of a space, those with a file that ends with `suffix`, with the sizes of their
    files; the key that was put last first."""
    _check(visitor, space)
    access_tokens.check_space(space)
    with reading(open_database()) as connection:
        return answered({"entries": cache_entries.newest(connection, space, limit, suffix)})


async def _read(
    request: Request, space: str, key: str, files: list[str]
) -> tuple[list[tuple[CacheEntry, str]], IO[bytes]]:
    caches: Caches = request.app.state.caches
    return await to_thread.run_sync(caches.read, space, key, files, limiter=caches.reading)


def _sent(content: IO[bytes], headers: dict[str, str], head: bytes = b"") -> Response:
    size_bytes = content.tell()
    content.seek(0)
    if size_bytes <= _IN_MEMORY:
        with content:
            body = head + content.read()
        return Response(body, media_type="application/octet-stream", headers=headers)
    headers["content-length"] = str(len(head) + size_bytes)
    parts = file_parts(content, content.close, head)
    return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)
