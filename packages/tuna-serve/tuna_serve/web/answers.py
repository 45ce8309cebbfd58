"""Forms of answers: a document in JSON, a table also in CSV, a list in pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import IO, Annotated, Any, Literal

from anyio import to_thread
from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response, StreamingResponse

from tuna.api.documents import csv_lines, json_text
from tuna.api.rows import DEFAULT_LIMIT, RowPage

#: Bytes of a file that are sent at a time.
PART_BYTES = 1 << 20
#: Rows of a page at most; with fewer, if these are long.
MAX_ROWS, _MAX_CHARS = 500, 480_000
#: Rows of a large page that are read first, to see how long they are.
_SAMPLE = 100
LARGEST_ID = 2**63 - 1
Format = Literal["json", "csv"]
RowId = Annotated[int, Path(ge=1, le=LARGEST_ID)]
Number = Annotated[int, Query(ge=1, le=LARGEST_ID)]


def answered(document: Any) -> Response:
    """Return an answer in JSON."""
    return Response(json_text(document), media_type="application/json")


def table(name: str, rows: Iterable[Any], form: Format, document: Any = None) -> Response:
    """Return a document, which is the rows unless another one is given, or the rows as a file in
    CSV."""
    if form == "json":
        return answered(list(rows) if document is None else document)
    return _download(name, iter(["".join(csv_lines(rows))]))


class Paged(BaseModel):
    """Parameters of a list: a page of it in JSON, or all of it behind a cursor in CSV."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MAX_ROWS)
    cursor: int = Field(0, ge=0, le=LARGEST_ID, description="`next` of the page before")
    format: Format = "json"

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        """A form sends a field that was left empty, too."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value != ""}

    def answer(self, name: str, read: Callable[[int, int], RowPage[Any]]) -> Response:
        """Return a page, `{name: rows, "next": cursor}`, or a file; `read`: returns so many rows at
        most behind a cursor."""
        if self.format == "csv":
            page = read(MAX_ROWS, self.cursor)  # errors are answered before anything is sent
            return _download(name, _texts(page, lambda after: read(MAX_ROWS, after)))
        limit = self.limit
        while True:
            page = self._page(read, limit)
            text = json_text({name: page.rows, "next": page.next})
            if len(text) <= _MAX_CHARS or limit == 1:
                return Response(text, media_type="application/json")
            limit = max(1, limit * _MAX_CHARS * 4 // 5 // len(text))

    def _page(self, read: Callable[[Any, Any], RowPage[Any]], limit: int) -> RowPage[Any]:
        """Return so many rows at most, fewer where they are as long as the first of them are."""
        first = read(min(limit, _SAMPLE), self.cursor)
        if first.next is None or len(first.rows) >= limit:
            return first
        fitting = _MAX_CHARS * 9 // 10 * len(first.rows) // len(json_text(first.rows))
        if fitting <= len(first.rows):
            return first
        rest = read(min(limit, fitting) - len(first.rows), first.next)
        return RowPage((*first.rows, *rest.rows), rest.next)


async def file_parts(
    content: IO[bytes], close: Callable[[], object], head: bytes = b""
) -> AsyncIterator[bytes]:
    """Yield some bytes, then those of a file, and close it, also where the visitor goes."""
    try:
        yield head
        while part := await to_thread.run_sync(content.read, PART_BYTES):
            yield part
    finally:
        close()


def _texts(page: RowPage[Any], read: Callable[[Any], RowPage[Any]]) -> Iterator[str]:
    yield "".join(csv_lines(page.rows))
    while page.next is not None:
        page = read(page.next)
        yield "".join(csv_lines(page.rows, head=False))


def _download(name: str, texts: Iterator[str]) -> Response:
    headers = {"content-disposition": f'attachment; filename="{name}.csv"'}
    return StreamingResponse(texts, media_type="text/csv", headers=headers)
