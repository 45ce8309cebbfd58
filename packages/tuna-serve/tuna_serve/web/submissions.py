"""Routes of requests: submit, list, watch, cancel, take the answer away, delete."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from anyio import CancelScope, to_thread
from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from tuna import api
from tuna.api.rows import RowPage, reading
from tuna.common.messages import first_fault
from tuna.errors import BadInput
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import answers, submission
from tuna_serve.requests.asked import MAX_LAYERS, Asked
from tuna_serve.requests.submission import Submission
from tuna_serve.requests.uploads import Upload
from tuna_serve.settings import service_settings
from tuna_serve.web.answers import Paged, answered, file_parts
from tuna_serve.web.changes import kept
from tuna_serve.web.events import Texts, streamed
from tuna_serve.web.forms import FormReader
from tuna_serve.web.visitors import Anyone, Role, Submitter, Visitor

router = APIRouter(prefix="/v1")
#: Paths with a body that is read here, in parts.
UPLOADS = ("/v1/requests", "/requests")
#: Files that are received at a time, each of another token.
_MAX_RECEIVING = 64
_KEY_CHARS = 128
_FORM = "multipart/form-data"
RequestId = Annotated[int, Path(ge=1, le=2**31 - 1)]
_Asked = TypeVar("_Asked", bound=Asked)


class LayersBody(Asked):
    """Layers that are asked for, in JSON."""

    layers: list[str] = Field(
        min_length=1, max_length=MAX_LAYERS, description="driver commands or JSON objects"
    )


class Form(Asked):
    """A file that is asked for, in a form: *.onnx, *.pt2, or lines that name layers."""

    kind: Literal["model", "layers"] | None = Field(
        None, description="default: by the end of the file's name"
    )
    file: bytes = b""


def _body_schema() -> dict[str, Any]:
    """Return what the OpenAPI document says of a body that FastAPI does not read."""
    form = Form.model_json_schema()
    form["properties"]["file"] = {"type": "string", "format": "binary"}
    form["required"] = ["name", "file"]
    content = {
        "application/json": {"schema": LayersBody.model_json_schema()},
        _FORM: {"schema": form},
    }
    return {"requestBody": {"required": True, "content": content}}


@router.post("/requests", openapi_extra=_body_schema())
async def submit(
    request: Request,
    visitor: Submitter,
    idempotency_key: Annotated[str | None, Header(max_length=_KEY_CHARS)] = None,
) -> Response:
    """Ask for a model or layers: a form with a file, or layers in JSON. Sent again under the same
    `Idempotency-Key` it is the same request."""
    found, new = await receive(request, visitor, idempotency_key)
    answer = answered(found)
    answer.status_code = 201 if new else 200
    answer.headers["location"] = f"/v1/requests/{found.id}"
    return answer


async def receive(
    request: Request, visitor: Visitor, client_key: str | None = None
) -> tuple[TuningRequest, bool]:
    """Take in what a visitor sends; return the request, and whether it is new.

    A form may have the key in the field `client_key`.
    """
    async with _receiving(request, visitor) as upload:
        if request.headers.get("content-type", "").startswith(_FORM):
            form = FormReader(request.headers["content-type"], upload)
            await form.read(request.stream())
            client_key = form.fields.pop("client_key", "") or client_key
            if client_key is not None and len(client_key) > _KEY_CHARS:
                raise BadInput(f"client_key: it has more than {_KEY_CHARS} characters.")
            sent: Form | LayersBody = _from_form(form.fields, form.filename)
            filename = form.filename
        else:
            sent, filename = await _from_json(request, upload), ""
        kind = sent.kind or "layers" if isinstance(sent, Form) else "layers"
        asked = Asked.model_validate(
            sent.model_dump(include=set(Asked.model_fields), exclude_unset=True)
        )
        limits = service_settings() if visitor.role is Role.SUBMIT else None
        wanted = Submission(asked, kind, upload, filename, visitor.token, client_key, limits)
        limiter = request.app.state.submitting
        return await to_thread.run_sync(submission.submit, wanted, limiter=limiter)


@contextlib.asynccontextmanager
async def _receiving(request: Request, visitor: Visitor) -> AsyncIterator[Upload]:
    """Yield a file for what comes; raises HTTPException where the token sends another already.

    One token's slow uploads delay nobody else; `Guard` bounds their time.
    """
    most_mib = service_settings().request_mib
    # the fields beside the file are small
    if int(request.headers.get("content-length", "0")) > (most_mib + 1) << 20:
        raise HTTPException(413, f"the file has more than {most_mib} MiB")
    busy: set[str] = request.app.state.receiving
    if visitor.token in busy:
        raise HTTPException(429, "another upload is being received: wait for its end")
    if len(busy) >= _MAX_RECEIVING:
        raise HTTPException(503, "too many uploads are being received", {"retry-after": "10"})
    busy.add(visitor.token)
    try:
        upload = await to_thread.run_sync(Upload)
        try:
            yield upload
        finally:
            with CancelScope(shield=True):  # the visitor may have gone
                await to_thread.run_sync(upload.close)
    finally:
        busy.discard(visitor.token)


def _from_form(fields: dict[str, str], filename: str) -> Form:
    if not filename:
        raise BadInput("The form has no file in the field `file`.")
    given: dict[str, Any] = {name: text for name, text in fields.items() if text != ""}
    if "shapes" in given:
        try:
            given["shapes"] = json.loads(given["shapes"])
        except (ValueError, RecursionError):
            raise BadInput('shapes: not JSON such as {"x": [1, 3, 224, 224]}') from None
    kind = "model" if filename.lower().endswith((".onnx", ".pt2")) else "layers"
    return checked(Form, {"kind": kind, **given, "file": b""})


async def _from_json(request: Request, upload: Upload) -> LayersBody:
    """Read a body in JSON; its layers become the file."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > submission.LAYERS_BYTES:
            raise HTTPException(413, f"the body has more than {submission.LAYERS_BYTES} bytes")
    try:
        given = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise BadInput("The body is neither JSON nor a form.") from None
    found = checked(LayersBody, given)
    upload.write("".join(f"{' '.join(line.split())}\n" for line in found.layers).encode())
    return found


def checked(model: type[_Asked], given: Any) -> _Asked:
    """Return the model of what was given; raises BadInput with the first fault."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise BadInput(first_fault(error.errors())[:500]) from None


class RequestQuery(Paged):
    """Conditions on requests, and a page."""

    state: RequestState | None = None

    def read(self, visitor: Visitor, limit: int, before: int) -> RowPage[TuningRequest]:
        """Return requests that the visitor may see, the newest first, behind a cursor."""
        state = self.state.value if self.state else None
        with reading(api.open_database()) as connection:
            return requests.latest(connection, limit, before or None, own(visitor), state)


def own(visitor: Visitor) -> str | None:
    """Return the token whose requests the visitor sees; None: all."""
    return visitor.token if visitor.role is Role.SUBMIT else None


@router.get("/requests")
def list_requests(visitor: Anyone, wanted: Annotated[RequestQuery, Query()]) -> Response:
    """Return requests, the newest first: with the role `submit` one's own."""
    return wanted.answer("requests", partial(wanted.read, visitor))


def find(visitor: Visitor, request_id: int) -> TuningRequest:
    """Return a request that the visitor may see; raises NotFound for others too."""
    with reading(api.open_database()) as connection:
        return requests.get(connection, request_id, own(visitor))


@router.get("/requests/{request_id}")
def show_request(visitor: Anyone, request_id: RequestId) -> Response:
    """Return one request."""
    return answered(find(visitor, request_id))


def request_texts(
    forms: Mapping[str, Callable[[TuningRequest], str]], watched: frozenset[int]
) -> Texts:
    """Return the texts of the requests that are watched, by id and form, with one query."""
    with reading(api.open_database()) as connection:
        found = requests.some(connection, watched)
    return {key: {name: form(one) for name, form in forms.items()} for key, one in found.items()}


@router.get("/requests/{request_id}/events")
async def request_events(
    request: Request, visitor: Anyone, request_id: RequestId
) -> StreamingResponse:
    """Stream a request whenever it changed, as server-sent events with JSON."""
    await to_thread.run_sync(find, visitor, request_id)  # raises NotFound
    return streamed(request, request.app.state.live_requests, request_id, "json", "request")


@router.post("/requests/{request_id}/cancel")
def cancel_request(visitor: Submitter, request_id: RequestId) -> Response:
    """End a request that is not over, and its jobs that no other one wants."""
    found = find(visitor, request_id)

    def act() -> Any:
        by = f"{visitor.role.name.lower()} {visitor.token}"
        return {"state": submission.cancel(found.id, own(visitor), by).state.value}

    return kept(visitor, "cancel", f"request {found.id}", {}, act)


@router.delete("/requests/{request_id}")
def delete_request(visitor: Submitter, request_id: RequestId) -> Response:
    """Delete a request that is over, with its files; what was tuned stays known."""
    found = find(visitor, request_id)

    def act() -> Any:
        submission.delete(found.id, own(visitor))
        return {"deleted": found.id}

    return kept(visitor, "delete", f"request {found.id}", {}, act)


@router.get("/requests/{request_id}/result")
async def request_result(
    visitor: Anyone, request_id: RequestId, file: str | None = Query(None, max_length=255)
) -> Response:
    """Return the answer: one of its files, or all in a zip archive."""
    request = await to_thread.run_sync(find, visitor, request_id)
    opened = answers.opened(request, file)
    name, content = await to_thread.run_sync(opened.__enter__)
    size_bytes = await to_thread.run_sync(partial(content.seek, 0, 2))
    content.seek(0)
    parts = file_parts(content, partial(opened.__exit__, None, None, None))
    kind = "application/json" if name.endswith(".json") else "application/octet-stream"
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    headers = {
        "content-length": str(size_bytes),
        "content-disposition": f'attachment; filename="{safe}"',
    }
    return StreamingResponse(parts, media_type=kind, headers=headers)
