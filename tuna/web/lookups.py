"""Routes that answer what `tuna query`, `coverage`, `session`, `workers` and `golden` say with
`--json`, field by field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from tuna import api, golden
from tuna.api.documents import csv_lines, json_text
from tuna.reports.job_list import JobFilter
from tuna.results.best import MOST_LAYERS
from tuna.results.result_rows import DEFAULT_LIMIT, ResultFilter, moment
from tuna.web.visitors import Anyone, Reader

router = APIRouter(prefix="/v1")
#: Rows of a page at most: 500 kB.
_MOST_ROWS = 500


def answered(document: Any) -> Response:
    """Return an answer in JSON."""
    return Response(json_text(document), media_type="application/json")


class Wanted(BaseModel):
    """The conditions of `tuna query`, and a page."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="a model or network: NAME or NAME@VERSION")
    tag: str | None = None
    layer: str | None = Field(None, description="key, label, driver command or JSON")
    op: str | None = Field(None, description="kind of layer, also at the core of a task")
    shape: list[str] = Field([], description="FIELD=VALUE, or part of the label")
    dtype: str | None = None
    library: str | None = None
    arch: str | None = None
    device: str | None = Field(None, description="text in the name of the device")
    environment: str | None = Field(None, description="key, or its beginning")
    solver: str | None = None
    session_id: int | None = Field(None, ge=1, le=2**31 - 1)
    since: str | None = Field(None, description="2026-03-31, or 7d for seven days ago")
    n_best: int | None = Field(None, ge=1, le=1000, description="trials instead of results")
    limit: int = Field(DEFAULT_LIMIT, ge=1, le=_MOST_ROWS)
    cursor: str = Field("", max_length=4096, description="`next` of the page before")
    format: Literal["json", "csv"] = "json"

    def filter(self) -> ResultFilter:
        """Return the conditions; raises BadInput for a time that is none."""
        given = self.model_dump(exclude={"cursor", "format"})
        given["shape"] = tuple(self.shape)
        given["since"] = moment(self.since) if self.since is not None else None
        return ResultFilter(**given)


@router.get("/query")
def query(_: Reader, wanted: Annotated[Wanted, Query()]) -> Response:
    """Return a page of results, as `tuna query` prints them: `rows`, and `next` for the page behind
    it."""
    rows = api.query(wanted.filter(), cursor=wanted.cursor)
    if wanted.format == "csv":
        more = {"x-next-cursor": rows.cursor} if rows.cursor else {}
        return StreamingResponse(csv_lines(rows), media_type="text/csv", headers=more)
    return answered({"rows": rows.rows, "next": rows.cursor or None})


class BestQuery(BaseModel):
    """Layers, and what they are to run on."""

    model_config = ConfigDict(extra="forbid")

    layers: list[str] = Field(
        min_length=1, max_length=MOST_LAYERS, description="config keys, driver commands or JSON"
    )
    arch: str | None = None
    device: str | None = None
    library: str | None = None


@router.post("/best")
def best_of_many(request: Request, _: Anyone, asked: BestQuery) -> Response:
    """Return for each layer the fastest result that is known (`exact`), that of the most similar
    layer (`near`), or none."""
    found = api.best(**asked.model_dump(), index=request.app.state.layers)
    return answered({"layers": found})


@router.get("/best")
def best(
    request: Request,
    _: Anyone,
    layer: str,
    arch: str | None = None,
    device: str | None = None,
    library: str | None = None,
) -> Response:
    """Return the same for one layer."""
    scope = {"arch": arch, "device": device, "library": library}
    (found,) = api.best([layer], **scope, index=request.app.state.layers)
    return answered(found)


@router.get("/coverage/{name}")
def coverage(
    _: Reader, name: str, arch: str, device: str | None = None, library: str | None = None
) -> Response:
    """Return the part of a model, network or tag that has results on an architecture."""
    return answered(api.coverage(name, arch, device=device, library=library))


@router.get("/sessions")
def sessions(_: Reader) -> Response:
    """Return all sessions, as `tuna status --json` does."""
    return answered(api.status())


@router.get("/sessions/{session_id}")
def session(_: Reader, session_id: int) -> Response:
    """Return one session, as `tuna status --json` does."""
    (found,) = api.status(session_id)
    return answered(found)


class WantedJobs(BaseModel):
    """Conditions on jobs of a session, and a page."""

    model_config = ConfigDict(extra="forbid")

    state: str | None = None
    cause: str | None = Field(None, description="of jobs that failed for good")
    step: str | None = None
    solver: str | None = None
    layer: str | None = Field(None, description="text in the label, or the whole key")
    limit: int = Field(DEFAULT_LIMIT, ge=1, le=_MOST_ROWS)
    cursor: int = Field(0, ge=0, le=2**63 - 1, description="`next` of the page before")

    def of(self, session_id: int) -> JobFilter:
        """Return the conditions on jobs of a session."""
        given = self.model_dump(exclude={"cursor"})
        return JobFilter(session_id, **given, after=self.cursor)


@router.get("/sessions/{session_id}/jobs")
def jobs(_: Reader, session_id: int, wanted: Annotated[WantedJobs, Query()]) -> Response:
    """Return a page of a session's jobs by id."""
    page = api.list_jobs(wanted.of(session_id))
    return answered({"jobs": page.jobs, "next": page.jobs[-1].id if page.more else None})


@router.get("/jobs/{job_id}")
def job(_: Reader, job_id: int) -> Response:
    """Return one job with every attempt and its trials."""
    return answered(api.show_job(job_id))


@router.get("/workers")
def workers(_: Reader) -> Response:
    """Return live workers, and those that joined."""
    return answered(api.list_workers())


@router.get("/golden")
def golden_versions(_: Reader, library: str | None = None) -> Response:
    """Return the golden versions of a library, or of all."""
    with api.reading(api.open_database()) as connection:
        return answered(golden.versions(connection, library))
