"""Sessions: options, archives, deletion, and how they go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from tuna.api.jobs import drop_leases
from tuna.api.opened import on_connection
from tuna.api.services import artifact_store, namespace
from tuna.archives import removal, sizes
from tuna.archives.archive import ArchiveHeader, archive
from tuna.archives.parts import SentArchive, fetched, is_url, send, temporary
from tuna.archives.pruning import Pruned, prune
from tuna.archives.removal import Deleted
from tuna.archives.restore import Restored, restore
from tuna.db import sessions
from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna.db.session_options import SessionOptions
from tuna.errors import ServiceError
from tuna.jobs.history import warm_starts_of_session
from tuna.reports import status
from tuna.reports.status import Outlook, Watcher, live_workers, read_outlook
from tuna.settings import get_settings

#: Callback that gets the number of jobs that are done, and of all
OnJobs = Callable[[int, int], None]

check_deletion = on_connection(removal.check)
warm_starts = on_connection(warm_starts_of_session)


def set_session(session_id: int, **values: object) -> SessionOptions:
    """Change options of a session, None for the default, and return all; raises NotFound,
    BadInput."""
    with writing(open_database()) as connection:
        return sessions.set_options(connection, session_id, values)


def archive_session(
    session_id: int, place: str | Path, on_jobs: OnJobs | None = None
) -> tuple[ArchiveHeader, SentArchive]:
    """Write a session with everything that its results need into one file, or in parts to a URL,
    where those that are there are not sent again.

    Raises NotFound, BadInput, StorageFull, and StoreUnavailable.
    """
    engine = open_database()
    if not is_url(str(place)):
        header = archive(engine, session_id, Path(place), on_jobs)
        size_bytes = Path(place).stat().st_size
        return header, SentArchive(size_bytes, size_bytes)
    with temporary(get_settings().home) as folder:
        header = archive(engine, session_id, folder / "archive", on_jobs)
        (session,) = sizes.read(engine, session_id)
        return header, send(folder / "archive", str(place), header, session.trials)


def restore_session(
    place: str | Path, reason: str | None = None, on_jobs: OnJobs | None = None
) -> Restored:
    """Restore what `archive_session` wrote, here or elsewhere; `reason`: another one than the
    archive's.

    Raises BadInput for a file or URL that has no archive, or not a whole one, or that of a session
    that is here already.
    """
    engine = open_database()
    with fetched(str(place), get_settings().home) as path:
        return restore(engine, path, reason, on_jobs)


def prune_session(session_id: int, keep: int, archived: str | Path) -> Pruned:
    """Delete the trials of a session that an archive has and that nothing needs; see
    `archives.pruning.prune`."""
    return prune(open_database(), session_id, keep, str(archived), get_settings().home)


def delete_session(session_id: int, on_jobs: OnJobs | None = None) -> tuple[Deleted, str]:
    """Delete a session; returns what was deleted, and what of it could not be removed from Redis or
    the artifact store.

    Raises as `check_deletion` does.
    """
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
    store.sweep()
    if not drop_leases(engine, deleted.chunks):
        left = left or "Redis is unreachable."
    return deleted, left


def outlook(session_id: int) -> Outlook | None:
    """Return the jobs left of a session, whether it can keep its deadline, and the error of the
    prediction.

    None if its library is not installed here. Raises NotFound.
    """
    return read_outlook(open_database(), get_settings(), session_id)


def workers_aside() -> dict[str, str]:
    """Return why workers take nothing for the moment, by name; none if Redis does not answer."""
    live = live_workers(get_settings(), namespace(open_database())) or ()
    return {one.name: one.aside for one in live if one.aside}


def dropped_messages() -> int:
    """Return how many messages workers dropped because no coordinator sent them; 0 if Redis does
    not answer."""
    return status.dropped_messages(get_settings())


def waits(session_ids: Collection[int]) -> dict[int, str]:
    """Return what the published jobs of sessions wait for, such as "an eval worker", by session;
    without those that workers are at work on."""
    return status.waits(open_database(), get_settings(), session_ids)


def watcher(session_id: int | None = None) -> Watcher:
    """Watcher of all sessions or one, to be polled with `look()`: rates, ETA, efficiency,
    workers."""
    return Watcher(open_database(), get_settings(), session_id)
