"""Sessions as a whole: list, archive, restore, delete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tuna.errors import ServiceError

if TYPE_CHECKING:
    from tuna.archives.file import ArchiveHeader
    from tuna.archives.removal import Deleted
    from tuna.archives.restore import Restored
    from tuna.archives.sizes import SessionSize
    from tuna.search.siblings import WarmStart

#: Gets the number of jobs that are done, and of all.
OnJobs = Callable[[int, int], None]


def list_sessions(session_id: int | None = None) -> list[SessionSize]:
    """All sessions, or one, with their state, counts and sizes; raises NotFound. It looks at every
    trial."""
    from tuna.archives import sizes
    from tuna.db.database import open_database

    return sizes.read(open_database(), session_id)


def warm_starts(session_id: int) -> list[WarmStart]:
    """The session's searches that learn from earlier ones, with those."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.search import siblings

    with reading(open_database()) as connection:
        return siblings.of_session(connection, session_id)


def archive_session(session_id: int, path: Path, on_jobs: OnJobs | None = None) -> ArchiveHeader:
    """Write a session with everything that its results need into one file; raises NotFound,
    BadInput, StorageFull."""
    from tuna.archives.write import archive
    from tuna.db.database import open_database

    return archive(open_database(), session_id, path, on_jobs)


def restore_session(
    path: Path, reason: str | None = None, on_jobs: OnJobs | None = None
) -> Restored:
    """Restore what `archive_session` wrote, here or elsewhere; `reason`: another one than the
    archive's.

    Raises BadInput for a file that is no archive, or not whole, or of a session that is here
    already.
    """
    from tuna.archives.restore import restore
    from tuna.db.database import open_database

    return restore(open_database(), path, reason, on_jobs)


def check_deletion(session_id: int, *, cancels: bool = False) -> None:
    """Raise NotFound, or BadInput for a session that must not be deleted; `cancels`: its jobs will
    be canceled first."""
    from tuna.archives import removal
    from tuna.db.database import open_database
    from tuna.db.engine import reading

    with reading(open_database()) as connection:
        removal.check(connection, session_id, cancels=cancels)


def delete_session(session_id: int, on_jobs: OnJobs | None = None) -> tuple[Deleted, str]:
    """Delete a session; returns what was deleted, and what of it could not be removed from Redis or
    the artifact store.

    Raises as `check_deletion` does.
    """
    from tuna.api.jobs import drop_leases
    from tuna.api.services import artifact_store
    from tuna.archives import removal
    from tuna.db.database import open_database

    check_deletion(session_id)
    engine, left = open_database(), ""
    store = artifact_store(engine)

    def remove(digests: set[str]) -> None:
        nonlocal left
        if left:
            return
        try:
            store.remove(digests)
        except ServiceError as error:
            left = str(error)

    deleted = removal.delete(engine, session_id, remove, on_jobs)
    if not drop_leases(engine, deleted.chunks):
        left = left or "Redis is unreachable."
    return deleted, left
