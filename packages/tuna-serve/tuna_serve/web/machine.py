"""Routes for those who look after the service: whether it lives, its metrics, who one is."""

from __future__ import annotations

from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Form, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from tuna.api.rows import reading
from tuna.reports.prometheus import CONTENT_TYPE
from tuna_serve.web.visitors import Anyone, Reader, cookie_name

router = APIRouter()


class WhoAmI(BaseModel):
    """The visitor of a request."""

    token: str
    role: str


@router.get("/healthz", include_in_schema=False)
def healthz(request: Request) -> PlainTextResponse:
    """Answer 200 where the database answers; says nothing else, and needs no token."""
    with reading(request.app.state.site.engine) as connection:
        connection.execute(sa.select(1))
    return PlainTextResponse("ok\n")


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request, _: Reader) -> Response:
    """Answer Prometheus, as `tuna metrics` does."""
    return Response(await request.app.state.scrape(), media_type=CONTENT_TYPE)


@router.get("/v1/whoami")
def whoami(visitor: Anyone) -> WhoAmI:
    """Return the token's id and role."""
    return WhoAmI(token=visitor.token, role=visitor.role.name.lower())


@router.get("/login", include_in_schema=False)
async def login(request: Request, token: str, then: str = "/") -> Response:
    """Turn the token of a link into a cookie; it leaves the address at once."""
    return await _let_in(request, token, then)


@router.post("/login", include_in_schema=False)
async def login_by_form(
    request: Request, token: Annotated[str, Form()], then: Annotated[str, Form()] = "/"
) -> Response:
    """Turn a token that was typed into a cookie."""
    return await _let_in(request, token.strip(), then)


async def _let_in(request: Request, token: str, then: str) -> Response:
    found = await request.app.state.visitors.holder(token, by_cookie=True)
    if found is None:
        raise HTTPException(401, "the token is not valid")
    # a path of this service alone: `//host` would be another one
    target = then if then.startswith("/") and not then.startswith(("//", "/\\")) else "/"
    answer = RedirectResponse(target, 303)
    answer.set_cookie(
        cookie_name(request),
        token,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
        expires=request.app.state.visitors.known(found.token).expires_at,
    )
    return answer
