"""Pages for people: what the other routes say, as HTML. Every filter is in the address, tables page
by cursor."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tuna import api
from tuna.configs.sources import api_of
from tuna.db.engine import reading
from tuna.messages import inert
from tuna.reports import formats
from tuna.vocabulary import Cause, State
from tuna_serve.db import audit
from tuna_serve.web import changes
from tuna_serve.web.answers import Paged, RowId
from tuna_serve.web.lookups import (
    ComparisonQuery,
    CoverageQuery,
    EntryQuery,
    JobQuery,
    LayerQuery,
    ResultQuery,
    Version,
)
from tuna_serve.web.visitors import Anyone, Reader, Role, Visitor

router = APIRouter(include_in_schema=False)

_REQUESTS = ("/requests", "Requests")
_PLACES = (
    ("/sessions", "Sessions"),
    _REQUESTS,
    ("/query", "Results"),
    ("/models", "Models"),
    ("/golden", "Golden"),
    ("/workers", "Workers"),
    ("/actions", "Changes"),
)
_STATIC = {"tuna.css": "text/css", "live.js": "text/javascript"}
#: Layers without a result that are shown.
_MOST_LAYERS = 500


@router.get("/")
def front(visitor: Anyone) -> Response:
    """Go to the first page."""
    return RedirectResponse(_places(visitor)[0][0], 303)


@router.get("/static/{name}")
def static(name: Literal["tuna.css", "live.js"]) -> Response:
    """Return a file of the pages; it holds nothing that needs a token."""
    text = (resources.files("tuna_serve.web") / "static" / name).read_bytes()
    return Response(text, media_type=_STATIC[name], headers={"cache-control": "max-age=300"})


@router.get("/sessions")
def sessions(visitor: Reader, wanted: Annotated[Paged, Query()]) -> Response:
    """List sessions."""
    page = api.status_page(wanted.limit, wanted.cursor)
    facts = {"sessions": page.rows, **table_links("/sessions", wanted, page.next)}
    return html_page("sessions.html.j2", visitor, "Sessions", "/sessions", **facts)


@router.get("/sessions/{session_id}")
def session(visitor: Reader, session_id: RowId, told: str = "") -> Response:
    """Show a session; its figures are streamed to it."""
    (found,) = api.status(session_id)
    with reading(api.open_database()) as connection:
        actions = audit.latest(connection, 10, subject=f"session {session_id}")
    title = f"Session {session_id}: {found.reason}"
    facts = {"session": found, "actions": actions.rows, "more": "", "csv": ""}
    return html_page("session.html.j2", visitor, title, "/sessions", told=told[:300], **facts)


@router.get("/sessions/{session_id}/size")
def size(request: Request, visitor: Reader, session_id: RowId) -> Response:
    """Show what a session takes."""
    found = request.app.state.sizes.of(session_id)
    title = f"Size of session {session_id}"
    return html_page("size.html.j2", visitor, title, "/sessions", size=found)


@router.get("/sessions/{session_id}/jobs")
def jobs(visitor: Reader, session_id: RowId, wanted: Annotated[JobQuery, Query()]) -> Response:
    """List jobs of a session."""
    page = wanted.read(session_id, wanted.limit, wanted.cursor)
    facts = {
        "session_id": session_id,
        "jobs": page.rows,
        "wanted": wanted.model_dump(),
        "states": [one.value for one in State],
        "causes": [one.value for one in Cause],
        **table_links(f"/sessions/{session_id}/jobs", wanted, page.next),
    }
    return html_page("jobs.html.j2", visitor, f"Jobs of session {session_id}", "/sessions", **facts)


@router.get("/sessions/{session_id}/results")
def results(visitor: Reader, session_id: RowId, wanted: Annotated[LayerQuery, Query()]) -> Response:
    """List the fastest result of each layer of a session."""
    page = wanted.winners(session_id, wanted.limit, wanted.cursor, with_commands=False)
    place = f"/sessions/{session_id}/results"
    facts = {"rows": page.rows, "filtered": False, **table_links(place, wanted, page.next)}
    title = f"Fastest results of session {session_id}"
    return html_page(
        "query.html.j2", visitor, title, "/sessions", wanted=wanted.model_dump(), **facts
    )


class JobPageQuery(Paged):
    """A page of a job's trials, and what came of a change."""

    told: str = ""


@router.get("/jobs/{job_id}")
def job(visitor: Reader, job_id: RowId, wanted: Annotated[JobPageQuery, Query()]) -> Response:
    """Show a job with every attempt and its trials."""
    found = api.show_job(job_id)
    page = api.list_trials(job_id, wanted.limit, wanted.cursor)
    more = table_links(f"/jobs/{job_id}", wanted, page.next)["more"]
    facts = {"job": found, "trials": page.rows, "more": more, "told": wanted.told[:300]}
    return html_page("job.html.j2", visitor, f"Job {job_id}", "/sessions", **facts)


@router.get("/query")
def query(visitor: Reader, wanted: Annotated[ResultQuery, Query()]) -> Response:
    """List results that meet a filter."""
    found = api.query(wanted.filter(), cursor=wanted.cursor, with_commands=False)
    facts = {
        "rows": found.rows,
        "filtered": True,
        **table_links("/query", wanted, found.cursor or None),
    }
    return html_page(
        "query.html.j2", visitor, "Results", "/query", wanted=wanted.model_dump(), **facts
    )


@router.get("/golden")
def golden_versions(visitor: Reader) -> Response:
    """List golden versions."""
    facts = {"versions": api.golden.versions(), "more": "", "csv": "/v1/golden?format=csv"}
    return html_page("golden.html.j2", visitor, "Golden versions", "/golden", **facts)


@router.get("/golden/{version}/entries")
def golden_entries(
    visitor: Reader, version: Version, wanted: Annotated[EntryQuery, Query()]
) -> Response:
    """List entries of a golden version."""
    page = wanted.read(version, wanted.limit, wanted.cursor)
    facts = {"entries": page.rows, "version": version, "wanted": wanted.model_dump()}
    links = table_links(f"/golden/{version}/entries", wanted, page.next)
    title = f"Golden version {version}"
    return html_page("entries.html.j2", visitor, title, "/golden", **facts, **links)


@router.get("/golden/{version}/explain")
def explain(visitor: Reader, version: Version, key: str, library: str | None = None) -> Response:
    """Show where the entries of a key come from."""
    found = api.golden.explain(version, key, library=library or None)
    title = f"{key[:100]} in golden version {version}"
    return html_page("explain.html.j2", visitor, title, "/golden", found=found)


@router.get("/models")
def models(request: Request, visitor: Reader, name: str = "", arch: str = "") -> Response:
    """List models, with the coverage of one."""
    coverage = None
    if name and arch:
        coverage = CoverageQuery(arch=arch).read(name, request.app.state.layers)
    wanted = {"name": name, "arch": arch}
    csv = f"/v1/coverage/{quote(name)}?{urlencode({'arch': arch, 'format': 'csv'})}"
    facts = {
        "models": api_of("models").list_models(),
        "coverage": coverage,
        "covers": list(api.Cover),
    }
    more = {"wanted": wanted, "csv_of_coverage": csv, "most": _MOST_LAYERS}
    return html_page("models.html.j2", visitor, "Models", "/models", **facts, **more)


@router.get("/models/{name:path}")
def model(visitor: Reader, name: str) -> Response:
    """Show the tasks of a model, and times of it."""
    found, tasks = api_of("models").show_model(name)
    times = api_of("models").list_benchmarks(name)
    title = f"Model {found.name} {found.version[:12]}"
    csv = f"/v1/models/{quote(name)}?format=csv"
    csv_of_times = f"/v1/benchmarks?{urlencode({'model': name, 'format': 'csv'})}"
    facts = {"tasks": tasks, "times": times, "csv": csv, "csv_of_times": csv_of_times}
    return html_page("model.html.j2", visitor, title, "/models", **facts)


@router.get("/workers")
def workers(visitor: Reader, told: str = "") -> Response:
    """List workers."""
    facts = {"workers": api.list_workers(), "csv": "/v1/workers?format=csv"}
    return html_page("workers.html.j2", visitor, "Workers", "/workers", told=told[:300], **facts)


@router.get("/compare")
def compare(visitor: Reader, wanted: Annotated[ComparisonQuery, Query()]) -> Response:
    """Show sessions side by side."""
    found = wanted.read()
    layers = [
        {
            "label": one.label,
            "cells": [
                *(
                    why if best is None else f"{best.time_ms:.4g} {best.solver}"
                    for best, why in zip(one.bests, one.missing, strict=True)
                ),
                *("" if ratio is None else f"{ratio.value:.3f}" for ratio in one.ratios[1:]),
                "" if one.fastest is None else one.fastest,
            ],
        }
        for one in found.layers
    ]
    first, *others = wanted.session_id
    columns = [(f"session {number}, ms", True) for number in wanted.session_id]
    columns += [(f"{number} / {first}", True) for number in others] + [("fastest", True)]
    facts = {"layers": layers, "columns": columns, "compared": found.whole}
    facts |= table_links("/compare", wanted, found.next)
    title = " beside ".join(f"session {number}" for number in wanted.session_id)
    return html_page(
        "compare.html.j2", visitor, title, "/sessions", wanted=wanted.model_dump(), **facts
    )


@router.get("/actions")
def actions(visitor: Reader, wanted: Annotated[changes.ActionQuery, Query()]) -> Response:
    """List what visitors changed."""
    page = wanted.read(wanted.limit, wanted.cursor)
    facts = {"actions": page.rows, **table_links("/actions", wanted, page.next)}
    return html_page("actions.html.j2", visitor, "Changes", "/actions", **facts)


def table_links(place: str, wanted: Paged, following: object) -> dict[str, str]:
    """Return the addresses of the next page, empty if there is none, and of the whole as CSV."""
    without = {"cursor", "format", "told"}
    given = wanted.model_dump(mode="json", exclude=without, exclude_defaults=True)
    more = {**given, "cursor": following}
    return {
        "more": "" if following is None else f"{place}?{urlencode(more, doseq=True)}",
        "csv": f"/v1{place}?{urlencode({**given, 'format': 'csv'}, doseq=True)}",
    }


def html_page(template: str, visitor: Visitor, title: str, place: str, **facts: Any) -> Response:
    may_change = visitor.role is Role.ADMIN
    common = {"visitor": visitor, "title": title, "place": place, "may_change": may_change}
    text = render(template, **{"told": "", "places": _places(visitor), **common, **facts})
    return HTMLResponse(text)


def _places(visitor: Visitor) -> tuple[tuple[str, str], ...]:
    return (_REQUESTS,) if visitor.role is Role.SUBMIT else _PLACES


def refused(request: Request, status: int, error: str, hint: str = "") -> Response:
    """Return the page of an error."""
    # a link from another site comes without the cookie: from this page it is sent
    facts = {"error": error, "hint": hint, "status": status, "then": _own_address(request)}
    common = {"visitor": None, "title": "Not possible", "place": "", "told": ""}
    return HTMLResponse(render("refused.html.j2", **common, **facts), status)


def _own_address(request: Request) -> str:
    query = f"?{request.url.query}" if request.url.query else ""
    return f"{request.url.path}{query}"


def wants_html(request: Request) -> bool:
    """Return whether a browser asks for a page."""
    accepts = request.headers.get("accept", "")
    return not request.url.path.startswith("/v1/") and "text/html" in accepts


def render(template: str, **facts: Any) -> str:
    """Return a template with these facts; every text in it is escaped."""
    return _environment().get_template(template).render({"places": _PLACES, **facts})


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tuna_serve.web", "templates"),
        autoescape=True,
        finalize=lambda value: inert(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = ("percent", "factor", "duration", "moment", "count", "size", "spread")
    filters: dict[str, Callable[..., Any]] = {name: getattr(formats, name) for name in names}
    filters |= {"ms": _milliseconds, "last_line": _last_line, "tojson_text": json.dumps}
    environment.filters.update(filters)
    return environment


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""
