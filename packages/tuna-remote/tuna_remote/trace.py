"""The trace file of a session: changes of its jobs are appended to it, with results.

Lines of JSON. The first names the session and its environment, each other one a job (config,
solver, steps) with its state and attempt and, for a job that has ended, its result: trials, its
find-db rows, and their artifacts (`packed`). The last line of a job counts, so that repeating one
changes nothing. A line is written after the transaction that it reports, and `record` of the next
process writes the lines that a killed one could not. `trace_restore` makes the session again in a
database that does not have it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import sqlalchemy as sa

from tuna.api.rows import (
    SESSION_UUID,
    FindDb,
    FindDbKernel,
    Job,
    KernelRow,
    Session,
    SolverRow,
    StepResultRow,
    TrialRow,
    parts,
    reading,
    rows_among,
    sessions,
    tables,
)
from tuna.common.files import bounded_lines
from tuna.common.version import __version__
from tuna.errors import BadInput, StorageFull
from tuna.libraries.base import FINALS, Environment
from tuna.vocabulary import END_STATES, IN_FLIGHT

FORMAT, VERSION = "tuna-trace", 1
_HEAD = f'{{"format":"{FORMAT}"'.encode()
#: Columns that distinguish the jobs of a config and solver.
OF_JOB = ("steps", "round", "part")
_PASSING = frozenset(state.value for state in IN_FLIGHT)
#: Columns that are valid in one database only: ids, and the state of jobs in flight.
LOCAL: Mapping[str, frozenset[str]] = {
    "job": frozenset(
        {"id", "session_id", "config_id", "solver_id", "search_id", "chunk", "leased_at"}
    ),
    "step_result": frozenset({"id", "job_id"}),
    "trial": frozenset({"id", "job_id"}),
    "find_db": frozenset({"id", "session_id", "config_id", "solver_id", "job_id", "final_job_id"}),
    "find_db_kernel": frozenset({"find_db_id"}),
}


#: Bounds of a line, which may hold the artifacts of a result, and of the file.
_MAX_LINE_BYTES, _MAX_BYTES = 256 << 20, 64 << 30
_MAX_HEAD_BYTES = 1 << 20


class JobName(NamedTuple):
    """Key of a job that is the same in every database."""

    config: str  #: key
    solver: str
    steps: str
    round: int = 0
    part: int = 0


class TraceHeader(NamedTuple):
    """The session that a trace is of."""

    uuid: str
    label: str
    environment: Environment


class Trace:
    """A trace file that this process alone appends to."""

    def __init__(self, path: Path) -> None:
        """Raise BadInput for a file that is not a trace, or that another process holds."""
        self.path = path
        self.header: TraceHeader | None = None
        self._written: dict[JobName, tuple[str, int]] = {}
        self._artifacts: set[str] = set()
        self._lock = threading.Lock()  # the drain may be a thread
        try:
            self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115  # until `close`
        except OSError as error:
            raise BadInput(f"The trace file {path} cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self.close()
            raise BadInput(
                f"Another master writes to the trace file {path}.", hint="give each its own"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process append; a file without a line is removed."""
        if self.header is None and not os.fstat(self._file.fileno()).st_size:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and document of each line after the first; raises BadInput.

        A last line that a killed process left incomplete is cut off.
        """
        self._file.seek(0)
        end = 0
        for number, line in enumerate(
            bounded_lines(self._file, self.path, _MAX_LINE_BYTES, _MAX_BYTES), 1
        ):
            try:
                document = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                document = None
            if not isinstance(document, dict):
                if number == 1 and not (line.startswith(_HEAD) or _HEAD.startswith(line)):
                    raise BadInput(f"{self.path} is not a trace file.")
                if self._file.read(1):
                    raise BadInput(f"{self.path}:{number}: this line of the trace file is damaged.")
                self._file.truncate(end)
                return
            end += len(line)
            if number == 1:
                self.header = _header(self.path, document)
            else:
                yield number, document

    def begin(self, engine: sa.Engine, session_id: int) -> None:
        """Name the session in the first line, unless it is there."""
        if self.header is not None:
            return
        with reading(engine) as connection:
            info = sessions.get(connection, session_id)
            uuid = connection.execute(
                sa.select(Session.uuid).where(Session.id == session_id)
            ).scalar_one()
        self.header = TraceHeader(uuid, info.reason, info.environment)
        named = {
            "format": FORMAT,
            "version": VERSION,
            "tuna": __version__,
            "session": uuid,
            "label": info.reason,
        }
        self._append([{**named, "environment": vars(info.environment)}])

    def record(
        self, engine: sa.Engine, session_id: int, job_ids: Collection[int] | None = None
    ) -> list[int]:
        """Append a line for each job of the session, or of `job_ids`, whose state has changed.

        Returns the jobs that have ended since. Raises StorageFull.
        """
        with self._lock, reading(engine) as connection:
            assert self.header is not None
            lines, ended = [], []
            for job, about in _jobs(connection, session_id, job_ids):
                name = JobName(about.key, about.solver, *(job[key] for key in OF_JOB))
                state = (job["state"], job["attempt"])
                if job["state"] in _PASSING or self._written.get(name) == state:
                    continue
                has_ended = job["state"] in END_STATES
                result = self._result(connection, job, about.body) if has_ended else None
                named = {"config": json.loads(about.json), "key": about.key, "solver": about.solver}
                named |= {key: job[key] for key in (*OF_JOB, "reason", "options")}
                line = {"session": self.header.uuid, "job": named}
                lines.append({**line, "state": state[0], "attempt": state[1], "result": result})
                self._written[name] = state
                ended += [job["id"]] if has_ended else []
            self._append(lines)
        return ended

    def _read(self) -> None:
        for number, line in self.lines():
            try:
                self._written[job_name(line)] = (str(line["state"]), int(line["attempt"]))
                self._artifacts |= (line["result"] or {}).get("artifacts", {}).keys()
            except (LookupError, TypeError, ValueError, AttributeError):
                raise BadInput(
                    f"{self.path}:{number}: this line of the trace file is damaged."
                ) from None

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines, which are on the disk when this returns."""
        if not lines:
            return
        data = "".join(
            json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines
        )
        try:
            self._file.write(data.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageFull(
                f"The trace file {self.path} cannot be written: {error.strerror}."
            ) from None

    def _result(
        self, connection: sa.Connection, job: Mapping[str, Any], body: str | None
    ) -> dict[str, Any]:
        of_job = TrialRow.job_id == job["id"]
        best = [FindDb.session_id == job["session_id"], FindDb.config_id == job["config_id"]]
        if job["steps"] == FINALS:
            best.append(FindDb.final_job_id == job["id"])
            measured = sa.and_(
                FindDb.job_id == TrialRow.job_id, FindDb.trial_number == TrialRow.number
            )
            of_job = sa.exists().where(measured, *best)
        else:
            best.append(FindDb.job_id == job["id"])
        rows = tables.rows(connection, "find_db", *best).mappings().all()
        result: dict[str, Any] = {
            "job": plain("job", job),
            "step_result": _rows(connection, "step_result", StepResultRow.job_id == job["id"]),
            "trial": _rows(connection, "trial", of_job, _owner(TrialRow.job_id)),
            "find_db": [self._best(connection, dict(row)) for row in rows],
        }
        needed = {job["workload"], body, *(row["workload"] for row in rows)}
        needed |= {code["kernel"] for row in result["find_db"] for code in row["kernels"]}
        kernels = sa.select(KernelRow.digest, KernelRow.blob)
        new = rows_among(connection, kernels, KernelRow.digest, needed - {None} - self._artifacts)
        artifacts = {digest: packed(blob) for digest, blob in new}
        self._artifacts |= artifacts.keys()
        return {**result, "artifacts": artifacts}

    def _best(self, connection: sa.Connection, row: Mapping[str, Any]) -> dict[str, Any]:
        """A find-db row with names in place of ids."""
        code = _rows(connection, "find_db_kernel", FindDbKernel.find_db_id == row["id"])
        jobs = {name: _owner_of(connection, row[f"{name}_id"]) for name in ("job", "final_job")}
        return {**plain("find_db", row), **jobs, "kernels": code}


def job_name(line: Mapping[str, Any]) -> JobName:
    """The job of a line; raises LookupError or TypeError."""
    return job_of(str(line["job"]["key"]), line["job"])


def job_of(config: str, named: Mapping[str, Any]) -> JobName:
    """The job of a config that these fields name; raises LookupError, TypeError or ValueError."""
    # traces of older releases lack these
    rounds = (int(named.get(name, 0)) for name in ("round", "part"))
    return JobName(config, str(named["solver"]), str(named["steps"]), *rounds)


def packed(blob: bytes) -> str:
    """Encode an artifact for a line: zlib, then base64."""
    return base64.b64encode(zlib.compress(blob)).decode()


def plain(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON, without its `LOCAL` columns."""
    kept = [key for key in row if key not in LOCAL[name]]
    return dict(zip(kept, tables.values([row[key] for key in kept]), strict=True))


def header_of(path: Path) -> TraceHeader | None:
    """The first line of a trace file; None for another file, and one that a process appends to."""
    with contextlib.suppress(OSError, ValueError, BadInput), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _header(path, json.loads(file.readline(_MAX_HEAD_BYTES)))
    return None


def _header(path: Path, line: Mapping[str, Any]) -> TraceHeader:
    if line.get("format") != FORMAT:
        raise BadInput(f"{path} is not a trace file.")
    if line.get("version") != VERSION:
        raise BadInput(
            f"{path} is a trace file of Tuna {line.get('tuna')}, which this version does not read."
        )
    try:
        uuid = str(line["session"])
        if re.fullmatch(SESSION_UUID, uuid):
            return TraceHeader(uuid, str(line["label"]), Environment(**line["environment"]))
        raise ValueError(uuid)
    except (LookupError, TypeError, ValueError):
        raise BadInput(f"{path}:1: this line of the trace file is damaged.") from None


def _jobs(
    connection: sa.Connection, session_id: int, job_ids: Collection[int] | None
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each job's row, by id, and what `tables.jobs` has beside; the row of a search's first round
    says why that ended."""
    names = [column.name for column in tables.table("job").columns]
    for part in [None] if job_ids is None else parts(sorted(job_ids)):
        chosen = () if part is None else (Job.id.in_(part),)
        for row in tables.jobs(connection, Job.session_id == session_id, *chosen):
            job = dict(zip(names, row, strict=False))
            is_first = row.search_id is not None and row.round == 0
            yield job | ({"stopped": row.search_stopped} if is_first else {}), row


def _owner(job_id: Any) -> Sequence[Any]:
    """Columns that name the job of a row, for a query on it."""
    of_job = [sa.select(getattr(Job, name)).where(Job.id == job_id) for name in OF_JOB]
    solver = (
        sa.select(SolverRow.name).join(Job, Job.solver_id == SolverRow.id).where(Job.id == job_id)
    )
    named = zip(("solver", *OF_JOB), (solver, *of_job), strict=True)
    return [query.scalar_subquery().label(name) for name, query in named]


def _owner_of(connection: sa.Connection, job_id: int | None) -> list[Any] | None:
    """Solver, steps, round and part of a job."""
    jobs = tables.jobs(connection, Job.id == job_id)
    return next(([job.solver, *(getattr(job, key) for key in OF_JOB)] for job in jobs), None)


def _rows(
    connection: sa.Connection, name: str, where: sa.ColumnElement[bool], more: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    found = tables.rows(connection, name, where, more=more)
    return [plain(name, dict(row)) for row in found.mappings()]
