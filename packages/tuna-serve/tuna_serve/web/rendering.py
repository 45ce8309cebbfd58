"""The making of pages: their templates, the places of the menu, and the page of an error."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from tuna.common import formats
from tuna.common.messages import inert
from tuna_serve.web.answers import Paged
from tuna_serve.web.visitors import Role, Visitor

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
    """Return a page with these facts, at a place of the menu."""
    may_change = visitor.role is Role.ADMIN
    common = {"visitor": visitor, "title": title, "place": place, "may_change": may_change}
    text = render(template, **{"told": "", "places": places(visitor), **common, **facts})
    return HTMLResponse(text)


def places(visitor: Visitor) -> tuple[tuple[str, str], ...]:
    """Return addresses and names of what the menu of a visitor has."""
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
        auto_reload=False,  # else each page looks at the files of its templates
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
