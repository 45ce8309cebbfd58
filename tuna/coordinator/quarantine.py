"""Sessions that a coordinator leaves out for a while, since their library's own code failed in it;
it serves the others."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import DBAPIError

from tuna.common.clocks import Throttle
from tuna.db import database, server_errors, sessions
from tuna.db.engine import transaction
from tuna.db.server_errors import ErrorKind
from tuna.jobs.serving import SessionWork
from tuna.libraries.steps import every_step

log = structlog.get_logger(__name__)

#: Seconds after which a session whose code failed is tried again
_PAUSE_S = 30.0


class Quarantine:
    """Knows these sessions, and why; `session.fault` says it to others."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._pauses: defaultdict[int, Throttle] = defaultdict(Throttle)
        self._served: set[int] = set()  # whose `session.fault` was deleted by this coordinator
        #: reasons by session, of the sessions that have not been served since
        self.faults: dict[int, str] = {}

    def others(self, works: Collection[SessionWork]) -> list[SessionWork]:
        """Return the works that are served now: their libraries say their steps, and do not
        pause."""
        served = []
        for work in works:
            if self._pauses[work.session_id].is_due:
                with self.guard(work):
                    every_step(work.library)
                    served.append(work)
        return served

    @contextlib.contextmanager
    def guard(self, work: SessionWork) -> Iterator[None]:
        """Set the session aside if a bug is raised; what is raised by servers passes."""
        try:
            yield
        except Exception as error:  # a plug-in's own code
            if server_errors.kind(error) is not ErrorKind.BUG:
                raise
            if isinstance(error, DBAPIError):
                database.check_not_upgraded(self._engine)
            fault = (
                f"the code of the library {work.library.name} failed: {type(error).__name__}:"
                f" {error}"
            )
            if not self._pauses[work.session_id].is_due:
                return
            log.error(
                "session set aside",
                session=work.session_id,
                fault=fault,
                pause_s=_PAUSE_S,
                exc_info=error,
            )
            self._pauses[work.session_id].wait(_PAUSE_S)
            self._served.discard(work.session_id)
            if self.faults.get(work.session_id) != fault:
                self.faults[work.session_id] = fault
                transaction(self._engine, sessions.set_fault, work.session_id, fault)

    def served(self, work: SessionWork) -> None:
        """Note that the session was served without an error."""
        self.faults.pop(work.session_id, None)
        if work.session_id not in self._served:
            self._served.add(work.session_id)
            transaction(self._engine, sessions.set_fault, work.session_id, None)
