"""Restores a session from a file in one transaction: all of it, or nothing.

Rows keep their ids where these are free. If one id of a table is taken, all rows of the session in
that table get new ids, and references to them follow. Environments, solvers, configs, tags and
artifacts are shared with other sessions: existing ones stay as they are, and the session refers to
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import StatementError

from tuna.archives import tables
from tuna.archives.archive import BATCH, ArchiveHeader, ArchiveLine, rows, verify
from tuna.coordinator.find_db_writer import fits
from tuna.db import configs
from tuna.db.bulk import IN_LIST, parts, upsert
from tuna.db.engine import writing
from tuna.db.models import FindDb, Job, Session, SolverApplicability
from tuna.db.searches import begin_as_recorded
from tuna.db.session_options import SessionOptions
from tuna.errors import BadInput, StorageFull
from tuna.vocabulary import State

#: Columns by which a row of a shared table with ids is the same row in another database
_SHARED_KEYS: Mapping[str, tuple[str, ...]] = {
    "environment": ("key",),
    "device": ("environment_id", "name"),
    "solver": ("library", "name"),
    "config": ("key",),
}
#: Columns by which a row of a session, to which others refer, is found once it has a new id
_OWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "search": ("config_id", "solver_id", "steps"),
    "job": ("config_id", "solver_id", "steps", "round", "part"),
    "find_db": ("config_id", "solver_id"),
}
_Row = dict[str, Any]


@dataclass(frozen=True)
class Restored:
    """A session that was restored, with the number of its jobs."""

    session_id: int
    reason: str
    library: str
    jobs: int
    new_ids: tuple[str, ...]  #: names of the tables whose rows got new ids


def restore(
    engine: sa.Engine,
    path: Path,
    reason: str | None = None,
    on_jobs: Callable[[int, int], None] | None = None,
) -> Restored:
    """Restore an archive, under another `reason` if one is given.

    Raises BadInput for a file that is not an archive, is incomplete, or has a session that exists.
    `on_jobs` as in `archive`.
    """
    if reason is not None and not 0 < len(reason.strip()) <= 255:
        raise BadInput(
            "A session needs a reason of 1 to 255 characters.", hint="give it with --reason"
        )
    header = verify(path)
    hint = f"Tuna {header.tuna} with schema {header.schema} wrote it; where that is an older one,"
    hint += " restore it there, upgrade that database, and archive it again"
    with restoring(engine, str(path), hint) as connection:
        emptied, taken = _emptied(connection, header, path), _taken(connection, path, header)
        restoration = Restoration(connection, str(path), taken)
        for batch in _batches(rows(path), header):
            restoration.write(batch) if batch else restoration.end_batch()
            for row in batch.get("session", ()):
                own = {"reason": reason or row["reason"], "uuid": header.uuid}
                _insert_session(restoration, row | own, emptied)
            if on_jobs:
                on_jobs(restoration.jobs, header.jobs)
        if not restoration.session_id or restoration.jobs != header.jobs:
            raise BadInput(
                f"{path} is damaged: it has {restoration.jobs} of its {header.jobs} jobs."
            )
        restoration.finish()
    new = tuple(name for name in ("session", *tables.WITH_IDS) if name in restoration.new_ids)
    facts = (reason or header.reason, header.library, restoration.jobs, new)
    return Restored(restoration.session_id, *facts)


@contextlib.contextmanager
def restoring(engine: sa.Engine, what: str, hint: str = "") -> Iterator[sa.Connection]:
    """A transaction that restores a file, `what`; raises BadInput for contents that cannot be."""
    try:
        with writing(engine) as connection:
            yield connection
    except (ValueError, TypeError, LookupError, AttributeError, zlib.error) as error:
        raise BadInput(
            f"{what} cannot be restored by this version of Tuna: {error}.", hint=hint
        ) from None
    except StatementError as error:  # not of an outage or a full disk, which `writing` translates
        raise BadInput(
            f"{what} cannot be restored: {str(error.orig)[:200]}.",
            hint="if another command was writing to the database, restore it again",
        ) from None


def _batches(
    lines: Iterable[ArchiveLine], header: ArchiveHeader
) -> Iterator[dict[str, list[_Row]]]:
    """Yield bounded batches of rows by table; an empty one ends rows that refer to each other."""
    readers = {
        name: tables.RowReader(name, names)
        for name, names in header.columns.items()
        if name in _KNOWN
    }
    batch: dict[str, list[_Row]] = {}
    held_bytes = 0
    for name, value, size_bytes in lines:
        if batch and (name == BATCH or held_bytes + size_bytes > _HELD_BYTES):
            yield batch
            batch, held_bytes = {}, 0
        if name == BATCH:
            yield {}
            continue
        if name not in readers:
            raise ValueError(f"unknown table {name!s:.40}")
        batch.setdefault(name, []).append(readers[name].read(value))
        held_bytes += size_bytes
    if batch:
        yield batch


#: Maximum of bytes of the lines whose rows are in memory together
_HELD_BYTES = 4 << 20
_KNOWN = {*tables.SHARED, *tables.OWN}


@dataclass
class Restoration:
    """Inserts the rows of a session, which refer to each other by the ids of the file that they are
    from."""

    connection: sa.Connection
    what: str  #: the file, for errors
    new_ids: set[str]  #: tables whose rows get new ids
    session_id: int = 0
    jobs: int = 0
    #: ids here by table and id in the file; of configs of an archive, those of one batch alone
    ids: dict[str, dict[Any, int]] = field(default_factory=dict)

    def write(self, batch: Mapping[str, list[_Row]]) -> None:
        """Insert the rows of a batch, those that others refer to first."""
        for row in batch.get("kernel", ()):
            self._kernel(row)
        for name in _SHARED_KEYS:
            if name in batch:
                self._know(
                    name, self._merge(name, [self.translated(name, row) for row in batch[name]])
                )
        configs.write_typed(self.connection, batch.get("config", ()))
        tags = [self.translated("config_tag", row) for row in batch.get("config_tag", ())]
        upsert(self.connection, tables.table("config_tag"), tags, key=("tag", "config_id"))
        jobs = batch.get("job", ())
        for row in jobs:
            if row["state"] not in {state.value for state in State}:
                raise ValueError(f"unknown state {row['state']!r:.40}")
        self.jobs += len(jobs)
        for name in tables.OWN:
            if name != "session":
                self._know(name, self._insert(name, batch.get(name, ()), _OWN_KEYS.get(name, ())))

    def end_batch(self) -> None:
        """Forget ids of configs and their rows, to which no later row refers."""
        for name in ("config", "search", "job", "find_db"):
            self.ids.pop(name, None)

    def _know(self, name: str, ids: Mapping[int, int]) -> None:
        self.ids.setdefault(name, {}).update(ids)

    def finish(self) -> None:
        """Begin the searches as their attempts say."""
        begin_as_recorded(self.connection, self.session_id)

    def _kernel(self, row: _Row) -> None:
        blob = row["blob"]
        if hashlib.sha256(blob).hexdigest() != row["digest"] or len(blob) != row["size_bytes"]:
            raise ValueError(f"artifact {row['digest']:.64} has other bytes than its name says")
        if not fits(self.connection, len(blob)):
            raise StorageFull(
                f"An artifact of {self.what} has {len(blob) >> 20} MiB, more than the database"
                " server takes.",
                hint="set its max_allowed_packet to 256M, and restore again",
            )
        upsert(self.connection, tables.table("kernel"), [row], key=("digest",))

    def _merge(self, name: str, found: Sequence[_Row]) -> dict[int, int]:
        """Insert missing rows, compared by their keys; return the ids of all."""
        table, keys = tables.table(name), _SHARED_KEYS[name]
        there = self._ids_by_key(table, keys, found)
        missing = [row for row in found if tuple(row[key] for key in keys) not in there]
        taken: set[int] = set()
        for part in parts([row["id"] for row in missing]):
            taken |= set(
                self.connection.execute(sa.select(table.c.id).where(table.c.id.in_(part))).scalars()
            )
        kept = [row for row in missing if row["id"] not in taken]
        others = [
            {key: value for key, value in row.items() if key != "id"}
            for row in missing
            if row["id"] in taken
        ]
        for group in (kept, others):
            upsert(self.connection, table, group, key=keys)
        there |= self._ids_by_key(table, keys, missing)
        return {row["id"]: there[tuple(row[key] for key in keys)] for row in found}

    def _ids_by_key(
        self, table: sa.Table, keys: Sequence[str], found: Sequence[_Row]
    ) -> dict[tuple[Any, ...], int]:
        ids: dict[tuple[Any, ...], int] = {}
        last = keys[-1]
        for part in parts(sorted({row[last] for row in found})):
            query = sa.select(table.c.id, *(table.c[key] for key in keys)).where(
                table.c[last].in_(part)
            )
            ids |= {tuple(row[1:]): row[0] for row in self.connection.execute(query)}
        return ids

    def _insert(self, name: str, rows: Sequence[_Row], keys: Sequence[str] = ()) -> dict[int, int]:
        """Insert rows of the session; return ids by the archive's ids, matched by `keys`."""
        if not rows:
            return {}
        table = tables.table(name)
        ids = [row.get("id") for row in rows]
        translated = [self.translated(name, row) for row in rows]
        if name in self.new_ids:
            for row in translated:
                row.pop("id", None)
        for _, group in groupby(translated, key=dict.keys):  # older versions lack columns
            same = list(group)
            if name == "trial":  # a trace has those that finals measured again
                upsert(self.connection, table, same, key=("job_id", "number"), replace=True)
            else:
                self.connection.execute(sa.insert(table), same)
        if not keys:
            return {}
        if name not in self.new_ids:
            return {id_: id_ for id_ in ids if id_ is not None}
        known: dict[tuple[Any, ...], int] = {}
        columns = [table.c[key] for key in keys]
        for part in parts(sorted({row["config_id"] for row in translated})):
            where = (table.c.session_id == self.session_id, table.c.config_id.in_(part))
            for id_, *key in self.connection.execute(sa.select(table.c.id, *columns).where(*where)):
                known[tuple(key)] = id_
        pairs = zip(ids, translated, strict=True)
        return {
            id_: known[tuple(row[key] for key in keys)] for id_, row in pairs if id_ is not None
        }

    def translated(self, name: str, row: _Row) -> _Row:
        """Return the row with this database's ids in place of the archive's."""
        found = dict(row)
        for column in tables.table(name).columns:
            for foreign in column.foreign_keys:
                target, value = foreign.column.table.name, found.get(column.name)
                if value is not None and foreign.column.name == "id":
                    if value not in self.ids.get(target, {}):
                        raise ValueError(
                            f"{name}.{column.name} refers to {target} {value}, which is not in it"
                        )
                    found[column.name] = self.ids[target][value]
        return found


def _emptied(connection: sa.Connection, header: ArchiveHeader, path: Path) -> int | None:
    """The session of which golden versions kept nothing but its row; raises BadInput for one that
    is here."""
    query = sa.select(Session.id).where(Session.uuid == header.uuid)
    session_id: int | None = connection.execute(query).scalar()
    if session_id is not None and not _is_empty(connection, session_id):
        raise BadInput(
            f"{path} is session {session_id}, which is here already.",
            hint=f"see: `tuna session show {session_id}`",
        )
    return session_id


def _insert_session(restoration: Restoration, row: _Row, emptied: int | None) -> None:
    """Insert the row of a session, unless it is the `emptied` one; raises BadInput."""
    SessionOptions.stored(row["options"])
    archived, connection = row["id"], restoration.connection
    row = restoration.translated("session", row)
    same = sa.select(Session.id).where(
        Session.environment_id == row["environment_id"], Session.reason == row["reason"]
    )
    other = connection.execute(same).scalar()
    if emptied is not None:
        restoration.session_id = emptied
    elif other is not None:
        raise BadInput(
            f"Session {other} has the same environment and the same reason, {row['reason']!r}.",
            hint=f"give this one another: `tuna session restore {restoration.what} --reason TEXT`",
        )
    else:
        if connection.execute(sa.select(Session.id).where(Session.id == archived)).first():
            del row["id"]
        connection.execute(sa.insert(Session).values(**row))
        restoration.session_id = connection.execute(same).scalar_one()
    if restoration.session_id != archived:
        restoration.new_ids.add("session")
    restoration.ids["session"] = {archived: restoration.session_id}


def _taken(connection: sa.Connection, path: Path, header: ArchiveHeader) -> set[str]:
    """Return the tables in which an id of the archive is taken.

    The file is read only for tables whose ranges of ids overlap.
    """

    def has(name: str, where: sa.ColumnElement[bool]) -> bool:
        query = sa.select(tables.table(name).c.id).where(where).limit(1)
        return connection.execute(query).scalar() is not None

    columns = {name: tables.table(name).c.id for name in tables.WITH_IDS if header.ids.get(name)}
    unsure: dict[str, list[int]] = {}
    for name, column in columns.items():
        least, largest = header.ids[name]
        if has(name, column.between(least, largest)):
            unsure[name] = []
    if not unsure:
        return set()
    places = {name: header.columns[name].index("id") for name in unsure}
    taken: set[str] = set()
    for name, value, _ in rows(path):
        if name in unsure and name not in taken:
            unsure[name].append(value[places[name]])
            if len(unsure[name]) == IN_LIST:
                if has(name, columns[name].in_(unsure[name])):
                    taken.add(name)
                unsure[name] = []
    return taken | {name for name, ids in unsure.items() if has(name, columns[name].in_(ids))}


def _is_empty(connection: sa.Connection, session_id: int) -> bool:
    """Whether only the row of a session is left, which golden versions keep after its deletion."""
    for one in (Job, FindDb, SolverApplicability):
        if connection.execute(
            sa.select(one.session_id).where(one.session_id == session_id).limit(1)
        ).first():
            return False
    return True
