"""Routes that answer what `tuna golden` says with `--json`; each `twin` is a page too."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.responses import Response

from tuna import api
from tuna.api.golden import MAX_VERSION
from tuna.api.rows import RowPage
from tuna_serve.web.answers import Format, Number, Paged, answered, table
from tuna_serve.web.twins import Twin, listing, twin
from tuna_serve.web.visitors import Reader

router = APIRouter(prefix="/v1")


@twin("/golden", "/golden")
def golden_versions(library: str | None = None, format: Format = "json") -> Twin:
    """Return golden versions, as `tuna golden list` does."""
    found = api.golden.versions(library)
    facts = {"versions": found, "more": "", "csv": "/v1/golden?format=csv"}
    page = "golden.html.j2", "Golden versions"
    return Twin(lambda: table("golden", found, format), *page, lambda _: facts)


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


@twin("/golden/{version}/entries", "/golden")
def golden_entries(version: Version, wanted: Annotated[EntryQuery, Query()]) -> Twin:
    """Return entries of a golden version by id."""
    page = "entries.html.j2", f"Golden version {version}"
    return listing(
        "entries", wanted, partial(wanted.read, version), *page, facts={"version": version}
    )


@twin("/golden/{version}/explain", "/golden")
def explain(
    version: Version, key: str, solver: str | None = None, library: str | None = None
) -> Twin:
    """Return where the entries of a key come from, as `tuna golden explain` does."""
    found = api.golden.explain(version, key, solver, library or None)
    page = "explain.html.j2", f"{key[:100]} in golden version {version}"
    return Twin(lambda: answered(found), *page, lambda _: {"found": found})


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
