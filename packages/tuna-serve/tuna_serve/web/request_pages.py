"""Pages of requests: the list with a form, and one request that stays up to date."""

from __future__ import annotations

import secrets
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from tuna.vocabulary import RequestState
from tuna_serve.db.requests import TuningRequest
from tuna_serve.settings import service_settings
from tuna_serve.web import submissions
from tuna_serve.web.change_pages import ask, done
from tuna_serve.web.events import streamed
from tuna_serve.web.rendering import html_page, render, table_links
from tuna_serve.web.submissions import RequestId, RequestQuery, find, receive
from tuna_serve.web.visitors import Anyone, Role, Submitter, Visitor

router = APIRouter(include_in_schema=False)
_PLACE = "/requests"


@router.get("/requests")
def list_requests(visitor: Anyone, wanted: Annotated[RequestQuery, Query()]) -> Response:
    """List requests, with a form for another one."""
    page = wanted.read(visitor, wanted.limit, wanted.cursor)
    facts = {
        "requests": page.rows,
        "wanted": wanted.model_dump(mode="json"),
        "states": [state.value for state in RequestState],
        **table_links(_PLACE, wanted, page.next),
        "may_submit": _may_submit(visitor),
        "client_key": secrets.token_hex(16),
        "most_mib": service_settings().request_mib,
    }
    return html_page("requests.html.j2", visitor, "Requests", _PLACE, **facts)


@router.post("/requests")
async def submit(request: Request, visitor: Submitter) -> Response:
    """Take in what the form sends."""
    found, _ = await receive(request, visitor)
    return RedirectResponse(f"/requests/{found.id}", 303)


@router.get("/requests/{request_id}")
def show_request(visitor: Anyone, request_id: RequestId, told: str = "") -> Response:
    """Show a request; its state is streamed to it."""
    found = find(visitor, request_id)
    facts = {"request": found, "told": told[:300], "may_submit": _may_submit(visitor)}
    title = f"Request {request_id}: {found.name}"
    return html_page("request.html.j2", visitor, title, _PLACE, **facts)


@router.get("/requests/{request_id}/live")
async def live(request: Request, visitor: Anyone, request_id: RequestId) -> StreamingResponse:
    """Stream the state of a request for its page."""
    await to_thread.run_sync(find, visitor, request_id)  # raises NotFound
    return streamed(request, request.app.state.live_requests, request_id, "html", "html")


@router.get("/requests/{request_id}/cancel")
def ask_cancel(visitor: Submitter, request_id: RequestId) -> Response:
    """Ask before a request is ended."""
    found = find(visitor, request_id)
    question = f"End the request {found.id}, {found.name}, and the jobs that no other one wants?"
    return ask(visitor, question, "Cancel it", f"/requests/{request_id}", danger=True)


@router.post("/requests/{request_id}/cancel")
def cancel(visitor: Submitter, request_id: RequestId) -> Response:
    """End a request."""
    return done(submissions.cancel_request(visitor, request_id), f"/requests/{request_id}")


@router.get("/requests/{request_id}/delete")
def ask_delete(visitor: Submitter, request_id: RequestId) -> Response:
    """Ask before a request is deleted."""
    found = find(visitor, request_id)
    question = f"Delete the request {found.id}, {found.name}, and its files? Results stay known."
    return ask(visitor, question, "Delete it", f"/requests/{request_id}", danger=True)


@router.post("/requests/{request_id}/delete")
def delete(visitor: Submitter, request_id: RequestId) -> Response:
    """Delete a request that is over."""
    return done(submissions.delete_request(visitor, request_id), _PLACE)


def live_html(found: TuningRequest) -> str:
    """Return what the page of a request shows of its state."""
    return render("live_request.html.j2", request=found)


def _may_submit(visitor: Visitor) -> bool:
    return visitor.role in (Role.SUBMIT, Role.ADMIN)
