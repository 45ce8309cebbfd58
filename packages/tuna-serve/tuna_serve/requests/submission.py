"""Take a request in: check it, keep its file, write it down, and answer at once what is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from tuna.api.preparation import session_environment
from tuna.api.rows import EnvironmentRow, Session, open_database, reading, sessions, writing
from tuna.api.services import artifacts_of_models
from tuna.errors import BadInput, NotFound, TunaError
from tuna.libraries.base import Environment
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests import answers
from tuna_serve.requests.asked import SESSIONS, Asked, Conflict, Kind, check_limits
from tuna_serve.requests.uploads import Upload, UploadTooLarge, check_model, forget
from tuna_serve.settings import ServiceSettings

#: Bytes of a file of layers, or of a body that has them in JSON.
LAYERS_BYTES = 4 << 20
#: Architectures and devices that an error names.
_MAX_NAMED = 20


@dataclass(frozen=True)
class Submission:
    """A request as a visitor sends it."""

    asked: Asked
    kind: Kind
    upload: Upload
    filename: str
    token: str  #: id
    client_key: str | None = None
    limits: ServiceSettings | None = None  #: None: of nobody who needs any

    def row(self, trials: int) -> dict[str, Any]:
        """Return the columns of the request."""
        return {
            "token_id": self.token,
            "client_key": self.client_key,
            "digest": self.digest,
            "kind": self.kind,
            "name": self.asked.name,
            "wanted": self.asked.model_dump_json(exclude_defaults=True),
            "upload": self.upload.digest,
            "upload_bytes": self.upload.size_bytes,
            "trials": trials,
            "priority": self.asked.priority,
        }

    @property
    def digest(self) -> str:
        """SHA-256 of all that is asked for."""
        return self.asked.digest(self.kind, self.upload.digest)

    def counted_trials(self) -> int:
        """Return the trials that it counts as; raises BadInput for a file that is neither layers
        nor a model."""
        if self.kind == "layers":
            if self.upload.size_bytes > LAYERS_BYTES:
                raise UploadTooLarge(f"The file of layers has more than {LAYERS_BYTES >> 20} MiB.")
            layers = answers.read_layers(self.upload.rewound()).configs
            return self.asked.counted_trials(len(layers))
        check_model(self.filename, self.upload.rewound())
        if self.asked.library not in (None, "tvm"):
            raise BadInput(f"{self.asked.library} compiles no models.", hint="leave `library` out")
        return self.asked.counted_trials(None)

    def check_limits(self, connection: sa.Connection, trials: int) -> None:
        """Raise what `asked.check_limits` does."""
        if self.limits is not None:
            standing = requests.standing(connection, self.token)
            size_bytes = self.upload.size_bytes
            check_limits(self.limits, standing, self.asked.priority, trials, size_bytes)


def submit(submission: Submission) -> tuple[TuningRequest, bool]:
    """Return the request, which is written down, and whether it is new: with the key of an earlier
    one it is that.

    Raises BadInput, Conflict for a key under which something else was sent, LimitReached, and
    StorageFull; then nothing is kept.
    """
    engine = open_database()
    if earlier := _earlier(submission):
        return earlier, False
    trials = submission.counted_trials()
    environment = find_environment(submission.asked, submission.kind)
    with reading(engine) as connection:
        submission.check_limits(connection, trials)
    submission.upload.store(artifacts_of_models())
    try:
        with writing(engine) as connection:
            submission.check_limits(connection, trials)
            session_id, _ = sessions.create(connection, environment, SESSIONS[submission.kind])
            row = submission.row(trials)
            request_id = requests.add(connection, session_id=session_id, **row)
    except IntegrityError:
        if earlier := _earlier(submission):  # sent twice at the same moment
            return earlier, False
        raise
    submission.upload.keep()
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
                environment = sessions.get(connection, asked.session_id).environment
            for name in ("library", "arch"):
                if getattr(asked, name) not in (None, getattr(environment, name)):
                    raise BadInput(f"Session {asked.session_id} has another {name}.")
            if kind == "model" and environment.library != "tvm":
                raise BadInput(f"Session {asked.session_id} belongs to {environment.library}.")
            return environment
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
        " ".join(filter(None, one)) for one in connection.execute(query.limit(_MAX_NAMED)).all()
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
