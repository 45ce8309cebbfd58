"""Routes that change something; who asked for it, and what came of it, is kept."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tuna import api
from tuna.api.rows import RowPage, reading, writing
from tuna.errors import TunaError
from tuna.vocabulary import Cause
from tuna_serve.db import audit
from tuna_serve.web.answers import LARGEST_ID, Paged, RowId, answered
from tuna_serve.web.twins import Twin, listing, twin
from tuna_serve.web.visitors import Admin, Visitor

router = APIRouter(prefix="/v1")


def kept(
    visitor: Visitor, what: str, subject: str, asked: dict[str, Any], act: Callable[[], Any]
) -> Response:
    """Return what came of an action, which is kept with who asked for it, also where it failed."""
    engine = api.open_database()
    with writing(engine) as connection:
        action = audit.add(connection, visitor.token, what, subject, asked)
    outcome: dict[str, Any] = {"refused": "the service ended meanwhile"}
    try:
        outcome = {"done": act()}
    except TunaError as error:
        outcome = {"refused": str(error)}
        raise
    finally:
        with writing(engine) as connection:
            audit.set_details(connection, action, {**asked, **outcome})
    return answered({"action": action, **outcome})


class JobsToRetry(BaseModel):
    """Jobs of a session that failed for good."""

    model_config = ConfigDict(extra="forbid")

    cause: Cause | None = Field(None, description="only those that failed for it; default: all")


@router.post("/sessions/{session_id}/retry")
def retry_session(visitor: Admin, session_id: RowId, asked: JobsToRetry) -> Response:
    """Send errored jobs of a session back to the step that failed."""
    cause = asked.cause.value if asked.cause else None
    subject, given = f"session {session_id}", {"cause": cause} if cause else {}
    return kept(visitor, "retry", subject, given, lambda: api.retry(session_id, cause=cause))


@router.post("/jobs/{job_id}/retry")
def retry_job(visitor: Admin, job_id: RowId) -> Response:
    """Send an errored job back to the step that failed."""
    session_id = api.show_job(job_id).session_id
    return kept(visitor, "retry", f"job {job_id}", {}, lambda: api.retry(session_id, jobs=[job_id]))


class JobsToCancel(BaseModel):
    """Jobs of a session that are not finished."""

    model_config = ConfigDict(extra="forbid")

    tag: str | None = Field(None, description="only those of layers with it")
    jobs: list[Annotated[int, Field(ge=1, le=LARGEST_ID)]] = Field(
        [], max_length=10_000, description="only these"
    )


@router.post("/sessions/{session_id}/cancel")
def cancel(visitor: Admin, session_id: RowId, asked: JobsToCancel) -> Response:
    """End jobs that are not finished."""
    given = asked.model_dump(exclude_defaults=True)

    def act() -> Any:
        return dict(api.cancel(session_id, jobs=asked.jobs, tag=asked.tag).states)

    return kept(visitor, "cancel", f"session {session_id}", given, act)


class SessionChange(BaseModel):
    """Options of a session that its coordinators go by."""

    model_config = ConfigDict(extra="forbid")

    priority: int | None = Field(None, ge=-1000, le=1000)
    deadline: datetime | None = None


@router.patch("/sessions/{session_id}")
def change_session(visitor: Admin, session_id: RowId, asked: SessionChange) -> Response:
    """Set options of a session."""
    given = asked.model_dump(exclude_unset=True)

    def act() -> Any:
        return api.set_session(session_id, **given).model_dump(mode="json")

    shown = asked.model_dump(mode="json", exclude_unset=True)
    return kept(visitor, "options", f"session {session_id}", shown, act)


@router.post("/workers/{name}/{state}")
def change_worker(
    visitor: Admin, name: str, state: Literal["active", "cordoned", "draining", "revoked"]
) -> Response:
    """Set the state of a worker, as `tuna workers cordon` and others do."""
    return kept(visitor, state, f"worker {name}", {}, lambda: api.set_worker_state(name, state))


class ActionQuery(Paged):
    """A page of changes, the newest first."""

    subject: str | None = Field(None, description="as `session 3`")

    def read(self, limit: int, before: int) -> RowPage[Any]:
        """Return changes behind a cursor."""
        with reading(api.open_database()) as connection:
            return audit.latest(connection, limit, before or None, self.subject)


@twin("/actions", "/actions")
def actions(wanted: Annotated[ActionQuery, Query()]) -> Twin:
    """Return what visitors changed, the newest first."""
    return listing("actions", wanted, wanted.read, "actions.html.j2", "Changes")
