"""Server-sent events: the state of sessions and requests, read once a second for all who watch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial

import structlog
from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from tuna import api
from tuna.api.documents import json_text
from tuna.db import server_errors
from tuna.reports.status import LiveSession, Watcher
from tuna.web.visitors import Reader

log = structlog.get_logger(__name__)
router = APIRouter()

#: Between two reads at least, and as a multiple of what one takes, so that a large database is not
#: read all the time.
_EVERY_S, _SHARE = 1.0, 1 / 20
#: A line that keeps proxies from closing a stream.
_ALIVE_S = 15.0


#: Texts by form, by the id of what they are of.
Texts = Mapping[int, Mapping[str, str]]


class Live:
    """The latest state of what somebody watches, in some forms of text; read while somebody
    does."""

    def __init__(self, read: Callable[[Collection[int]], Texts]) -> None:
        """`read` is given the ids that are watched; it may read others too."""
        self._read_texts = read
        self._watched: Counter[int] = Counter()
        self._texts: Texts = {}
        self._changed: asyncio.Condition | None = None
        self._task: asyncio.Task[None] | None = None
        self._viewers = 0
        self._reads = 0  #: counts, so that a viewer knows whether it has seen one

    async def watch(self, number: int, form: str) -> AsyncIterator[str]:
        """Yield the state whenever it changed, and an empty text now and then; ends where what is
        watched is deleted."""
        self._viewers += 1
        self._watched[number] += 1
        if self._changed is None:
            self._changed = asyncio.Condition()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_on(), name="live texts")
        joined, sent, told_at = self._reads, "", time.monotonic()
        try:
            while True:
                await self._next_read()
                text = self._texts.get(number, {}).get(form)
                # the first read may have begun before this viewer came
                if text is None and self._reads > joined + 1:
                    return  # it was deleted
                if text is not None and text != sent:
                    sent, told_at = text, time.monotonic()
                    yield text
                elif time.monotonic() - told_at > _ALIVE_S:
                    told_at = time.monotonic()
                    yield ""
        finally:
            self._viewers -= 1
            self._watched -= Counter((number,))

    async def _next_read(self) -> None:
        assert self._changed is not None
        async with self._changed:
            await self._changed.wait()  # notified after each read, also after a failed one

    async def _read_on(self) -> None:
        """Read until nobody watches."""
        assert self._changed is not None
        while self._viewers:
            began_at = time.monotonic()
            try:
                self._texts = await to_thread.run_sync(self._read_texts, tuple(self._watched))
                self._reads += 1
            except Exception as error:
                level = log.warning if server_errors.is_passing(error) else log.error
                level("live state not read", error=str(error)[:300])
            async with self._changed:
                self._changed.notify_all()
            took_s = time.monotonic() - began_at
            await asyncio.sleep(max(_EVERY_S, took_s / _SHARE) - took_s)


class SessionTexts:
    """Reads the state of all sessions."""

    def __init__(self, forms: Mapping[str, Callable[[LiveSession], str]]) -> None:
        self._watcher: Watcher | None = None
        self._forms = forms

    def __call__(self, _: Collection[int]) -> Texts:
        """Return the texts of all sessions, by id and form."""
        if self._watcher is None:
            self._watcher = api.watcher()
        snapshot = self._watcher.look()
        return {
            one.overview.session_id: {name: form(one) for name, form in self._forms.items()}
            for one in snapshot.sessions
        }


def live_json(live: LiveSession) -> str:
    """Return a session's state, without the moment, so that what stays the same is not sent."""
    document = {
        "overview": live.overview,
        "unfinished": live.unfinished,
        "rate_per_s": round(live.rate_per_s, 2),
        "eta_s": None if live.eta_s is None else round(live.eta_s),
        "totals": live.totals,
    }
    return json_text(document)


@router.get("/v1/sessions/{session_id}/events")
async def session_events(request: Request, _: Reader, session_id: int) -> StreamingResponse:
    """Stream the state of a session whenever it changed, as server-sent events with JSON."""
    return await _stream(request, session_id, "json", "session")


@router.get("/sessions/{session_id}/live", include_in_schema=False)
async def session_live(request: Request, _: Reader, session_id: int) -> StreamingResponse:
    """Stream the same for the session's page."""
    return await _stream(request, session_id, "html", "html")


async def _stream(request: Request, session_id: int, form: str, event: str) -> StreamingResponse:
    await to_thread.run_sync(partial(api.status, session_id, commands=False))  # raises NotFound
    return streamed(request.app.state.live, session_id, form, event)


def streamed(live: Live, number: int, form: str, event: str) -> StreamingResponse:
    """Return the stream of what is watched, which must be there."""

    async def stream() -> AsyncIterator[str]:
        async for text in live.watch(number, form):
            data = "".join(f"data: {line}\n" for line in text.splitlines())
            yield f"event: {event}\n{data}\n" if text else ": alive\n\n"
        yield "event: end\ndata:\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")
