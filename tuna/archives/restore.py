"""Restores a session from a file in one transaction: all of it, or nothing.

Rows keep their ids where these are free. If one id of a table is taken, all rows of the session in
that table get new ids, and references to them follow. Environments, solvers, configs, tags and
artifacts are shared with other sessions: existing ones stay as they are, and the session refers to
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

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
from tuna.vocabulary import SEARCH, State

#: Columns by which a row of a shared table with ids is the same row in another database
_SHARED_KEYS: Mapping[str, tuple[str, ...]] = {
    "environment": ("key",),
    "device": ("environment_id", "name"),
    "solver": ("library", "name"),
    "config": ("key",),
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
    try:
        with writing(engine) as connection:
            restoration = _Restoration(connection, header, path, reason)
            done = 0
            for batch in _batches(rows(path), header):
                restoration.write(batch) if batch else restoration.end_batch()
                done += len(batch.get("job", ()))
                if on_jobs:
                    on_jobs(done, header.jobs)
            return restoration.finish()
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadInput(
            f"{path} cannot be restored by this version of Tuna: {error}.",
            hint=f"Tuna {header.tuna} wrote it",
        ) from None
    except StatementError as error:  # not of an outage or a full disk, which `writing` translates
        raise BadInput(
            f"{path} cannot be restored: {str(error.orig)[:200]}.",
            hint="if another command was writing to the database, restore it again",
        ) from None


def _batches(
    lines: Iterable[ArchiveLine], header: ArchiveHeader
) -> Iterator[dict[str, list[_Row]]]:
    """Yield bounded batches of rows by table; an empty one ends rows that refer to each other."""
    older = _OlderRows() if "search" not in header.columns else None
    columns = older.columns(header.columns) if older else header.columns
    readers: dict[str, tables.RowReader] = {
        name: (tables.FormerSessions if _is_former(name, names) else tables.RowReader)(name, names)
        for name, names in columns.items()
        if name in _KNOWN
    }
    batch: dict[str, list[_Row]] = {}
    held_bytes = 0
    for name, value, size_bytes in lines:
        if older is not None:
            name = older.TABLES.get(name, name)
        if batch and (name == BATCH or held_bytes + size_bytes > _HELD_BYTES):
            yield older.upgraded(batch) if older else batch
            batch, held_bytes = {}, 0
        if name == BATCH:
            yield {}
            continue
        if name not in readers:
            raise ValueError(f"unknown table {name!s:.40}")
        batch.setdefault(name, []).append(readers[name].read(value))
        held_bytes += size_bytes
    if batch:
        yield older.upgraded(batch) if older else batch


class _OlderRows:
    """Rows of an archive without the table `search`: a search has the id of the first of the jobs
    that were its rounds."""

    TABLES: ClassVar[Mapping[str, str]] = {"search_sibling": "warm_start"}  #: new names of tables

    def __init__(self) -> None:
        self._searches: dict[tuple[Any, ...], int] = {}  # by config, solver and steps

    def columns(self, found: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
        """The columns of each table, with their new names."""
        named = {self.TABLES.get(name, name): names for name, names in found.items()}
        if "warm_start" in named:
            named["warm_start"] = [
                "search_id" if name == "job_id" else name for name in named["warm_start"]
            ]
        return named

    def upgraded(self, batch: dict[str, list[_Row]]) -> dict[str, list[_Row]]:
        """The same rows with their searches."""
        for row in batch.get("job", ()):
            if not row["steps"].startswith(f"{SEARCH},"):
                row["search_id"] = None
                continue
            key = (row["config_id"], row["solver_id"], row["steps"])
            if key not in self._searches:
                self._searches[key] = row["id"]
                names = ("id", "session_id", "config_id", "solver_id", "steps", "reason", "options")
                search = {name: row[name] for name in names} | {"stopped": row.get("stopped")}
                batch.setdefault("search", []).append(search)
            row |= {"search_id": self._searches[key], "stopped": None}
        return batch


def _is_former(name: str, names: Collection[str]) -> bool:
    return name == "session" and "options" not in names


#: Maximum of bytes of the lines whose rows are in memory together
_HELD_BYTES = 4 << 20
_KNOWN = {*tables.SHARED, *tables.OWN}


@dataclass
class _Restoration:
    connection: sa.Connection
    header: ArchiveHeader
    path: Path
    reason: str | None
    session_id: int = 0
    jobs: int = 0
    #: ids here by table and id in the archive; of configs, those of one batch alone
    ids: dict[str, dict[int, int]] = field(default_factory=dict)
    new_ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        found = self.connection.execute(
            sa.select(Session.id).where(Session.uuid == self.header.uuid)
        ).scalar()
        if found is not None and not _is_empty(self.connection, found):
            raise BadInput(
                f"{self.path} is session {found}, which is here already.",
                hint=f"see: `tuna session show {found}`",
            )
        self.emptied = found
        self.new_ids |= _taken(self.connection, self.path, self.header)
        if "search" not in self.header.columns:
            self.new_ids.add("search")

    def write(self, batch: Mapping[str, list[_Row]]) -> None:
        """Insert the rows of a batch, those that others refer to first."""
        for row in batch.get("kernel", ()):
            self._kernel(row)
        for name in _SHARED_KEYS:
            if name in batch:
                self._know(
                    name, self._merge(name, [self._translated(name, row) for row in batch[name]])
                )
        if "session" in batch:
            self._session(*batch["session"])
        configs.write_typed(self.connection, batch.get("config", ()))
        tags = [self._translated("config_tag", row) for row in batch.get("config_tag", ())]
        upsert(self.connection, tables.table("config_tag"), tags, key=("tag", "config_id"))
        for name in ("solver_applicability", "no_solver"):
            self._insert(name, batch.get(name, []))
        searches = batch.get("search", [])
        self._know("search", self._insert("search", searches, ("config_id", "solver_id", "steps")))
        jobs = batch.get("job", [])
        for row in jobs:
            if row["state"] not in {state.value for state in State}:
                raise ValueError(f"unknown state {row['state']!r:.40}")
        self._know(
            "job", self._insert("job", jobs, ("config_id", "solver_id", "steps", "round", "part"))
        )
        self.jobs += len(jobs)
        for name in ("step_result", "trial"):
            self._insert(name, batch.get(name, []))
        self._know(
            "find_db", self._insert("find_db", batch.get("find_db", []), ("config_id", "solver_id"))
        )
        self._insert("find_db_kernel", batch.get("find_db_kernel", []))
        self._insert("warm_start", batch.get("warm_start", []))

    def end_batch(self) -> None:
        """Forget ids of configs and their rows, to which no later row refers."""
        for name in ("config", "search", "job", "find_db"):
            self.ids.pop(name, None)

    def _know(self, name: str, ids: Mapping[int, int]) -> None:
        self.ids.setdefault(name, {}).update(ids)

    def finish(self) -> Restored:
        """Return the outcome; raises BadInput unless all jobs of the header are there."""
        if not self.session_id or self.jobs != self.header.jobs:
            raise BadInput(
                f"{self.path} is damaged: it has {self.jobs} of its {self.header.jobs} jobs."
            )
        begin_as_recorded(self.connection, self.session_id)
        reason = self.reason or self.header.reason
        new = tuple(name for name in ("session", *tables.WITH_IDS) if name in self.new_ids)
        return Restored(self.session_id, reason, self.header.library, self.jobs, new)

    def _kernel(self, row: _Row) -> None:
        blob = row["blob"]
        if hashlib.sha256(blob).hexdigest() != row["digest"] or len(blob) != row["size_bytes"]:
            raise ValueError(f"artifact {row['digest']:.64} has other bytes than its name says")
        if not fits(self.connection, len(blob)):
            raise StorageFull(
                f"An artifact of {self.path} has {len(blob) >> 20} MiB, more than the database"
                " server takes.",
                hint="set its max_allowed_packet to 256M, and restore again",
            )
        upsert(self.connection, tables.table("kernel"), [row], key=("digest",))

    def _session(self, row: _Row) -> None:
        """Insert the session, or take the row that golden versions kept of it."""
        SessionOptions.stored(row["options"])
        row = self._translated("session", row) | {
            "reason": self.reason or row["reason"],
            "uuid": self.header.uuid,
        }
        same = sa.select(Session.id).where(
            Session.environment_id == row["environment_id"], Session.reason == row["reason"]
        )
        other = self.connection.execute(same).scalar()
        archived = row["id"]
        if self.emptied is not None:
            self.session_id = self.emptied
        elif other is not None:
            raise BadInput(
                f"Session {other} has the same environment and the same reason, {row['reason']!r}.",
                hint=f"give this one another: `tuna session restore {self.path} --reason TEXT`",
            )
        else:
            if (
                self.connection.execute(
                    sa.select(Session.id).where(Session.id == archived)
                ).scalar()
                is not None
            ):
                del row["id"]
            self.connection.execute(sa.insert(Session).values(**row))
            self.session_id = self.connection.execute(same).scalar_one()
        if self.session_id != archived:
            self.new_ids.add("session")
        self.ids["session"] = {archived: self.session_id}

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

    def _insert(self, name: str, found: Sequence[_Row], keys: Sequence[str] = ()) -> dict[int, int]:
        """Insert rows of the session; return ids by the archive's ids, matched by `keys`."""
        if not found:
            return {}
        table = tables.table(name)
        ids = [row.get("id") for row in found]
        translated = [self._translated(name, row) for row in found]
        if name in self.new_ids:
            for row in translated:
                del row["id"]
        self.connection.execute(sa.insert(table), translated)
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

    def _translated(self, name: str, row: _Row) -> _Row:
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
