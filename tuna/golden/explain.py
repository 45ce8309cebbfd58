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
from tuna.golden.versions import KEY, ReleaseEntry, Version, entries_of, find, read_entries
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
    kernels: tuple[str, ...]  #: SHA-256 of each
    base_version: int | None
    base: ReleaseEntry | None
    base_kernels: tuple[str, ...]
    #: why the search that found it ended; "": none did, or its session has another result now
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
        return found

    def as_json(self) -> dict[str, Any]:
        """The explanation, JSON-serialisable."""
        before = self.base.as_json() | {"kernels": list(self.base_kernels)} if self.base else None
        return {
            "entry": self.entry.as_json() | {"kernels": list(self.kernels)},
            "base_version": self.base_version,
            "base": before,
            "changes": list(self.changes),
            "verdict": self.verdict,
            "search_ended": self.search_ended,
        }


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
    query = sa.select(GoldenEntry.id).where(GoldenEntry.golden_id == subject.id, _named(key))
    if solver is not None:
        named = sa.select(SolverRow.id).where(SolverRow.name == solver)
        query = query.where(GoldenEntry.solver_id.in_(named))
    order = ("arch", "num_cu", "config_id", "time_ms", "id")
    query = query.order_by(*(getattr(GoldenEntry, name) for name in order))
    ids = list(connection.execute(query).scalars())
    if not ids:
        with_solver = f" with {solver}" if solver else ""
        raise NotFound(f"The {subject} has no entry {key}{with_solver}.", hint=_KEYS)
    return _explanations(connection, subject, ids)


_KEYS = (
    "name an entry by its number, or a layer by config key, problem key, label or driver command"
)


#: Layers whose key is the one that a worker reported to an older version.
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
    found = read_entries(connection, entries_of(subject), ids)
    before: dict[int, int] = {}
    if subject.base_version is not None:
        older = find(connection, subject.base_version, subject.library)
        entry, base = aliased(GoldenEntry), aliased(GoldenEntry)
        same = [getattr(entry, name) == getattr(base, name) for name in KEY]
        query = sa.select(entry.id, base.id.label("before")).join(
            base, sa.and_(base.golden_id == older.id, *same)
        )
        before = {row.id: row.before for row in connection.execute(query.where(entry.id.in_(ids)))}
        found |= read_entries(connection, entries_of(older), before.values())
    kernels, ended = _kernels(connection, list(found)), _searches_ended(connection, ids)
    return [
        Explanation(
            entry=found[number],
            kernels=kernels.get(number, ()),
            base_version=subject.base_version,
            base=found[before[number]] if number in before else None,
            base_kernels=kernels.get(before[number], ()) if number in before else (),
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
