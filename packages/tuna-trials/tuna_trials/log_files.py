"""The files of a log of trials: parts, which have the trials of any jobs, and a file for each layer
and solver. Lines of JSON, compressed by gzip."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.api.rows import FindDb, Job, TrialRow, tables
from tuna.libraries.base import FINALS
from tuna.vocabulary import State

#: Columns of a trial that a line has.
_FIELDS = (
    *("number", "params", "step", "cause", "output_tail", "time_ms", "low_ms", "high_ms"),
    *("clock", "times_ms", "ended_early", "max_error", "build_s", "measured_at"),
)
_ENDED = (State.EVALUATED.value, State.ERRORED.value)
#: Number of trials in a part, and of rows that are in memory together
_TRIALS = 10_000
#: Level of compression of parts: a fast one, because what a higher one saves does not pay for a
#: delayed run
_LEVEL = 1
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+,-]+")


class LogFile(NamedTuple):
    """A file of a log."""

    name: str
    data: bytes
    trials: int


class LogForm(NamedTuple):
    """A form of a log: what is read of jobs, and its files."""

    #: function that reads those of these jobs that have ended; of finals what they changed, again
    read: Callable[[sa.Connection, Collection[int]], Iterable[Any]]
    #: function that returns the files of what was read, by a name that is the same after a restart
    files: Callable[[Sequence[Any], str], Sequence[LogFile]]
    full: int  #: number of what was read from which on it is sent


def _part_lines(connection: sa.Connection, jobs: Collection[int]) -> Iterator[str]:
    finals = sa.select(Job.id).where(Job.id.in_(jobs), Job.steps == FINALS)
    query = sa.select(FindDb.job_id, FindDb.trial_number).where(FindDb.final_job_id.in_(finals))
    again = {(job_id, number) for job_id, number in connection.execute(query) if job_id}
    yield from (line for _, line in _lines(connection, jobs))
    owners = {job_id for job_id, _ in again}
    yield from (line for name, line in _lines(connection, owners) if name in again)


def _part(lines: Sequence[str], name: str) -> Sequence[LogFile]:
    data = gzip.compress("".join(lines).encode(), _LEVEL, mtime=0)
    return [LogFile(f"{name}.jsonl.gz", data, len(lines))]


def _job_files(connection: sa.Connection, jobs: Collection[int]) -> Iterator[LogFile]:
    finals = (Job.id.in_(jobs), Job.steps == FINALS)
    layers = sa.select(Job.session_id, Job.config_id).where(*finals).distinct()
    of_layers = [
        sa.and_(Job.session_id == session_id, Job.config_id == config_id)
        for session_id, config_id in connection.execute(layers)
    ]
    ended = _jobs(connection, sa.or_(Job.id.in_(jobs), *of_layers), Job.state.in_(_ENDED))
    names = ("session_id", "config_id", "solver_id")
    groups = {tuple(getattr(job, name) for name in names): job for job in ended.values()}
    return (_job_file(connection, job) for job in groups.values())


def _jobs(connection: sa.Connection, *where: Any) -> dict[int, Any]:
    """Jobs, without finals, by id."""
    return {job.id: job for job in tables.jobs(connection, Job.steps != FINALS, *where)}


def _trials(connection: sa.Connection, jobs: Collection[int]) -> Iterator[Mapping[str, Any]]:
    """The trials of jobs, by job and number."""
    columns = (TrialRow.job_id, *(getattr(TrialRow, name) for name in _FIELDS))
    query = sa.select(*columns).where(TrialRow.job_id.in_(jobs))
    query = query.order_by(TrialRow.job_id, TrialRow.number)
    for row in connection.execute(query, execution_options={"yield_per": _TRIALS}).mappings():
        moment = row["measured_at"]
        yield {**row, "measured_at": moment and moment.isoformat()}


def _lines(
    connection: sa.Connection, job_ids: Collection[int]
) -> Iterator[tuple[tuple[int, int], str]]:
    """Job and number, and the line, of each trial of the jobs that have ended."""
    jobs = _jobs(connection, Job.id.in_(job_ids), Job.state.in_(_ENDED))
    for job_id, rows in itertools.groupby(_trials(connection, [*jobs]), lambda row: row["job_id"]):
        job = jobs[job_id]
        named = {"session": job.uuid, "job": job_id, "label": job.label, "solver": job.solver}
        start = json.dumps({**named, "options": job.options})[:-1]
        for row in rows:  # JSON as it is stored, and then the rest
            stored = f'"config": {job.json}, "times_ms": {row["times_ms"]}'
            rest = {name: row[name] for name in _FIELDS if name != "times_ms"}
            line = f"{start}, {stored}, {json.dumps(rest)[1:]}\n"
            yield (job_id, row["number"]), line


def _job_file(connection: sa.Connection, job: Any) -> LogFile:
    """A line for each trial, by job and number; equal trials give equal bytes."""
    about = {"config": json.loads(job.json), "label": job.label, "solver": job.solver}
    names = ("session_id", "config_id", "solver_id")
    jobs = _jobs(connection, *(getattr(Job, name) == getattr(job, name) for name in names))
    lines = []
    for row in _trials(connection, [*jobs]):
        options, own = jobs[row["job_id"]].options, {name: row[name] for name in _FIELDS}
        times_ms = json.loads(row["times_ms"])
        lines.append(json.dumps({**about, "options": options, **own, "times_ms": times_ms}))
    data = gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)
    return LogFile(f"{job.key}-{_UNSAFE.sub('_', job.solver)}.jsonl.gz", data, len(lines))


#: A file for many trials of any jobs
PARTS = LogForm(_part_lines, _part, _TRIALS)
#: A file `<config key>-<solver>.jsonl.gz` for all jobs of a session's layer and solver
BY_JOB = LogForm(_job_files, lambda files, _: [*files], 1)
