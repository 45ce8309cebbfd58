"""Requests of visitors in SQL: their states, with the only table of allowed transitions, and their
rows; `python -m tuna_serve.db.requests` prints the table as a drawing."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import ConfigTag, RequestRow, RowPage, TokenRow, utc_now
from tuna.errors import NotFound
from tuna.vocabulary import RequestState, state_diagram

#: From each state, the states that may follow it.
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.ACCEPTED: frozenset(
        {RequestState.KNOWN, RequestState.TUNING, RequestState.FAILED, RequestState.CANCELED}
    ),
    RequestState.KNOWN: frozenset(),
    RequestState.TUNING: frozenset(
        {RequestState.BUILT, RequestState.FAILED, RequestState.CANCELED}
    ),
    RequestState.BUILT: frozenset(),
    RequestState.FAILED: frozenset(),
    RequestState.CANCELED: frozenset(),
}


@dataclass(frozen=True)
class StoredFile:
    """A file of the answer, in the artifact store."""

    name: str
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class TuningRequest:
    """A request."""

    id: int
    token: str  #: id of its visitor's
    client_key: str | None
    digest: str
    kind: str
    name: str
    wanted: Mapping[str, Any]
    upload: str
    upload_bytes: int
    trials: int
    priority: int
    state: RequestState
    session_id: int | None
    tag: str
    message: str
    progress: Mapping[str, Any]
    files: tuple[StoredFile, ...]
    created_at: datetime
    updated_at: datetime
    tuning_at: datetime | None
    ended_at: datetime | None
    label: str = ""  #: whom its token was made for

    def as_json(self) -> dict[str, Any]:
        """Return what its visitor is told."""
        hidden = ("client_key", "digest", "upload", "label", "files")
        shown = {name: value for name, value in vars(self).items() if name not in hidden}
        files = {file.name: file.size_bytes for file in self.files}
        return {**shown, "state": self.state.value, "by": self.label, "files": files}


@dataclass(frozen=True)
class Standing:
    """The open requests of a token together."""

    open: int
    trials: int
    stored_bytes: int  #: Files of all requests of the token: uploads and results


def _of(row: Any) -> TuningRequest:
    given = dict(row._mapping)
    given["token"] = given.pop("token_id")
    given.pop("files_bytes")
    for name in ("wanted", "progress"):
        given[name] = json.loads(given[name])
    given["files"] = tuple(StoredFile(*one) for one in json.loads(given["files"]))
    return TuningRequest(**{**given, "state": RequestState(given["state"])})


def _select() -> sa.Select[Any]:
    rows = sa.select(RequestRow.__table__, TokenRow.label)
    return rows.join(TokenRow, TokenRow.id == RequestRow.token_id)


def add(connection: sa.Connection, **values: Any) -> int:
    """Store a new request, in the state `accepted`; return its id."""
    row = {"state": RequestState.ACCEPTED.value, "message": "", "progress": {}, "files": ()}
    insert = sa.insert(RequestRow).values(_columns({**row, **values}))
    made = connection.execute(insert).inserted_primary_key
    assert made is not None
    (request_id,) = made
    return int(request_id)


def get(connection: sa.Connection, request_id: int, token_id: str | None = None) -> TuningRequest:
    """Return a request; raises NotFound, also for one of another token than `token_id`, if that is
    given."""
    query = _select().where(RequestRow.id == request_id)
    if token_id is not None:
        query = query.where(RequestRow.token_id == token_id)
    row = connection.execute(query).first()
    if row is None:
        raise NotFound(f"Unknown request {request_id}.")
    return _of(row)


def by_key(connection: sa.Connection, token_id: str, client_key: str) -> TuningRequest | None:
    """Return the request that a visitor made under a key."""
    mine = RequestRow.token_id == token_id, RequestRow.client_key == client_key
    row = connection.execute(_select().where(*mine)).first()
    return None if row is None else _of(row)


def latest(
    connection: sa.Connection,
    limit: int,
    before: int | None = None,
    token_id: str | None = None,
    state: str | None = None,
) -> RowPage[TuningRequest]:
    """Return a page of requests, the newest first: those with a smaller id than `before`, of one
    token, in one state."""
    query = _select().order_by(RequestRow.id.desc()).limit(limit + 1)
    if before is not None:
        query = query.where(RequestRow.id < before)
    if token_id is not None:
        query = query.where(RequestRow.token_id == token_id)
    if state is not None:
        query = query.where(RequestRow.state == state)
    return RowPage.of([_of(row) for row in connection.execute(query)], limit)


def some(connection: sa.Connection, ids: Collection[int]) -> dict[int, TuningRequest]:
    """Return those of these requests that there are, by id."""
    rows = connection.execute(_select().where(RequestRow.id.in_(sorted(ids))))
    return {row.id: _of(row) for row in rows}


def unended(connection: sa.Connection) -> list[TuningRequest]:
    """Return the requests with work to do, those with the highest priority first, then the
    oldest."""
    query = _select().where(RequestRow.ended_at.is_(None))
    rows = connection.execute(query.order_by(RequestRow.priority.desc(), RequestRow.id))
    return [_of(row) for row in rows]


def answers(
    connection: sa.Connection, kind: str, upload: str, session_id: int
) -> list[TuningRequest]:
    """Return the requests with this file in this session that were answered, the newest first."""
    done = RequestState.KNOWN.value, RequestState.BUILT.value
    query = _select().where(
        RequestRow.session_id == session_id,
        RequestRow.kind == kind,
        RequestRow.upload == upload,
        RequestRow.state.in_(done),
    )
    return [_of(row) for row in connection.execute(query.order_by(RequestRow.id.desc()))]


def move(connection: sa.Connection, request_id: int, state: RequestState, **values: Any) -> bool:
    """Set the state, and other columns; False if it may not follow the present one, as where the
    request was canceled meanwhile."""
    allowed = [old.value for old, following in TRANSITIONS.items() if state in following]
    changes = _columns({"state": state.value, **values})
    if not TRANSITIONS[state] and state is not RequestState.CANCELED:  # that is to be cleared up
        changes |= {"ended_at": utc_now(), "upload_bytes": 0}  # the upload is not needed any more
    mine = RequestRow.id == request_id, RequestRow.state.in_(allowed)
    return connection.execute(sa.update(RequestRow).where(*mine).values(changes)).rowcount == 1


def write(connection: sa.Connection, request_id: int, **values: Any) -> None:
    """Set columns other than the state; `progress` and `files` as a `TuningRequest` has them."""
    update = sa.update(RequestRow).where(RequestRow.id == request_id)
    connection.execute(update.values(_columns(values)))


def _columns(values: Mapping[str, Any]) -> dict[str, Any]:
    columns = {"updated_at": utc_now(), **values}
    if "progress" in values:
        columns["progress"] = json.dumps(values["progress"])
    if "files" in values:
        files_ = [(one.name, one.digest, one.size_bytes) for one in values["files"]]
        columns |= {"files": json.dumps(files_), "files_bytes": sum(size for *_, size in files_)}
    return columns


def remove(connection: sa.Connection, request_id: int) -> None:
    """Delete the row of a request."""
    connection.execute(sa.delete(RequestRow).where(RequestRow.id == request_id))


def standing(connection: sa.Connection, token_id: str) -> Standing:
    """Return what the requests of a token take now."""
    is_open = sa.case((RequestRow.ended_at.is_(None), 1), else_=0)
    numbers = (
        sa.func.sum(is_open),
        sa.func.sum(is_open * RequestRow.trials),
        sa.func.sum(RequestRow.upload_bytes + RequestRow.files_bytes),
    )
    row = connection.execute(sa.select(*numbers).where(RequestRow.token_id == token_id)).one()
    return Standing(*(int(value or 0) for value in row))


def highest_priority(connection: sa.Connection, session_id: int) -> int:
    """Return the highest priority of the open requests that use a session."""
    mine = RequestRow.session_id == session_id, RequestRow.ended_at.is_(None)
    query = sa.select(sa.func.max(RequestRow.priority)).where(*mine)
    return int(connection.execute(query).scalar() or 0)


def wanted_by_others(connection: sa.Connection, request: TuningRequest) -> set[int]:
    """Return the configs of a request that other open requests in its session want too."""
    others = sa.select(RequestRow.tag).where(
        RequestRow.session_id == request.session_id,
        RequestRow.ended_at.is_(None),
        RequestRow.id != request.id,
        RequestRow.state != RequestState.CANCELED.value,
    )
    mine = sa.select(ConfigTag.config_id).where(ConfigTag.tag == request.tag)
    shared = sa.select(ConfigTag.config_id).where(ConfigTag.tag.in_(others))
    return set(connection.execute(shared.where(ConfigTag.config_id.in_(mine))).scalars())


def files(connection: sa.Connection, among: Collection[str] | None = None) -> set[str]:
    """Return the artifacts that requests name, of `among` if it is given: files of answers, and
    uploads of open requests."""
    found: set[str] = set()
    is_open = RequestRow.ended_at.is_(None)
    query = sa.select(RequestRow.upload, RequestRow.files, is_open.label("open"))
    for row in connection.execute(query.where(sa.or_(is_open, RequestRow.files_bytes > 0))):
        found |= {digest for _, digest, _ in json.loads(row.files)}
        found |= {row.upload} if row.open else set()
    return found if among is None else found.intersection(among)


def mermaid() -> str:
    """Return the table of transitions as a Mermaid state diagram."""
    return state_diagram(TRANSITIONS)


if __name__ == "__main__":
    print(mermaid())
