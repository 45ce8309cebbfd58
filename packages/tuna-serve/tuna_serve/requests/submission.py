"""Take a request in: check it, keep its file, write it down, and answer at once what is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from tuna.api.preparation import session_environment
from tuna.api.services import artifacts_of_models
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.models import EnvironmentRow, Session
from tuna.errors import BadInput, NotFound, TunaError
from tuna.libraries.base import Environment
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import answers
from tuna_serve.requests.asked import SESSIONS, Asked, Conflict, Kind, Limits, Standing
from tuna_serve.requests.uploads import Upload, check_model, forget

#: Architectures and devices that an error names.
_MOST_NAMED = 20


@dataclass(frozen=True)
class Submission:
    """A request as a visitor sends it."""

    asked: Asked
    kind: Kind
    upload: Upload
    filename: str
    token: str  #: id
    client_key: str | None = None
    limits: Limits | None = None  #: None: of nobody who needs any

    @property
    def digest(self) -> str:
        """SHA-256 of all that is asked for."""
        return self.asked.digest(self.kind, self.upload.digest)


def submit(submission: Submission) -> tuple[TuningRequest, bool]:
    """Return the request, which is written down, and whether it is new: with the key of an earlier
    one it is that.

    Raises BadInput, Conflict for a key under which something else was sent, LimitReached, and
    StorageFull; then nothing is kept.
    """
    engine, asked = open_database(), submission.asked
    if earlier := _earlier(submission):
        return earlier, False
    layers = None
    if submission.kind == "model":
        check_model(submission.filename, submission.upload.rewound())
        if asked.library not in (None, "tvm"):
            raise BadInput(f"{asked.library} compiles no models.", hint="leave `library` out")
    else:
        layers = len(answers.read_layers(submission.upload.rewound()).configs)
    trials = asked.counted_trials(layers)
    environment = find_environment(asked, submission.kind)
    _check_limits(submission, trials)
    upload = submission.upload.store(artifacts_of_models())
    row = {
        "token_id": submission.token,
        "client_key": submission.client_key,
        "digest": submission.digest,
        "kind": submission.kind,
        "name": asked.name,
        "wanted": asked.model_dump_json(exclude_defaults=True),
        "upload": upload,
        "upload_bytes": submission.upload.size_bytes,
        "trials": trials,
        "priority": asked.priority,
    }
    try:
        with writing(engine) as connection:
            _check_limits(submission, trials, connection)
            session_id, _ = sessions.create(connection, environment, SESSIONS[submission.kind])
            request_id = requests.add(connection, session_id=session_id, **row)
        submission.upload.keep()
    except IntegrityError:
        if earlier := _earlier(submission):  # sent twice at the same moment
            return earlier, False
        raise
    return answers.answer_at_once(request_id), True


def _earlier(submission: Submission) -> TuningRequest | None:
    if submission.client_key is None:
        return None
    with reading(open_database()) as connection:
        found = requests.by_key(connection, submission.token, submission.client_key)
    if found is not None and found.digest != submission.digest:
        raise Conflict(
            f"Under this key something else was asked for before: request {found.id}.",
            hint="take another Idempotency-Key for another request",
        )
    return found


def _check_limits(
    submission: Submission, trials: int, connection: sa.Connection | None = None
) -> None:
    if submission.limits is None:
        return
    if connection is None:
        submission.limits.check_priority(submission.asked.priority)
        with reading(open_database()) as read:
            return _check_limits(submission, trials, read)
    now = Standing(*requests.totals(connection, submission.token))
    submission.limits.check(now, trials, submission.upload.size_bytes)


def find_environment(asked: Asked, kind: Kind) -> Environment:
    """Return the environment of the newest session that fits, or of this machine where nothing is
    said but a library; raises BadInput, which names those there are."""
    library = "tvm" if kind == "model" else asked.library
    if (asked.session_id, asked.arch, asked.device) == (None, None, None):
        conditions = {"caches": "cold"} if kind == "model" else {}
        with _as_bad_input():
            return session_environment(library or "tvm", conditions=conditions)
    with reading(open_database()) as connection:
        if asked.session_id is not None:
            with _as_bad_input():
                found = sessions.get(connection, asked.session_id).environment
            for name in ("library", "arch"):
                if getattr(asked, name) not in (None, getattr(found, name)):
                    raise BadInput(f"Session {asked.session_id} has another {name}.")
            if kind == "model" and found.library != "tvm":
                raise BadInput(f"Session {asked.session_id} belongs to {found.library}.")
            return found
        query = sa.select(sa.func.max(Session.id)).join(
            EnvironmentRow, EnvironmentRow.id == Session.environment_id
        )
        if library is not None:
            query = query.where(EnvironmentRow.library == library)
        if asked.arch is not None:
            query = query.where(EnvironmentRow.arch == asked.arch)
        if asked.device is not None:
            named = sa.func.instr(sa.func.lower(EnvironmentRow.device), asked.device.lower()) > 0
            query = query.where(named)
        session_id = connection.execute(query).scalar()
        if session_id is None:
            raise _nothing_there(connection, asked, library)
        return sessions.get(connection, session_id).environment


@contextlib.contextmanager
def _as_bad_input() -> Iterator[None]:
    """Raise BadInput in place of NotFound: what is asked of is there, what it names is not."""
    try:
        yield
    except NotFound as error:
        raise BadInput(str(error), hint=error.hint) from None


def _nothing_there(connection: sa.Connection, asked: Asked, library: str | None) -> BadInput:
    row = EnvironmentRow
    query = sa.select(row.library, row.arch, row.device).distinct().order_by(row.library, row.arch)
    there = [
        " ".join(filter(None, one)) for one in connection.execute(query.limit(_MOST_NAMED)).all()
    ]
    what = " ".join(filter(None, (library, asked.arch, asked.device)))
    return BadInput(
        f"No session, and so no worker, fits {what}.",
        hint=f"sessions: {'; '.join(there) or 'none yet'}",
    )


def cancel(request_id: int, token_id: str | None, by: str) -> TuningRequest:
    """Cancel a request, of this token if one is given: its jobs that no other request wants end
    soon. Raises NotFound, and TunaError for one that is over."""
    engine = open_database()
    with writing(engine) as connection:
        found = requests.get(connection, request_id, token_id)
        state = RequestState.CANCELED
        if not requests.move(connection, request_id, state, message=f"canceled by {by}"):
            raise TunaError(f"Request {request_id} is {found.state} already.")
        return requests.get(connection, request_id)


def delete(request_id: int, token_id: str | None) -> None:
    """Delete a request that is over, with its files; raises NotFound, TunaError for one that is
    not."""
    with writing(open_database()) as connection:
        found = requests.get(connection, request_id, token_id)
        if found.ended_at is None:
            raise TunaError(f"Request {request_id} is not over.", hint="cancel it first")
        requests.remove(connection, request_id)
    forget(found.upload, *(file.digest for file in found.files))
