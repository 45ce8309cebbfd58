"""Routes that answer what `tuna query`, `results`, `coverage`, `status`, `session`, `report`,
`compare`, `model` and `workers` say with `--json`, field by field. A `twin` is a page too."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tuna import api
from tuna.api import JobFilter
from tuna.api.documents import overview_documents, size_document
from tuna.api.rows import MAX_LAYERS, LayerIndex, ResultFilter, RowPage, moment
from tuna.configs.sources import api_of
from tuna.vocabulary import Cause, State
from tuna_serve.web.answers import Format, Number, Paged, RowId, answered, table
from tuna_serve.web.rendering import table_links
from tuna_serve.web.twins import Twin, listing, twin
from tuna_serve.web.visitors import Anyone, Reader

router = APIRouter(prefix="/v1")
#: Jobs of a session that is reported, and layers of sessions that are compared.
_MAX_REPORTED, _MAX_COMPARED = 500, 2000
#: Layers of a tag whose coverage is asked for.
_MAX_COVERED = 2000
#: Sizes are counted again after this: to do so reads each trial.
_SIZES_S = 60.0


class ResultQuery(Paged):
    """The conditions of `tuna query`, and a page."""

    cursor: str = Field("", max_length=4096)  # type: ignore[assignment]
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

    def filter(self, limit: int | None = None) -> ResultFilter:
        """Return the conditions; raises BadInput for a time that is none."""
        given = self.model_dump(exclude={"cursor", "format"})
        given["shape"] = tuple(self.shape)
        given["since"] = moment(self.since) if self.since is not None else None
        given["limit"] = limit or self.limit
        return ResultFilter(**given)


@twin("/query", "/query")
def query(wanted: Annotated[ResultQuery, Query()]) -> Twin:
    """Return results, as `tuna query` has them."""

    def read(limit: int, cursor: Any, *, with_commands: bool = True) -> RowPage[Any]:
        found = api.query(wanted.filter(limit), cursor=cursor, with_commands=with_commands)
        return RowPage(found.rows, found.cursor or None)

    shown = partial(read, with_commands=False)
    return listing(
        "rows", wanted, read, "query.html.j2", "Results", shown=shown, facts={"filtered": True}
    )


class BestQuery(BaseModel):
    """Layers, and what they are to run on."""

    model_config = ConfigDict(extra="forbid")

    layers: list[str] = Field(
        min_length=1, max_length=MAX_LAYERS, description="config keys, driver commands or JSON"
    )
    arch: str | None = None
    device: str | None = None
    library: str | None = None
    predict: bool = Field(False, description="a prediction for a layer that was not measured")


@router.post("/best")
def best_of_many(request: Request, _: Anyone, asked: BestQuery) -> Response:
    """Return for each layer the fastest result that is known (`exact`), a prediction if that is
    asked for (`predicted`), the result of the most similar layer (`near`), or none."""
    found = api.best(**asked.model_dump(), index=request.app.state.layers)
    return answered({"layers": found})


@router.get("/best")
async def best(
    request: Request,
    _: Anyone,
    layer: str,
    arch: str | None = None,
    device: str | None = None,
    library: str | None = None,
    predict: bool = False,
) -> Response:
    """Return the same for one layer."""
    scope = {"arch": arch, "device": device, "library": library}
    return answered(await request.app.state.best.ask(layer, predict=predict, **scope))


class CoverageQuery(Paged):
    """An environment to cover a model, network or tag on, and a page of its layers."""

    cursor: str = Field("", max_length=64)  # type: ignore[assignment]
    arch: str
    device: str | None = None
    library: str | None = None

    def read(self, name: str, index: LayerIndex) -> api.Coverage:
        """Return the coverage; raises BadInput for a tag with too many layers."""
        scope = {"device": self.device, "library": self.library}
        return api.coverage(name, self.arch, **scope, index=index, most_layers=_MAX_COVERED)

    def page(self, layers: Sequence[api.CoveredLayer]) -> RowPage[api.CoveredLayer]:
        """Return the layers behind the one that the cursor names."""
        keys = [one.config_key for one in layers]
        first = keys.index(self.cursor) + 1 if self.cursor in keys else 0
        there = layers[first : first + self.limit]
        more = first + self.limit < len(layers)
        return RowPage(tuple(there), there[-1].config_key if more else None)


@router.get("/coverage/{name:path}")
def coverage(
    request: Request, _: Reader, name: str, wanted: Annotated[CoverageQuery, Query()]
) -> Response:
    """Return the part of a model, network or tag that has results on an architecture, as `tuna
    coverage` does, with a page of its layers; in CSV all of them."""
    found = wanted.read(name, request.app.state.layers)
    page = wanted.page(found.layers)
    document = found.as_json() | {"layers": page.rows, "next": page.next}
    return table("layers", found.layers, wanted.format, document)


@twin("/sessions", "/sessions")
def sessions(wanted: Annotated[Paged, Query()]) -> Twin:
    """Return sessions, the newest first, as `tuna status` does."""
    page = "sessions.html.j2", "Sessions"
    return listing("sessions", wanted, _overviews, *page, shown=api.status_page)


def _overviews(limit: int, before: int) -> RowPage[dict[str, Any]]:
    found = api.status_page(limit, before)
    return RowPage(tuple(overview_documents(found.rows)), found.next)


@router.get("/sessions/{session_id}")
def session(_: Reader, session_id: RowId) -> Response:
    """Return one session, as `tuna status` does."""
    (found,) = overview_documents(api.status(session_id))
    return answered(found)


class Sizes:
    """Sessions with what they take, as it was counted a moment ago."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._known: dict[int, tuple[float, api.SessionSize]] = {}

    def of(self, session_id: int) -> api.SessionSize:
        """One session; raises NotFound."""
        api.require_session(session_id)
        with self._counting:
            counted_at, found = self._known.get(session_id, (0.0, None))
            if found is None or time.monotonic() - counted_at > _SIZES_S:
                (found,) = api.list_sessions(session_id)
                self._known[session_id] = time.monotonic(), found
        return found


@router.get("/sizes")
def sizes(request: Request, _: Reader, wanted: Annotated[Paged, Query()]) -> Response:
    """Return sessions with what they take, the newest first, as `tuna session list` does."""

    def read(limit: int, before: int) -> RowPage[Any]:
        return api.session_page(limit, before).map(request.app.state.sizes.of)

    return wanted.answer("sessions", read)


@twin("/sessions/{session_id}/size", "/sessions")
def size(request: Request, session_id: RowId) -> Twin:
    """Return one session with what it takes, as `tuna session show` does."""
    found = request.app.state.sizes.of(session_id)
    page = "size.html.j2", f"Size of session {session_id}"
    return Twin(lambda: answered(size_document(found)), *page, lambda _: {"size": found})


@router.get("/sessions/{session_id}/devices")
def devices(request: Request, _: Reader, session_id: RowId, format: Format = "json") -> Response:
    """Return the devices that measured for a session, each with the share of the time in which it
    was idle, as `tuna report` has them."""
    return table("devices", request.app.state.session_texts.devices(session_id), format)


@router.get("/sessions/{session_id}/report")
def report(_: Reader, session_id: RowId, against: Number | None = None) -> Response:
    """Return all figures of a session, as `tuna report` does; not of a large one."""
    return answered(api.report(session_id, against, most_jobs=_MAX_REPORTED))


class LayerQuery(Paged):
    """A page of a session's layers, or of those with a tag."""

    tag: str | None = None

    def winners(
        self, session_id: int, limit: int, after: int, *, with_commands: bool = True
    ) -> RowPage[Any]:
        """Return the fastest results of layers behind a cursor."""
        conditions = ResultFilter(session_id=session_id, tag=self.tag, limit=limit)
        return api.winner_page(conditions, after=after, with_commands=with_commands)


@twin("/sessions/{session_id}/results", "/sessions")
def results(session_id: RowId, wanted: Annotated[LayerQuery, Query()]) -> Twin:
    """Return the fastest result of each layer of a session, as `tuna results` does."""
    read = partial(wanted.winners, session_id)
    shown = partial(read, with_commands=False)
    page = "query.html.j2", f"Fastest results of session {session_id}"
    return listing("rows", wanted, read, *page, shown=shown, facts={"filtered": False})


@dataclass(frozen=True)
class ComparedPage:
    """Sessions side by side, with a page of their layers."""

    whole: api.Comparison
    layers: tuple[api.ComparedLayer, ...]
    next: int | None


class ComparisonQuery(LayerQuery):
    """Sessions that are compared."""

    session_id: list[Number] = Field(min_length=2, max_length=20)

    def read(self) -> ComparedPage:
        """Compare them; raises BadInput for large ones, unless by tag."""
        found = api.compare_sessions(self.session_id, self.tag, most_layers=_MAX_COMPARED)
        behind = tuple(layer for layer in found.layers if layer.config_id > self.cursor)
        there = behind if self.format == "csv" else behind[: self.limit]
        following = there[-1].config_id if len(there) < len(behind) else None
        return ComparedPage(found, there, following)


@twin("/compare", "/sessions")
def compare(wanted: Annotated[ComparisonQuery, Query()]) -> Twin:
    """Return sessions side by side, as `tuna compare` does, with a page of their layers; not large
    ones, unless by tag."""
    comparison = wanted.read()

    def answer() -> Response:
        document = replace(comparison.whole, layers=comparison.layers).as_json()
        document |= {"wins": comparison.whole.wins, "next": comparison.next}
        return table("layers", document["layers"], wanted.format, document)

    def facts(address: str) -> dict[str, Any]:
        first, *others = wanted.session_id
        columns = [(f"session {number}, ms", True) for number in wanted.session_id]
        columns += [(f"{number} / {first}", True) for number in others] + [("fastest", True)]
        layers = [{"label": layer.label, "cells": _cells(layer)} for layer in comparison.layers]
        links = table_links(address, wanted, comparison.next)
        shown = {"layers": layers, "columns": columns, "compared": comparison.whole}
        return {**shown, "wanted": wanted.model_dump(), **links}

    title = " beside ".join(f"session {number}" for number in wanted.session_id)
    return Twin(answer, "compare.html.j2", title, facts)


def _cells(layer: api.ComparedLayer) -> list[object]:
    """Return the columns of a layer: its times, ratios to the first one, and the fastest."""
    times = [
        why if best is None else f"{best.time_ms:.4g} {best.solver}"
        for best, why in zip(layer.bests, layer.missing, strict=True)
    ]
    ratios = ["" if ratio is None else f"{ratio.value:.3f}" for ratio in layer.ratios[1:]]
    return [*times, *ratios, "" if layer.fastest is None else layer.fastest]


class JobQuery(Paged):
    """Conditions on jobs of a session, and a page."""

    state: str | None = None
    cause: str | None = Field(None, description="of jobs that failed for good")
    step: str | None = None
    solver: str | None = None
    layer: str | None = Field(None, description="text in the label, or the whole key")

    def read(self, session_id: int, limit: int, after: int) -> RowPage[Any]:
        """Return jobs of a session behind a cursor that meet the conditions."""
        given = self.model_dump(exclude={"limit", "cursor", "format"})
        return api.list_jobs(JobFilter(session_id, **given, limit=limit, after=after))


@twin("/sessions/{session_id}/jobs", "/sessions")
def jobs(session_id: RowId, wanted: Annotated[JobQuery, Query()]) -> Twin:
    """Return a session's jobs by id."""
    states, causes = [one.value for one in State], [one.value for one in Cause]
    page = "jobs.html.j2", f"Jobs of session {session_id}"
    choices = {"session_id": session_id, "states": states, "causes": causes}
    return listing("jobs", wanted, partial(wanted.read, session_id), *page, facts=choices)


@router.get("/jobs/{job_id}")
def job(_: Reader, job_id: RowId) -> Response:
    """Return one job with every attempt, its first trials, and the command that repeats it."""
    return answered(api.show_job(job_id))


@router.get("/jobs/{job_id}/attempts")
def attempts(_: Reader, job_id: RowId, format: Format = "json") -> Response:
    """Return every accepted attempt at a job."""
    return table("attempts", api.show_job(job_id).attempts, format)


@router.get("/jobs/{job_id}/trials")
def trials(_: Reader, job_id: RowId, wanted: Annotated[Paged, Query()]) -> Response:
    """Return the trials of a job by id."""
    return wanted.answer("trials", partial(api.list_trials, job_id))


@twin("/workers", "/workers")
def workers(format: Format = "json") -> Twin:
    """Return live workers, and those that joined, as `tuna workers list` does."""
    found = api.list_workers()
    facts = {"workers": found, "csv": "/v1/workers?format=csv"}
    page = "workers.html.j2", "Workers"
    return Twin(lambda: table("workers", found, format), *page, lambda _: facts)


@router.get("/models")
def models(_: Reader, format: Format = "json") -> Response:
    """Return imported models, the latest first, as `tuna model list` does."""
    package = api_of("models")
    return table("models", map(package.model_document, package.list_models()), format)


@router.get("/models/{name:path}")
def model(_: Reader, name: str, format: Format = "json") -> Response:
    """Return the tasks of a model with their fastest results, as `tuna model show` does."""
    package = api_of("models")
    document = package.tasks_document(*package.show_model(name))
    return table("tasks", document["tasks"], format, document)


@router.get("/benchmarks")
def benchmarks(_: Reader, model: str | None = None, format: Format = "json") -> Response:
    """Return times of whole models, as `tuna model benchmarks` does."""
    return table("benchmarks", api_of("models").list_benchmarks(model), format)
