"""Routes that answer what `tuna query`, `results`, `coverage`, `status`, `session`, `report`,
`compare`, `model`, `golden` and `workers` say with `--json`, field by field."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tuna import api
from tuna.api.documents import overview_document, size_document
from tuna.configs.sources import api_of
from tuna.db.bulk import RowPage
from tuna.golden.versions import MAX_VERSION
from tuna.reports.job_list import JobFilter
from tuna.results.best import MOST_LAYERS, LayerIndex
from tuna.results.result_rows import ResultFilter, moment
from tuna_serve.web.answers import Format, Number, Paged, RowId, answered, table
from tuna_serve.web.visitors import Anyone, Reader

router = APIRouter(prefix="/v1")
#: Jobs of a session that is reported, and layers of sessions that are compared.
_MOST_REPORTED, _MOST_COMPARED = 500, 2000
#: Layers of a tag whose coverage is asked for.
_MOST_COVERED = 2000
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


@router.get("/query")
def query(_: Reader, wanted: Annotated[ResultQuery, Query()]) -> Response:
    """Return results, as `tuna query` has them."""

    def read(limit: int, cursor: Any) -> RowPage[Any]:
        found = api.query(wanted.filter(limit), cursor=cursor)
        return RowPage(found.rows, found.cursor or None)

    return wanted.answer("rows", read)


class BestQuery(BaseModel):
    """Layers, and what they are to run on."""

    model_config = ConfigDict(extra="forbid")

    layers: list[str] = Field(
        min_length=1, max_length=MOST_LAYERS, description="config keys, driver commands or JSON"
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
        return api.coverage(name, self.arch, **scope, index=index, most_layers=_MOST_COVERED)

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


@router.get("/sessions")
def sessions(_: Reader, wanted: Annotated[Paged, Query()]) -> Response:
    """Return sessions, the newest first, as `tuna status` does."""

    def read(limit: int, before: int) -> RowPage[Any]:
        return api.status_page(limit, before).map(overview_document)

    return wanted.answer("sessions", read)


@router.get("/sessions/{session_id}")
def session(_: Reader, session_id: RowId) -> Response:
    """Return one session, as `tuna status` does."""
    (found,) = api.status(session_id)
    return answered(overview_document(found))


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


@router.get("/sessions/{session_id}/size")
def size(request: Request, _: Reader, session_id: RowId) -> Response:
    """Return one session with what it takes, as `tuna session show` does."""
    return answered(size_document(request.app.state.sizes.of(session_id)))


@router.get("/sessions/{session_id}/devices")
def devices(request: Request, _: Reader, session_id: RowId, format: Format = "json") -> Response:
    """Return the devices that measured for a session, each with the share of the time in which it
    was idle, as `tuna report` has them."""
    return table("devices", request.app.state.session_texts.devices(session_id), format)


@router.get("/sessions/{session_id}/report")
def report(_: Reader, session_id: RowId, against: Number | None = None) -> Response:
    """Return all figures of a session, as `tuna report` does; not of a large one."""
    return answered(api.report(session_id, against, most_jobs=_MOST_REPORTED))


class LayerQuery(Paged):
    """A page of a session's layers, or of those with a tag."""

    tag: str | None = None

    def winners(
        self, session_id: int, limit: int, after: int, *, with_commands: bool = True
    ) -> RowPage[Any]:
        """Return the fastest results of layers behind a cursor."""
        conditions = ResultFilter(session_id=session_id, tag=self.tag, limit=limit)
        return api.winner_page(conditions, after=after, with_commands=with_commands)


@router.get("/sessions/{session_id}/results")
def results(_: Reader, session_id: RowId, wanted: Annotated[LayerQuery, Query()]) -> Response:
    """Return the fastest result of each layer of a session, as `tuna results` does."""
    return wanted.answer("rows", partial(wanted.winners, session_id))


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
        found = api.compare_sessions(self.session_id, self.tag, most_layers=_MOST_COMPARED)
        behind = tuple(layer for layer in found.layers if layer.config_id > self.cursor)
        there = behind if self.format == "csv" else behind[: self.limit]
        following = there[-1].config_id if len(there) < len(behind) else None
        return ComparedPage(found, there, following)


@router.get("/compare")
def compare(_: Reader, wanted: Annotated[ComparisonQuery, Query()]) -> Response:
    """Return sessions side by side, as `tuna compare` does, with a page of their layers; not large
    ones, unless by tag."""
    found = wanted.read()
    document = replace(found.whole, layers=found.layers).as_json()
    document |= {"wins": found.whole.wins, "next": found.next}
    return table("layers", document["layers"], wanted.format, document)


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


@router.get("/sessions/{session_id}/jobs")
def jobs(_: Reader, session_id: RowId, wanted: Annotated[JobQuery, Query()]) -> Response:
    """Return a session's jobs by id."""
    return wanted.answer("jobs", partial(wanted.read, session_id))


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


@router.get("/workers")
def workers(_: Reader, format: Format = "json") -> Response:
    """Return live workers, and those that joined, as `tuna workers list` does."""
    return table("workers", api.list_workers(), format)


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


@router.get("/golden")
def golden_versions(_: Reader, library: str | None = None, format: Format = "json") -> Response:
    """Return golden versions, as `tuna golden list` does."""
    return table("golden", api.golden.versions(library), format)


Version = Annotated[int, Path(ge=0, le=MAX_VERSION)]


class EntryQuery(Paged):
    """Conditions on entries of a golden version, and a page."""

    library: str | None = Field(None, description="where several have a version of this number")
    arch: str | None = None
    solver: str | None = None
    layer: str | None = Field(None, description="text in the label, or the whole key")

    def read(self, version: int, limit: int, after: int) -> RowPage[Any]:
        """Return entries of a version behind a cursor that meet the conditions."""
        given = self.model_dump(exclude={"limit", "cursor", "format"})
        return api.golden.entries(
            api.golden.EntryFilter(version, **given, limit=limit, after=after)
        )


@router.get("/golden/{version}/entries")
def golden_entries(_: Reader, version: Version, wanted: Annotated[EntryQuery, Query()]) -> Response:
    """Return entries of a golden version by id."""
    return wanted.answer("entries", partial(wanted.read, version))


@router.get("/golden/{version}/explain")
def explain(
    _: Reader, version: Version, key: str, solver: str | None = None, library: str | None = None
) -> Response:
    """Return where the entries of a key come from, as `tuna golden explain` does."""
    return answered(api.golden.explain(version, key, solver, library))


_Share = Annotated[float, Query(ge=0, allow_inf_nan=False, description="0.05 is 5 %")]


@router.get("/golden/{version}/report")
def golden_report(
    _: Reader,
    version: Version,
    against: Annotated[int, Query(ge=0, le=MAX_VERSION)] | None = None,
    session_id: Number | None = None,
    library: str | None = None,
    max_regression: _Share | None = None,
    min_gain: _Share | None = None,
) -> Response:
    """Return a version compared with its base or another one, or a session with it, as `tuna golden
    report` does."""
    if session_id is None:
        found = api.golden.report(version, against, library)
    else:
        found = api.golden.report_session(session_id, version, library)
    violations = api.golden.check_gate(found, max_regression, min_gain)
    return answered(found.as_json() | {"violations": violations})
