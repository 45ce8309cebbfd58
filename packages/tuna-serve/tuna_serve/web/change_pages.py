"""Pages that change something: a question, then the form that it has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Form
from starlette.responses import RedirectResponse, Response

from tuna import api
from tuna.vocabulary import State
from tuna_serve.web import changes
from tuna_serve.web.answers import RowId
from tuna_serve.web.rendering import html_page
from tuna_serve.web.visitors import Admin, Visitor

router = APIRouter(include_in_schema=False)


@router.get("/sessions/{session_id}/retry")
def ask_retry(visitor: Admin, session_id: RowId, cause: str = "") -> Response:
    """Ask before failed jobs are sent back."""
    (found,) = api.status(session_id, commands=False)
    number = found.jobs.get(State.ERRORED.value, 0) + found.searches.parts.get("errored", 0)
    question = f"{number} jobs of session {session_id} failed for good. Send them back?"
    return ask(visitor, question, "Retry", f"/sessions/{session_id}", {"cause": cause})


@router.post("/sessions/{session_id}/retry")
def retry(visitor: Admin, session_id: RowId, cause: Annotated[str, Form()] = "") -> Response:
    """Send failed jobs of a session back."""
    asked = changes.JobsToRetry.model_validate({"cause": cause or None})
    return done(changes.retry_session(visitor, session_id, asked), f"/sessions/{session_id}")


@router.get("/sessions/{session_id}/cancel")
def ask_cancel(visitor: Admin, session_id: RowId) -> Response:
    """Ask before jobs are ended."""
    question = f"End all jobs of session {session_id} that are not finished?"
    return ask(visitor, question, "Cancel them", f"/sessions/{session_id}", danger=True)


@router.post("/sessions/{session_id}/cancel")
def cancel(visitor: Admin, session_id: RowId) -> Response:
    """End jobs of a session."""
    canceled = changes.cancel(visitor, session_id, changes.JobsToCancel())
    return done(canceled, f"/sessions/{session_id}")


@router.get("/sessions/{session_id}/options")
def ask_options(visitor: Admin, session_id: RowId) -> Response:
    """Ask for the priority of a session."""
    (found,) = api.status(session_id, commands=False)
    inputs = [("priority", "Priority, 0 to 9: the highest is served first", found.options.priority)]
    question = f"Options of session {session_id}"
    return ask(visitor, question, "Set", f"/sessions/{session_id}", inputs=inputs)


@router.post("/sessions/{session_id}/options")
def set_options(visitor: Admin, session_id: RowId, priority: Annotated[int, Form()]) -> Response:
    """Set the priority of a session."""
    asked = changes.SessionChange(priority=priority)
    return done(changes.change_session(visitor, session_id, asked), f"/sessions/{session_id}")


@router.get("/jobs/{job_id}/retry")
def ask_retry_job(visitor: Admin, job_id: RowId) -> Response:
    """Ask before a job is sent back."""
    return ask(visitor, f"Send job {job_id} back?", "Retry", f"/jobs/{job_id}")


@router.post("/jobs/{job_id}/retry")
def retry_job(visitor: Admin, job_id: RowId) -> Response:
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
    """Return the page with a question; `back`: where its link leads, `more`: for the template."""
    facts = {"hidden": hidden or {}, "inputs": [], "danger": False, "action": "", **more}
    return html_page(
        "confirm.html.j2", visitor, verb, "", question=question, verb=verb, back=back, **facts
    )


def done(answer: Response, back: str) -> Response:
    """Go back, and tell what came of it."""
    outcome = json.loads(bytes(answer.body))
    told = urlencode({"told": f"Done: {json.dumps(outcome['done'])}"})
    return RedirectResponse(f"{back}?{told}", 303)
