"""Pages for people: what the other routes say, as HTML. Every filter is in the address, tables page
by cursor, and what changes something is asked twice."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Query, Request
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tuna import api, golden
from tuna.db import audit
from tuna.db.engine import reading
from tuna.messages import inert
from tuna.reports import formats
from tuna.vocabulary import Cause, State
from tuna.web import changes
from tuna.web.lookups import Wanted, WantedJobs
from tuna.web.visitors import Admin, Anyone, Reader, Role, Visitor

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
#: Layers of a comparison that are shown.
_MOST_COMPARED = 500


@router.get("/")
def front(visitor: Anyone) -> Response:
    """Go to the first page."""
    return RedirectResponse(_places(visitor)[0][0], 303)


@router.get("/static/{name}")
def static(name: Literal["tuna.css", "live.js"]) -> Response:
    """Return a file of the pages; it holds nothing that needs a token."""
    text = resources.files("tuna.web").joinpath("static", name).read_bytes()
    return Response(text, media_type=_STATIC[name], headers={"cache-control": "max-age=300"})


@router.get("/sessions")
def sessions(visitor: Reader) -> Response:
    """List sessions."""
    return html_page("sessions.html.j2", visitor, "Sessions", "/sessions", sessions=api.status())


@router.get("/sessions/{session_id}")
def session(visitor: Reader, session_id: int, told: str = "") -> Response:
    """Show a session; its figures are streamed to it."""
    (found,) = api.status(session_id)
    with reading(api.open_database()) as connection:
        actions = audit.latest(connection, 10, subject=f"session {session_id}")
    title = f"Session {session_id}: {found.reason}"
    facts = {"session": found, "actions": actions, "more": "", "told": told[:300]}
    return html_page("session.html.j2", visitor, title, "/sessions", **facts)


@router.get("/sessions/{session_id}/jobs")
def jobs(visitor: Reader, session_id: int, wanted: Annotated[WantedJobs, Query()]) -> Response:
    """List jobs of a session."""
    page = api.list_jobs(wanted.of(session_id))
    place = f"/sessions/{session_id}/jobs"
    facts = {
        "session_id": session_id,
        "page": page,
        "wanted": wanted.model_dump(),
        "states": [one.value for one in State],
        "causes": [one.value for one in Cause],
        "more": next_page(place, wanted, page.jobs[-1].id if page.more else None),
        "csv": "",
    }
    return html_page("jobs.html.j2", visitor, f"Jobs of session {session_id}", "/sessions", **facts)


@router.get("/jobs/{job_id}")
def job(visitor: Reader, job_id: int, told: str = "") -> Response:
    """Show a job with every attempt and its trials."""
    found = api.show_job(job_id)
    return html_page(
        "job.html.j2", visitor, f"Job {job_id}", "/sessions", job=found, told=told[:300]
    )


@router.get("/query")
def query(visitor: Reader, wanted: Annotated[Wanted, Query()]) -> Response:
    """List results that meet a filter."""
    given = wanted.model_copy(
        update={name: None for name, value in wanted.model_dump().items() if value == ""}
        | {"cursor": wanted.cursor}
    )
    rows = api.query(given.filter(), cursor=wanted.cursor, with_commands=False)
    facts = {
        "rows": rows.rows,
        "wanted": given.model_dump(),
        "more": next_page("/query", given, rows.cursor or None),
        "csv": next_page("/v1/query", given, "", format="csv"),
    }
    return html_page("query.html.j2", visitor, "Results", "/query", **facts)


@router.get("/golden")
def golden_versions(visitor: Reader) -> Response:
    """List golden versions."""
    with reading(api.open_database()) as connection:
        found = golden.versions(connection)
    return html_page("golden.html.j2", visitor, "Golden versions", "/golden", versions=found)


@router.get("/models")
def models(visitor: Reader, name: str = "", arch: str = "") -> Response:
    """List models, with the coverage of one."""
    coverage = api.coverage(name, arch) if name and arch else None
    facts = {"models": api.list_models(), "coverage": coverage, "covers": list(api.Cover)}
    wanted = {"name": name, "arch": arch}
    return html_page("models.html.j2", visitor, "Models", "/models", wanted=wanted, **facts)


@router.get("/workers")
def workers(visitor: Reader, told: str = "") -> Response:
    """List workers."""
    found = api.list_workers()
    return html_page(
        "workers.html.j2", visitor, "Workers", "/workers", workers=found, told=told[:300]
    )


@router.get("/compare")
def compare(visitor: Reader, left: int, right: int) -> Response:
    """Show two sessions side by side."""
    found = api.compare_sessions([left, right])
    layers = [
        {
            "label": one.label,
            "cells": [
                *(
                    "" if best is None else f"{best.time_ms:.4g} {best.solver}"
                    for best in one.bests
                ),
                "" if one.ratios[1] is None else f"{one.ratios[1].value:.3f}",
                "" if one.fastest is None else one.fastest,
            ],
        }
        for one in found.layers[:_MOST_COMPARED]
    ]
    columns = [(f"session {left}, ms", True), (f"session {right}, ms", True)]
    columns += [("ratio", True), ("faster", True)]
    facts = {"layers": layers, "columns": columns, "compared": found}
    title = f"Session {left} beside session {right}"
    wanted = {"left": left, "right": right}
    return html_page("compare.html.j2", visitor, title, "/sessions", wanted=wanted, **facts)


@router.get("/actions")
def actions(visitor: Reader, cursor: int | None = None) -> Response:
    """List what visitors changed."""
    with reading(api.open_database()) as connection:
        found = audit.latest(connection, 101, cursor)
    more = f"/actions?cursor={found[99].id}" if len(found) > 100 else ""
    return html_page(
        "actions.html.j2", visitor, "Changes", "/actions", actions=found[:100], more=more
    )


# -- what changes something: a question, then the form that it has


@router.get("/sessions/{session_id}/retry")
def ask_retry(visitor: Admin, session_id: int, cause: str = "") -> Response:
    """Ask before failed jobs are sent back."""
    (found,) = api.status(session_id, commands=False)
    number = found.jobs.get(State.ERRORED.value, 0) + found.searches.parts.get("errored", 0)
    question = f"{number} jobs of session {session_id} failed for good. Send them back?"
    return ask(visitor, question, "Retry", f"/sessions/{session_id}", {"cause": cause})


@router.post("/sessions/{session_id}/retry")
def retry(visitor: Admin, session_id: int, cause: Annotated[str, Form()] = "") -> Response:
    """Send failed jobs of a session back."""
    asked = changes.Retried.model_validate({"cause": cause or None})
    return done(changes.retry_session(visitor, session_id, asked), f"/sessions/{session_id}")


@router.get("/sessions/{session_id}/cancel")
def ask_cancel(visitor: Admin, session_id: int) -> Response:
    """Ask before jobs are ended."""
    question = f"End all jobs of session {session_id} that are not finished?"
    return ask(visitor, question, "Cancel them", f"/sessions/{session_id}", danger=True)


@router.post("/sessions/{session_id}/cancel")
def cancel(visitor: Admin, session_id: int) -> Response:
    """End jobs of a session."""
    canceled = changes.cancel(visitor, session_id, changes.Canceled())
    return done(canceled, f"/sessions/{session_id}")


@router.get("/sessions/{session_id}/options")
def ask_options(visitor: Admin, session_id: int) -> Response:
    """Ask for the priority of a session."""
    (found,) = api.status(session_id, commands=False)
    inputs = [("priority", "Priority, 0 to 9: the highest is served first", found.options.priority)]
    question = f"Options of session {session_id}"
    return ask(visitor, question, "Set", f"/sessions/{session_id}", inputs=inputs)


@router.post("/sessions/{session_id}/options")
def set_options(visitor: Admin, session_id: int, priority: Annotated[int, Form()]) -> Response:
    """Set the priority of a session."""
    asked = changes.SessionChange(priority=priority)
    return done(changes.change_session(visitor, session_id, asked), f"/sessions/{session_id}")


@router.get("/jobs/{job_id}/retry")
def ask_retry_job(visitor: Admin, job_id: int) -> Response:
    """Ask before a job is sent back."""
    return ask(visitor, f"Send job {job_id} back?", "Retry", f"/jobs/{job_id}")


@router.post("/jobs/{job_id}/retry")
def retry_job(visitor: Admin, job_id: int) -> Response:
    """Send a failed job back."""
    return done(changes.retry_job(visitor, job_id), f"/jobs/{job_id}")


@router.get("/workers/{name}/{state}")
def ask_worker(visitor: Admin, name: str, state: Literal["active", "cordoned"]) -> Response:
    """Ask before a worker is cordoned, or takes work again."""
    verb = "Cordon" if state == "cordoned" else "Uncordon"
    question = f"{verb} the worker {name}? A cordoned one takes nothing new."
    return ask(visitor, question, verb, "/workers", action=f"/workers/{name}/{state}")


@router.post("/workers/{name}/{state}")
def change_worker(visitor: Admin, name: str, state: Literal["active", "cordoned"]) -> Response:
    """Cordon a worker, or let it take work again."""
    return done(changes.change_worker(visitor, name, state), "/workers")


def ask(
    visitor: Visitor,
    question: str,
    verb: str,
    back: str,
    hidden: Mapping[str, str] | None = None,
    **more: Any,
) -> Response:
    facts = {"hidden": hidden or {}, "inputs": [], "danger": False, "action": "", **more}
    return html_page(
        "confirm.html.j2", visitor, verb, "", question=question, verb=verb, back=back, **facts
    )


def done(answer: Response, back: str) -> Response:
    outcome = json.loads(bytes(answer.body))
    told = urlencode({"told": f"Done: {json.dumps(outcome['done'])}"})
    return RedirectResponse(f"{back}?{told}", 303)


def next_page(place: str, wanted: Any, cursor: object, **more: object) -> str:
    """Return the address of a page with this cursor; empty without one."""
    if cursor is None:
        return ""
    given = wanted.model_dump(exclude={"cursor", "format"}, exclude_defaults=True) | more
    given = {name: value for name, value in given.items() if value not in (None, "")}
    return f"{place}?{urlencode({**given, **({'cursor': cursor} if cursor else {})}, doseq=True)}"


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
        loader=PackageLoader("tuna.web", "templates"),
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
