"""Deleting the trials of a session that are in an archive and that no result needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.archives import sizes
from tuna.archives.archive import ArchiveLine, archive, rows, verify
from tuna.archives.parts import fetched, temporary
from tuna.db.bulk import parts
from tuna.db.engine import reading, transaction
from tuna.db.models import FindDb, Job, TrialRow
from tuna.db.types import timed, utc_now
from tuna.errors import BadInput

_TRIAL = TrialRow.__tablename__
_ENDED = ("ended", "empty")
#: Condition under which a trial may be chosen, as exports choose, and its time
_GOOD = (
    sa.and_(
        TrialRow.cause.is_(None), timed(TrialRow.time_ms), TrialRow.ended_early.is_(False)
    ).label("is_good"),
    TrialRow.time_ms,
)


@dataclass
class Pruned:
    """Numbers of a session's trials."""

    deleted: int = 0
    kept: int = 0


def prune(engine: sa.Engine, session_id: int, keep: int, place: str, home: Path) -> Pruned:
    """Delete the trials of a session but those of results, the `keep` fastest of each layer and
    solver, and one failure of each cause; repeatable if interrupted.

    Nothing is deleted unless the archive at `place`, a file or URL, has every row of the session as
    it is. Raises NotFound, and BadInput for a session with open jobs and for such an archive.
    """
    (session,) = sizes.read(engine, session_id)
    if session.state not in _ENDED:
        raise BadInput(
            f"Session {session_id} has open jobs, which may need its trials.",
            hint=f"end them: `tuna run --session-id {session_id}`, or `tuna cancel`",
        )
    archived_at = utc_now()
    with temporary(home) as folder, fetched(place, home, session.uuid) as path:
        _require_whole(engine, session, path, folder / "now")
    of_session = sa.select(Job.config_id).where(Job.session_id == session_id).distinct()
    with reading(engine) as connection:
        configs = connection.execute(of_session.order_by(Job.config_id)).scalars().all()
    done = Pruned()
    for config_id in configs:
        pruned = transaction(engine, _prune_layer, session_id, config_id, keep, archived_at)
        done.deleted += pruned.deleted
        done.kept += pruned.kept
    return done


def _require_whole(
    engine: sa.Engine, session: sizes.SessionSize, path: Path, now_path: Path
) -> None:
    """Raise BadInput unless an archive has all rows of the session as they are; it may have more
    trials, which were deleted by an earlier call."""
    found = verify(path)
    if found.uuid != session.uuid:
        raise BadInput(
            f"{path} has another session, {found.uuid} ({found.reason}).",
            hint=f"archive this one: `tuna session archive {session.id} ...`",
        )
    now = archive(engine, session.id, now_path)
    other = found.columns != now.columns and "columns"
    if table := other or _first_missing(rows(now_path), rows(path)):
        raise BadInput(
            f"{path} lacks some of session {session.id} as it is now: {table} differ.",
            hint=f"archive it again: `tuna session archive {session.id} ...`",
        )


def _first_missing(here: Iterator[ArchiveLine], there: Iterator[ArchiveLine]) -> str:
    """The table of the first row that is not in both; empty: all of `here` are `there`, with
    nothing but trials between them."""
    for name, value, _ in here:
        for other, found, _ in there:
            if (other, found) == (name, value):
                break
            if other != _TRIAL:
                return f"rows of table {name}"
        else:
            return f"rows of table {name}"
    return next((f"rows of table {name}" for name, *_ in there if name != _TRIAL), "")


def _prune_layer(
    connection: sa.Connection, session_id: int, config_id: int, keep: int, archived_at: datetime
) -> Pruned:
    columns = (*(TrialRow.id, TrialRow.job_id, TrialRow.number, TrialRow.cause), Job.solver_id)
    of_layer = sa.select(*columns, Job.state, Job.updated_at, *_GOOD).join(
        Job, Job.id == TrialRow.job_id
    )
    of_layer = of_layer.where(Job.session_id == session_id, Job.config_id == config_id)
    trials = connection.execute(of_layer.order_by(TrialRow.job_id, TrialRow.number)).all()
    if any(row.updated_at >= archived_at for row in trials):  # such as by `tuna retry`
        return Pruned(0, len(trials))
    results = sa.select(FindDb.job_id, FindDb.trial_number).where(
        FindDb.session_id == session_id, FindDb.config_id == config_id
    )
    needed = {tuple(row) for row in connection.execute(results)}
    kept = {row.id for row in trials if (row.job_id, row.number) in needed}
    good: dict[int, list[Any]] = defaultdict(list)
    failed: dict[tuple[Any, ...], int] = {}
    for row in trials:
        if row.is_good:
            good[row.solver_id].append(row)
        elif row.cause is not None:
            failed[row.solver_id, row.cause] = row.id
            failed.setdefault((row.job_id,), row.id)  # a failed job's command is that of the first
    for of_solver in good.values():
        kept |= {row.id for row in sorted(of_solver, key=lambda row: row.time_ms)[:keep]}
    kept |= {*failed.values()}
    gone = [row.id for row in trials if row.id not in kept]
    for part in parts(gone):
        connection.execute(sa.delete(TrialRow).where(TrialRow.id.in_(part)))
    return Pruned(len(gone), len(trials) - len(gone))
