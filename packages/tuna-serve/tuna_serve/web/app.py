"""The service as an ASGI application: its routes, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import redis
import sqlalchemy as sa
import structlog
from anyio import CapacityLimiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from kombu.exceptions import OperationalError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from tuna import api
from tuna.api import Settings
from tuna.api.documents import json_text
from tuna.api.rows import MAX_LAYERS, LayerIndex, server_errors
from tuna.common.messages import first_fault
from tuna.common.version import __version__
from tuna.errors import (
    BadInput,
    DatabaseError,
    LibraryMissing,
    NotFound,
    ServiceError,
    StorageFull,
    TunaError,
)
from tuna.reports.prometheus import Collector
from tuna_serve.db.cache_entries import CacheFull
from tuna_serve.requests.asked import LimitReached
from tuna_serve.requests.uploads import UploadTooLarge
from tuna_serve.web import (
    change_pages,
    changes,
    events,
    golden,
    lookups,
    machine,
    pages,
    rendering,
    request_pages,
    spaces,
    submissions,
    twins,
)
from tuna_serve.web.batches import Batches, Shared
from tuna_serve.web.guard import BodyTooLarge, Guard
from tuna_serve.web.visitors import Visitors

log = structlog.get_logger(__name__)

#: HTTP status of errors that a visitor can act on; of a class that is not named, its base's.
_STATUS: dict[type[TunaError], int] = {
    NotFound: 404,
    UploadTooLarge: 413,
    BadInput: 422,
    LimitReached: 429,
    CacheFull: 429,
    LibraryMissing: 501,
    DatabaseError: 503,
    ServiceError: 503,
    StorageFull: 507,
    TunaError: 409,
}
#: Submissions that are looked at, at a time: pages have the other threads.
_SUBMITTING = 3


@dataclass(frozen=True)
class Site:
    """The database, the settings and the addresses of a service."""

    engine: sa.Engine
    settings: Settings
    origins: Sequence[str]  #: URLs of the service, such as `https://host:port`


def create_app(site: Site) -> ASGIApp:
    """Return the application."""
    app = FastAPI(
        title="Tuna",
        version=__version__,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    app.state.site = site
    app.state.visitors = Visitors(site.engine)
    collector = Collector(site.engine, site.settings)
    app.state.shared = Shared()
    app.state.scrape = partial(app.state.shared.ask, "/metrics", collector.scrape)
    app.state.layers = index = LayerIndex()
    app.state.best = Batches(
        lambda layers, **scope: api.best(layers, index=index, **scope), MAX_LAYERS
    )
    app.state.sizes = lookups.Sizes()
    app.state.session_texts = events.SessionTexts(
        site.engine,
        {
            "json": events.live_json,
            "html": lambda live: rendering.render("live.html.j2", live=live),
        },
    )
    app.state.live = events.Live(app.state.session_texts)
    app.state.live_requests = events.Live(
        partial(submissions.request_texts, {"json": json_text, "html": request_pages.live_html})
    )
    app.state.receiving = set()
    app.state.submitting = CapacityLimiter(_SUBMITTING)
    app.state.caches = spaces.Caches(site.engine)
    answers = (machine, lookups, golden, changes, events, submissions, spaces)
    for module in answers:
        app.include_router(module.router)
    app.include_router(twins.answers)
    for router in (request_pages.router, twins.pages, pages.router, change_pages.router):
        app.include_router(router)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return Guard(app, site.origins, site.engine, (*submissions.UPLOADS, spaces.UPLOADS))


def _sentence(request: Request, status: int, error: str, hint: str = "") -> Response:
    if rendering.wants_html(request):
        return rendering.refused(request, status, error, hint)
    body = {"error": error, "hint": hint} if hint else {"error": error}
    return JSONResponse(body, status)


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, TunaError)
    status = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
    return _sentence(request, status, str(error), error.hint)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _sentence(request, error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _sentence(request, 422, first_fault(error.errors())[:500])


async def _too_large(request: Request, _error: Exception) -> Response:
    return _sentence(request, 413, "the body is larger than it said")


async def _gone(request: Request, _error: Exception) -> Response:
    log.warning("visitor gave up", method=request.method, route=request.scope["route"].path)
    return Response(status_code=400)  # which nobody reads


async def _failed(request: Request, error: Exception) -> Response:
    if server_errors.is_passing(error):
        return _sentence(request, 503, "a server is not available")
    log.error("request failed", error=type(error).__name__, exc_info=error)
    return _sentence(request, 500, "the service failed")


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    TunaError: _told,
    HTTPException: _refused,
    RequestValidationError: _invalid,
    BodyTooLarge: _too_large,
    ClientDisconnect: _gone,
    redis.RedisError: _failed,
    OperationalError: _failed,
    SQLAlchemyError: _failed,
    Exception: _failed,
}
