"""Pages that say more than one lookup; the others are made from lookups (`twins.py`). Every filter
is in the address, tables page by cursor."""

from __future__ import annotations

from importlib import resources
from typing import Annotated, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from tuna import api
from tuna.api.rows import reading
from tuna.configs.sources import api_of
from tuna_serve.db import audit
from tuna_serve.web.answers import Paged, RowId
from tuna_serve.web.lookups import CoverageQuery
from tuna_serve.web.rendering import html_page, places, table_links
from tuna_serve.web.visitors import Anyone, Reader

router = APIRouter(include_in_schema=False)

_STATIC = {"tuna.css": "text/css", "live.js": "text/javascript"}
#: Layers without a result that are shown.
_MAX_LAYERS = 500


@router.get("/")
def front(visitor: Anyone) -> Response:
    """Go to the first page."""
    return RedirectResponse(places(visitor)[0][0], 303)


@router.get("/static/{name}")
def static(name: Literal["tuna.css", "live.js"]) -> Response:
    """Return a file of the pages; it holds nothing that needs a token."""
    text = (resources.files("tuna_serve.web") / "static" / name).read_bytes()
    return Response(text, media_type=_STATIC[name], headers={"cache-control": "max-age=300"})


@router.get("/sessions/{session_id}")
def session(visitor: Reader, session_id: RowId, told: str = "") -> Response:
    """Show a session; its figures are streamed to it."""
    (found,) = api.status(session_id)
    with reading(api.open_database()) as connection:
        actions = audit.latest(connection, 10, subject=f"session {session_id}")
    title = f"Session {session_id}: {found.reason}"
    facts = {"session": found, "actions": actions.rows, "more": "", "csv": ""}
    return html_page("session.html.j2", visitor, title, "/sessions", told=told[:300], **facts)


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
    more = {"wanted": wanted, "csv_of_coverage": csv, "most": _MAX_LAYERS}
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
