"""Lookups that are pages too: one function, answered under `/v1` in JSON or CSV and beside it as
HTML."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from tuna.api.rows import RowPage
from tuna_serve.web.answers import Paged
from tuna_serve.web.rendering import html_page, table_links
from tuna_serve.web.visitors import Reader, Visitor

answers = APIRouter(prefix="/v1")
pages = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Twin:
    """A lookup, not yet read."""

    answer: Callable[[], Response]  #: returns the result as JSON or CSV
    template: str
    title: str
    #: Returns the template's variables, given the page's address.
    facts: Callable[[str], Mapping[str, Any]]


def listing(
    name: str,
    wanted: Paged,
    read: Callable[[Any, Any], RowPage[Any]],
    template: str,
    title: str,
    *,
    shown: Callable[[Any, Any], RowPage[Any]] | None = None,
    facts: Mapping[str, Any] = {},
) -> Twin:
    """Return a list in pages, whose rows are `name` in JSON and in the template.

    `read` returns so many rows at most behind a cursor. `shown` reads for the template, where that
    needs others; `facts` it has beside.
    """

    def of_page(address: str) -> Mapping[str, Any]:
        page = (shown or read)(wanted.limit, wanted.cursor)
        links = table_links(address, wanted, page.next)
        return {name: page.rows, "wanted": wanted.model_dump(), **facts, **links}

    return Twin(lambda: wanted.answer(name, read), template, title, of_page)


def twin(path: str, menu: str) -> Callable[[Callable[..., Twin]], Callable[..., Twin]]:
    """Register a lookup for readers at `/v1` and PATH, and its page at PATH, in the place `menu` of
    the menu. Its parameters are those of both routes."""

    def register(lookup: Callable[..., Twin]) -> Callable[..., Twin]:
        signature = inspect.signature(lookup, eval_str=True)

        def called(request: Request, arguments: Mapping[str, Any]) -> Twin:
            return lookup(**arguments, **({"request": request} if takes_request else {}))

        async def answer(request: Request, visitor: Visitor, **arguments: Any) -> Response:
            def read() -> Response:
                return called(request, arguments).answer()

            if "csv" in request.query_params.getlist("format"):  # it is streamed to one alone
                return await to_thread.run_sync(read)
            response: Response = await request.app.state.shared.ask(str(request.url), read)
            return response

        async def page(request: Request, visitor: Visitor, **arguments: Any) -> Response:
            def read() -> tuple[Twin, Mapping[str, Any]]:
                view = called(request, arguments)
                return view, view.facts(request.url.path)

            view, facts = await request.app.state.shared.ask(str(request.url), read)
            facts = {"told": request.query_params.get("told", "")[:300], **facts}
            draw = partial(html_page, view.template, visitor, view.title, menu, **facts)
            return await to_thread.run_sync(draw)

        takes_request = "request" in signature.parameters
        own = [parameter for name, parameter in signature.parameters.items() if name != "request"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        both = [
            inspect.Parameter("request", keyword, annotation=Request),
            inspect.Parameter("visitor", keyword, annotation=Reader),
            *(parameter.replace(kind=keyword) for parameter in own),
        ]
        for route, router in ((answer, answers), (page, pages)):
            route.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
            route.__name__, route.__doc__ = lookup.__name__, lookup.__doc__
            router.get(path)(route)
        return lookup

    return register
