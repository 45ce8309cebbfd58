"""The process that works on one request until it is over, or is killed: another one goes on where
it was."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Sequence

import structlog

from tuna.api import get_settings
from tuna.api.rows import keeping_open, open_database, server_errors, utc_now, writing
from tuna.common import logs, signals
from tuna.common.files import own_folder
from tuna.common.lifetime import end_with_parent
from tuna.errors import DatabaseError, ServiceError, TunaError
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.db.requests import TuningRequest
from tuna_serve.requests.layers_work import LayersWork, cancel_jobs, set_priority
from tuna_serve.requests.model_requests import ModelRequestWork
from tuna_serve.requests.uploads import forget
from tuna_serve.requests.watch import RequestCanceled, current

log = structlog.get_logger(__name__)

#: Exit code where a server is missing, or another process works on the request: try again later.
AGAIN = 75


def work_on(request_id: int) -> None:
    """Work on a request until it is over or canceled; raises what passes, such as an outage of a
    server."""
    request = current(request_id)
    if not requests.TRANSITIONS[request.state]:
        return
    work = LayersWork if request.kind == "layers" else ModelRequestWork
    try:
        work(request).run()
    except RequestCanceled:
        log.info("request canceled", request=request_id)  # the supervisor clears up
    except Exception as error:
        if server_errors.is_passing(error) or isinstance(error, ServiceError | DatabaseError):
            raise
        if not isinstance(error, TunaError):
            log.error("request failed", request=request_id, exc_info=error)
        fail(request_id, _words(error))


def _words(error: Exception) -> str:
    if not isinstance(error, TunaError):
        return f"A fault of Tuna ended it: {type(error).__name__}: {error}"
    return f"{error}\n{error.hint}" if error.hint else str(error)


def fail(request_id: int, message: str) -> None:
    """End a request without an answer, unless it was canceled meanwhile."""
    text = message.strip()[:10_000]
    with writing(open_database()) as connection:
        moved = requests.move(connection, request_id, RequestState.FAILED, message=text)
    if moved:
        request = current(request_id)
        cancel_jobs(request)
        _leave(request)


def clear_up(request: TuningRequest) -> None:
    """End a canceled request, which no process works on any more, with its jobs."""
    cancel_jobs(request)
    with writing(open_database()) as connection:
        requests.write(connection, request.id, ended_at=utc_now(), upload_bytes=0)
    _leave(request)


def _leave(request: TuningRequest) -> None:
    forget(request.upload)
    if request.session_id is not None:
        set_priority(request.session_id)


def main(argv: Sequence[str]) -> int:
    """Work on a request, with PARENT ID, until it is over or the parent ends."""
    parent, request_id = map(int, argv)
    signals.install(signals.interrupt, by_command=True)
    end_with_parent(parent)
    settings = get_settings()
    logs.configure(settings.log_level, settings.log_format)
    place = own_folder(settings.run_dir) / f"request-{request_id}.lock"
    with open(place, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return AGAIN
        try:
            with keeping_open(open_database()):
                work_on(request_id)
        except (Exception, signals.Interrupted) as error:
            log.warning("request waits", request=request_id, error=str(error)[:300])
            return AGAIN
        finally:
            place.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
