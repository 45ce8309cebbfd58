"""Provenance of a golden version's entries, and their difference to the base version."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import aliased

from tuna.configs import read_line
from tuna.db.bulk import parts
from tuna.db.models import ConfigRow, GoldenEntry, SolverRow
from tuna.db.searches import why_ended
from tuna.errors import BadInput, NotFound
from tuna.golden.evidence import Evidence, read_evidence
from tuna.golden.versions import KEY, ReleaseEntry, Version, entries_of, find, read_entries
from tuna.libraries.exporter import LineNames, base_name
from tuna.results.selectable import RELEASES

_COMPARED = (
    *("time_ms", "solver", "workspace_bytes", "params", "algorithm", "problem_key"),
    *("session_id", "source"),
)


@dataclass(frozen=True)
class Explanation:
    """An entry, its code objects, and the same entry (device, config, solver) of the base
    version."""

    entry: ReleaseEntry
    kernels: tuple[str, ...]  #: SHA-256 of each code object
    base_version: int | None
    base: ReleaseEntry | None
    base_kernels: tuple[str, ...]
    evidence: Evidence
    #: reason of the end of the search that found it; empty: no search did, or its session has
    #: another result now
    search_ended: str = ""

    @property
    def changes(self) -> tuple[str, ...]:
        """The names of what differs from the base."""
        if self.base is None:
            return ()
        names = [
            name for name in _COMPARED if getattr(self.entry, name) != getattr(self.base, name)
        ]
        return (*names, *(["kernels"] if self.kernels != self.base_kernels else []))

    @property
    def verdict(self) -> str:
        """The entry's relation to the base's, in one sentence."""
        if self.base_version is None:
            return "the version has no base"
        if self.base is None:
            return f"new: version {self.base_version} has no such entry"
        if not self.changes:
            return f"taken over from version {self.base_version} (#{self.base.id})"
        return (
            f"replaced that of version {self.base_version} (#{self.base.id}):"
            f" {', '.join(self.changes)}"
        )

    def lines(self) -> list[str]:
        """The explanation as lines of text."""
        e = self.entry
        found = [f"#{e.id} in version {e.version}: {e.layer} on {e.arch} x {e.num_cu}, {e.solver}"]
        found += [f"  config key  {e.config_key}", f"  problem key {e.problem_key or '-'}"]
        found += _result_lines("", e, self.kernels)
        found += [f"  its search ended: {self.search_ended}"] if self.search_ended else []
        found.append(f"  {self.verdict}")
        if self.base is not None and self.changes:
            found += _result_lines("before: ", self.base, self.base_kernels)
        return found + self.evidence.lines()

    def as_json(self) -> dict[str, Any]:
        """The explanation with its evidence as one document."""
        entry = {**vars(self.entry), "kernels": self.kernels}
        base = None if self.base is None else {**vars(self.base), "kernels": self.base_kernels}
        names = ("changes", "verdict", "search_ended")
        facts = {name: getattr(self, name) for name in names}
        versions = {"base_version": self.base_version, "base": base}
        return {"entry": entry, **versions, **facts, **vars(self.evidence)}


def explain(
    connection: sa.Connection,
    version: int,
    key: str,
    solver: str | None = None,
    library: str | None = None,
) -> list[Explanation]:
    """Every entry of the version that matches `key`: an entry's id, a layer's key, problem key,
    label or driver command.

    Ordered by device, layer and time. Raises NotFound if there is none.
    """
    subject = find(connection, version, library)
    found = _ids(connection, subject, _named(key), [solver] if solver else ())
    if not found:
        with_solver = f" with {solver}" if solver else ""
        raise NotFound(f"The {subject} has no entry {key}{with_solver}.", hint=_KEYS)
    return _explanations(connection, subject, [entry_id for entry_id, _ in found])


def explain_line(
    connection: sa.Connection,
    version: int,
    names: LineNames,
    solver: str | None = None,
    library: str | None = None,
) -> list[Explanation]:
    """The fastest entry of the version, or `solver`'s, that a line of an exported database is of.

    Where none is of the device that the file is named after, one for each device. Raises NotFound.
    """
    subject = find(connection, version, library)
    row, key = ConfigRow, GoldenEntry.problem_key
    of_line: sa.ColumnElement[bool]
    if names.config_key:
        of_line = GoldenEntry.config_id.in_(sa.select(row.id).where(row.key == names.config_key))
    else:
        named = sa.select(row.id, row.problem_key).where(_begins(row.problem_key, names))
        known = connection.execute(named).all()
        told = sa.select(key).where(GoldenEntry.golden_id == subject.id, _begins(key, names))
        keys = {text for text in connection.execute(told).scalars() if names.is_key(text or "")}
        of_line = sa.or_(
            GoldenEntry.config_id.in_([row.id for row in known if names.is_key(row.problem_key)]),
            sa.and_(key.in_(keys), GoldenEntry.config_id.in_(_KEYLESS)),
        )
    solvers = [name for name in names.solvers if solver in (None, name)]
    entries = _ids(connection, subject, of_line, solvers) if solvers else []
    if not entries:
        listed = ", ".join(names.solvers)
        raise NotFound(
            f"The {subject} has no such entry of this line's layer; its solvers are {listed}.",
            hint="is the file an export of this version?",
        )
    fastest: dict[tuple[str, int], int] = {}
    for entry_id, device in entries:
        fastest.setdefault(device, entry_id)
    of_device = [key for device, key in fastest.items() if base_name(*device) == names.device]
    return _explanations(connection, subject, of_device or list(fastest.values()))


def _begins(key: Any, names: LineNames) -> sa.ColumnElement[bool]:
    found: sa.ColumnElement[bool] = key.startswith(names.keys_begin, autoescape=True)
    return found


def _ids(
    connection: sa.Connection,
    subject: Version,
    where: sa.ColumnElement[bool],
    solvers: Sequence[str],
) -> list[tuple[int, tuple[str, int]]]:
    """The ids of entries with their devices, by device, layer and time; `solvers`: all if empty."""
    row = GoldenEntry
    query = sa.select(row.id, row.arch, row.num_cu).where(row.golden_id == subject.id, where)
    if solvers:
        named = sa.select(SolverRow.id).where(SolverRow.name.in_(solvers))
        query = query.where(row.solver_id.in_(named))
    order = ("arch", "num_cu", "config_id", "time_ms", "id")
    query = query.order_by(*(getattr(row, name) for name in order))
    return [(one.id, (one.arch, one.num_cu)) for one in connection.execute(query)]


_KEYS = (
    "name an entry by its number, or a layer by config key, problem key, label or driver command"
)


#: Layers whose key is the one that a worker reported to an older version
_KEYLESS = sa.select(ConfigRow.id).where(ConfigRow.problem_key.is_(None))


def _named(key: str) -> sa.ColumnElement[bool]:
    number = key.removeprefix("#")
    if number.isascii() and number.isdigit() and len(number) < 19:
        return GoldenEntry.id == int(number)
    row = ConfigRow
    names = [column == key for column in (row.key, row.problem_key, row.label, row.driver)]
    with contextlib.suppress(BadInput):
        names += [ConfigRow.key == config.key for config in read_line(key)]
    configs = sa.select(ConfigRow.id).where(sa.or_(*names))
    told = sa.and_(GoldenEntry.problem_key == key, GoldenEntry.config_id.in_(_KEYLESS))
    return sa.or_(GoldenEntry.config_id.in_(configs), told)


def _explanations(connection: sa.Connection, subject: Version, ids: list[int]) -> list[Explanation]:
    entries = read_entries(connection, entries_of(subject), ids)
    before: dict[int, int] = {}
    if subject.base_version is not None:
        older = find(connection, subject.base_version, subject.library)
        entry, base = aliased(GoldenEntry), aliased(GoldenEntry)
        same = [getattr(entry, name) == getattr(base, name) for name in KEY]
        query = sa.select(entry.id, base.id.label("before")).join(
            base, sa.and_(base.golden_id == older.id, *same)
        )
        before = {row.id: row.before for row in connection.execute(query.where(entry.id.in_(ids)))}
        entries |= read_entries(connection, entries_of(older), before.values())
    kernels, ended = _kernels(connection, list(entries)), _searches_ended(connection, ids)
    evidence = read_evidence(connection, subject, ids)
    return [
        Explanation(
            entry=entries[number],
            kernels=kernels.get(number, ()),
            base_version=subject.base_version,
            base=entries[before[number]] if number in before else None,
            base_kernels=kernels.get(before[number], ()) if number in before else (),
            evidence=evidence[number],
            search_ended=ended.get(number, ""),
        )
        for number in ids
    ]


def _kernels(connection: sa.Connection, ids: list[int]) -> dict[int, tuple[str, ...]]:
    query = RELEASES.select("id", "digest", by=["code_number"]).order_by(
        RELEASES["id"], RELEASES["code_number"]
    )
    found: dict[int, tuple[str, ...]] = {}
    for number, digest in connection.execute(
        query.where(RELEASES["id"].in_(ids), RELEASES["digest"].is_not(None))
    ):
        found[number] = (*found.get(number, ()), digest)
    return found


def _searches_ended(connection: sa.Connection, ids: Sequence[int]) -> dict[int, str]:
    """Why the searches ended that found these entries, where their sessions still have the same
    results."""
    query = RELEASES.select("id", "job_id").where(
        RELEASES["job_id"].is_not(None), RELEASES["present_params"] == RELEASES["params"]
    )
    jobs: dict[int, int] = {}
    for some in parts(ids):
        rows = connection.execute(query.where(RELEASES["id"].in_(some)))
        jobs |= {row.id: row.job_id for row in rows}
    ended = why_ended(connection, set(jobs.values()))
    return {number: ended[job_id] for number, job_id in jobs.items() if job_id in ended}


def _result_lines(mark: str, entry: ReleaseEntry, kernels: tuple[str, ...]) -> list[str]:
    algorithm = f", {entry.algorithm}" if entry.algorithm else ""
    found = [
        f"  {mark}{entry.time_ms:.6g} ms, workspace {entry.workspace_bytes} bytes{algorithm}",
        f"  {mark}{entry.solver} [{entry.params}]",
        f"  {mark}{entry.origin}",
    ]
    return found + [f"  {mark}kernel {digest}" for digest in kernels]
