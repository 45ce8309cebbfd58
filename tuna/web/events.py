"""Server-sent events: the state of sessions, read once a second for all who watch."""

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
from tuna.api.documents import json_text, live_document
from tuna.db import server_errors
from tuna.db.engine import Changes
from tuna.reports.report_data import DeviceFigures
from tuna.reports.status import LiveSession, Watcher
from tuna.web.answers import RowId
from tuna.web.visitors import Reader

log = structlog.get_logger(__name__)
router = APIRouter()

#: Between two reads at least; as a multiple of what one takes, so that a large database is not read
#: all the time; and at most, so that a change is seen soon.
_EVERY_S, _SHARE, _AT_MOST_S = 1.0, 1 / 20, 1.8
#: A database that did not change for a while, so that rates have come down to zero, is read now and
#: then alone.
_SETTLED_S, _IDLE_S = 70.0, 15.0
#: A line that keeps proxies from closing a stream.
_ALIVE_S = 15.0


class LiveSessions:
    """The latest state of each session that somebody watches, in some forms of text; read once for
    all who do."""

    def __init__(
        self, engine: sa.Engine, forms: Mapping[str, Callable[[LiveSession], str]]
    ) -> None:
        self._engine = engine
        self._forms = forms
        self._watcher: Watcher | None = None
        self._changes = Changes(engine)
        self._texts: dict[int, dict[str, str] | None] = {}  #: None: the session is not there
        self._ticked: asyncio.Condition | None = None
        self._task: asyncio.Task[None] | None = None
        self._viewers = Counter[int]()  #: by session
        self._of: frozenset[int] = frozenset()  #: sessions of the last read
        self._read_at = 0.0

    async def watch(self, session_id: int, form: str) -> AsyncIterator[str | None]:
        """Yield the state of a session where it changed, else None, about once a second; ends where
        the session is deleted."""
        if self._ticked is None:
            self._ticked = asyncio.Condition()
        self._viewers[session_id] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_on(self._ticked), name="live sessions")
        sent = ""
        try:
            while True:
                if session_id in self._texts:
                    found = self._texts[session_id]
                    if found is None:
                        return
                    yield found[form] if found[form] != sent else None
                    sent = found[form]
                async with self._ticked:
                    await self._ticked.wait()  # notified after each read, also after a failed one
        finally:
            self._viewers[session_id] -= 1
            if not self._viewers[session_id]:
                del self._viewers[session_id]
                self._texts.pop(session_id, None)

    def devices(self, session_id: int) -> Sequence[DeviceFigures]:
        """The use of each device of a session; raises NotFound, or ServiceError while the history
        is being read."""
        return self._watching().devices(session_id)

    def _watching(self) -> Watcher:
        if self._watcher is None:
            self._watcher = api.watcher()
        return self._watcher

    async def _read_on(self, ticked: asyncio.Condition) -> None:
        """Read until nobody watches."""
        while self._viewers:
            began_at = time.monotonic()
            try:
                texts = await to_thread.run_sync(self._read, frozenset(self._viewers))
                self._texts |= {one: text for one, text in texts.items() if one in self._viewers}
            except Exception as error:
                level = log.warning if server_errors.is_passing(error) else log.error
                level("live state not read", error=str(error)[:300])
            async with ticked:
                ticked.notify_all()
            took_s = time.monotonic() - began_at
            await asyncio.sleep(max(_EVERY_S, min(took_s / _SHARE, _AT_MOST_S)) - took_s)

    def _read(self, wanted: frozenset[int]) -> dict[int, dict[str, str] | None]:
        """Return the texts of these sessions; nothing where the same were read and nothing has
        changed."""
        now = time.monotonic()
        unchanged_s = self._changes.unchanged_s()
        if wanted <= self._of and unchanged_s > _SETTLED_S and now - self._read_at < _IDLE_S:
            return {}
        found = {
            one.overview.session_id: {name: form(one) for name, form in self._forms.items()}
            for one in self._watching().look(session_ids=wanted).sessions
        }
        self._of, self._read_at = wanted, now
        return {one: found.get(one) for one in wanted}


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

    async def stream() -> AsyncIterator[str]:
        told_at = time.monotonic()
        async for text in request.app.state.live.watch(session_id, form):
            if await request.app.state.visitors.visitor(request) is None:
                break  # revoked, or expired
            if text is None and time.monotonic() - told_at < _ALIVE_S:
                continue
            told_at = time.monotonic()
            data = "".join(f"data: {line}\n" for line in (text or "").splitlines())
            yield f"event: {event}\n{data}\n" if text else ": alive\n\n"
        yield "event: end\ndata:\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")
