"""A table of the best results of each layer, to which sessions commit: a file in the form `json`,
shared by many masters."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import sqlalchemy as sa

from tuna.api.rows import of_session
from tuna.common.files import atomic_file
from tuna.configs import read_one
from tuna.errors import BadInput, NotFound
from tuna.exports.json_lines import JsonExporter
from tuna.libraries.results import ResultRecord, is_time


@dataclass(frozen=True)
class Commit:
    """The outcome of a commit, in the table."""

    path: Path
    results: int  #: number of the table's results, of all layers and environments
    added: int  #: number of this session's results that the table did not have
    layers: int  #: number of layers with a result of this session


def commit(connection: sa.Connection, session_id: int, path: Path, n_best: int) -> Commit:
    """Add a session's results to a table, which keeps the `n_best` of each layer and environment.

    The fastest ones are kept; of equally fast ones those that come first by solver and params. Of a
    candidate that the table has already the better time stays: one from a quiet device, then the
    shorter. Commits wait for each other. Raises BadInput for times of an emulated board, and for a
    file that is not such a table or has another layer under the key of one of these; NotFound
    without any result.
    """
    source = of_session(connection, session_id, None)
    new = [record for record in source.records(n_best) if is_time(record.time_ms)]
    if not new:
        raise NotFound(
            f"Session {session_id} has no result to commit.",
            hint="`tuna status` shows which jobs failed",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = list(JsonExporter().read(path)) if path.exists() else []
        _check_keys(path, old, {record.config_key for record in new})
        kept = list(_best([*old, *new], n_best))
        with atomic_file(path) as temporary:
            JsonExporter().write_records(temporary, kept)
    before = {_candidate(record) for record in old}
    added = {_candidate(record) for record in kept} - before
    return Commit(path, len(kept), len(added), len({record.config_key for record in new}))


def _check_keys(path: Path, old: list[ResultRecord], keys: set[str]) -> None:
    """Raise BadInput if a table's result under one of these keys is of another layer."""
    for record in old:
        if record.config_key in keys and _key(record.config) != record.config_key:
            raise BadInput(
                f"{path} has a result of {record.label} under the key of another layer.",
                hint="take its line out, or commit to another table",
            )


def _key(text: str) -> str:
    """The key of the layer that a text names; empty for none."""
    try:
        return read_one(text).key
    except BadInput:
        return ""


def _best(records: list[ResultRecord], n_best: int) -> Iterator[ResultRecord]:
    """The best of each layer and environment, by their keys, then the time, solver and params."""
    candidates: dict[tuple[str, ...], ResultRecord] = {}
    for record in records:
        there = candidates.setdefault(_candidate(record), record)
        if _rank(record) < _rank(there):
            candidates[_candidate(record)] = record
    ordered = sorted(
        candidates.values(), key=lambda one: (*_layer(one), one.time_ms, one.solver, one.params)
    )
    for _, group in groupby(ordered, key=_layer):
        yield from list(group)[:n_best]


def _layer(record: ResultRecord) -> tuple[str, str]:
    return record.config_key, record.environment.key


def _candidate(record: ResultRecord) -> tuple[str, ...]:
    return (*_layer(record), record.solver, record.params)


def _rank(record: ResultRecord) -> tuple[bool, float]:
    return record.noisy, record.time_ms or 0.0
