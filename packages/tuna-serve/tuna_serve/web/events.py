"""Server-sent events: the state of sessions and requests, read once a second for all who watch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import sqlalchemy as sa
import structlog
from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from tuna import api
from tuna.api import DeviceFigures, LiveSession, Watcher
from tuna.api.documents import json_text, live_document
from tuna.api.rows import Changes, server_errors
from tuna_serve.web.answers import RowId
from tuna_serve.web.visitors import Reader

log = structlog.get_logger(__name__)
router = APIRouter()

#: Between two reads at least; as a multiple of what one takes, so that a large database is not read
#: all the time; and at most, so that a change is seen soon.
_EVERY_S, _SHARE, _MAX_S = 1.0, 1 / 30, 1.8
#: A database that did not change for a while, so that rates have come down to zero, is read now and
#: then alone.
_SETTLED_S, _IDLE_S = 70.0, 15.0
#: A line that keeps proxies from closing a stream.
_ALIVE_S = 15.0


#: Texts by form, by the id of what they are of.
Texts = Mapping[int, Mapping[str, str]]


class Live:
    """The latest state of what somebody watches, in some forms of text; read once for all who
    do."""

    def __init__(self, read: Callable[[frozenset[int]], Texts | None]) -> None:
        """`read` returns the texts of those that are there of these ids, or None where all were
        read before and nothing has changed."""
        self._read = read
        #: Of the latest read, kept for who comes back; None: it is not there.
        self._texts: dict[int, Mapping[str, str] | None] = {}
        self._read_again = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._viewers = Counter[int]()  #: number of viewers of each id

    async def watch(self, number: int, form: str) -> AsyncIterator[str | None]:
        """Yield the state where it changed, else None, about once a second; ends where what is
        watched is deleted."""
        self._viewers[number] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_on(), name="live texts")
        sent = ""
        try:
            while True:
                if number in self._texts:
                    found = self._texts[number]
                    if found is None:
                        return
                    yield found[form] if found[form] != sent else None
                    sent = found[form]
                await self._read_again.wait()  # set after each read, also after a failed one
        finally:
            self._viewers[number] -= 1
            if not self._viewers[number]:
                del self._viewers[number]

    async def _read_on(self) -> None:
        """Read until nobody watches."""
        while self._viewers:
            began_at = time.monotonic()
            try:
                wanted = frozenset(self._viewers)
                texts = await to_thread.run_sync(self._read, wanted)
                if texts is not None:
                    self._texts = {one: texts.get(one) for one in wanted}
            except Exception as error:
                level = log.warning if server_errors.is_passing(error) else log.error
                level("live state not read", error=str(error)[:300])
            self._read_again.set()
            self._read_again = asyncio.Event()
            took_s = time.monotonic() - began_at
            await asyncio.sleep(max(_EVERY_S, min(took_s / _SHARE, _MAX_S)) - took_s)


class SessionTexts:
    """Reads the state of sessions."""

    def __init__(
        self, engine: sa.Engine, forms: Mapping[str, Callable[[LiveSession], str]]
    ) -> None:
        self._forms = forms
        self._watcher: Watcher | None = None
        self._changes = Changes(engine)
        self._of: frozenset[int] = frozenset()  #: sessions of the last read
        self._read_at = 0.0

    def __call__(self, watched: frozenset[int]) -> Texts | None:
        """Return the texts of sessions, by id and form; None where nothing has changed."""
        now = time.monotonic()
        unchanged_s = self._changes.unchanged_s()
        if watched <= self._of and unchanged_s > _SETTLED_S and now - self._read_at < _IDLE_S:
            return None
        found = {
            one.overview.session_id: {name: form(one) for name, form in self._forms.items()}
            for one in self._watching().look(session_ids=watched).sessions
        }
        self._of, self._read_at = watched, now
        return found

    def devices(self, session_id: int) -> Sequence[DeviceFigures]:
        """The use of each device of a session; raises NotFound, or ServiceError while the history
        is being read."""
        return self._watching().devices(session_id)

    def _watching(self) -> Watcher:
        if self._watcher is None:
            self._watcher = api.watcher()
        return self._watcher


def live_json(live: LiveSession) -> str:
    """Return a session's state as `tuna status --watch --json` has it; rates and times are rounded,
    so that what stays the same is not sent."""
    document = live_document(live)
    document["rate_per_s"] = round(live.rate_per_s, 2)
    document["eta_s"] = None if live.eta_s is None else round(live.eta_s)
    return json_text(document)


@router.get("/v1/sessions/{session_id}/events")
async def session_events(request: Request, _: Reader, session_id: RowId) -> StreamingResponse:
    """Stream the state of a session whenever it changed, as server-sent events with JSON."""
    return await _stream(request, session_id, "json", "session")


@router.get("/sessions/{session_id}/live", include_in_schema=False)
async def session_live(request: Request, _: Reader, session_id: RowId) -> StreamingResponse:
    """Stream the same for the session's page."""
    return await _stream(request, session_id, "html", "html")


async def _stream(request: Request, session_id: int, form: str, event: str) -> StreamingResponse:
    await to_thread.run_sync(api.require_session, session_id)
    return streamed(request, request.app.state.live, session_id, form, event)


def streamed(request: Request, live: Live, number: int, form: str, event: str) -> StreamingResponse:
    """Return the stream of what is watched, which must be there; it ends with its token."""

    async def stream() -> AsyncIterator[str]:
        told_at, visitors = time.monotonic(), request.app.state.visitors
        visitor = await visitors.visitor(request)
        async for text in live.watch(number, form):
            if visitor is None or await visitors.valid(visitor.token) is None:
                break  # revoked, or expired
            if text is None and time.monotonic() - told_at < _ALIVE_S:
                continue
            told_at = time.monotonic()
            data = "".join(f"data: {line}\n" for line in (text or "").splitlines())
            yield f"event: {event}\n{data}\n" if text else ": alive\n\n"
        yield "event: end\ndata:\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")
