"""Logs of all trials: of each job a file `<config key>-<solver>.jsonl.gz` in a folder of its
target, at any fsspec URL."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterable
from typing import Any

import fsspec
import sqlalchemy as sa
import structlog

from tuna.api.rows import ConfigRow, Job, SolverRow, TrialRow, parts, reading
from tuna.errors import BadInput, ServiceError
from tuna.exports.trial_log import ENDED, FIELDS, of_jobs
from tuna.libraries.base import FINALS

log = structlog.get_logger(__name__)

_UNSAFE = re.compile(r"[^A-Za-z0-9._=+,-]+")
_NAME_CHARS = 200
#: Seconds of pause after a store has failed
_AGAIN_S = 10.0


class TrialLogs:
    """Writes the logs of jobs that have ended; what fails is tried again, at the latest by
    `finish`."""

    def __init__(self, engine: sa.Engine, session_id: int, url: str, target: str) -> None:
        """`target`: its name, of which the folder's is made. Raises BadInput for a URL that fsspec
        does not know."""
        self._engine, self._session_id = engine, session_id
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise BadInput(f"No logs can be written to {_without_secrets(url)}: {error}.") from None
        folder = _UNSAFE.sub("_", target)[:_NAME_CHARS]
        self._folder = f"{root.rstrip('/')}/{folder}"
        self.url = f"{_without_secrets(url).rstrip('/')}/{folder}"
        self._waiting: set[int] = set()
        self._again_at = 0.0

    def begin(self) -> None:
        """Note the jobs that have ended and have no log, as after an interruption."""
        with reading(self._engine) as connection:
            query = _jobs(self._session_id).with_only_columns(Job.id, ConfigRow.key, SolverRow.name)
            ended = connection.execute(query.where(Job.state.in_(ENDED))).all()
        if not ended:
            return
        try:
            there = {
                str(name).rpartition("/")[2] for name in self._files.ls(self._folder, detail=False)
            }
        except FileNotFoundError:
            there = set()
        except Exception as error:  # each fsspec implementation raises its own classes
            raise ServiceError(f"The logs at {self.url} cannot be listed: {error}.") from None
        self._waiting |= {
            job_id for job_id, key, solver in ended if _name(key, solver) not in there
        }

    def write(self, job_ids: Iterable[int]) -> None:
        """Write the logs of jobs that have just ended; for finals again those of their layers,
        whose times they changed."""
        with reading(self._engine) as connection:
            for part in parts(sorted(job_ids)):
                configs = sa.select(Job.config_id).where(Job.id.in_(part), Job.steps == FINALS)
                wanted = sa.or_(Job.id.in_(part), Job.config_id.in_(configs))
                query = (
                    _jobs(self._session_id)
                    .with_only_columns(Job.id)
                    .where(Job.state.in_(ENDED), wanted)
                )
                self._waiting |= set(connection.execute(query).scalars())
        self.flush()

    def flush(self) -> None:
        """Write what waits, unless the store has just failed."""
        if not self._waiting or time.monotonic() < self._again_at:
            return
        try:
            self._flush()
        except ServiceError as error:
            self._again_at = time.monotonic() + _AGAIN_S
            log.warning("trial logs are written later", reason=str(error))

    def finish(self) -> None:
        """Write what still waits; raises ServiceError."""
        self._flush()

    def _flush(self) -> None:
        for job_id in sorted(self._waiting):
            with reading(self._engine) as connection:
                name, data = _file(connection, self._session_id, job_id)
            try:
                self._files.makedirs(self._folder, exist_ok=True)
                with (
                    self._files.transaction,
                    self._files.open(f"{self._folder}/{name}", "wb") as file,
                ):
                    file.write(data)
            except Exception as error:  # each fsspec implementation raises its own classes
                hint = "nothing else is lost: the same command with its trace file writes them"
                raise ServiceError(
                    f"A log cannot be written to {self.url}: {error}.", hint=hint
                ) from None
            self._waiting.discard(job_id)


def _jobs(session_id: int) -> sa.Select[Any]:
    return of_jobs().where(Job.session_id == session_id)


def _name(key: str, solver: str) -> str:
    return f"{key}-{_UNSAFE.sub('_', solver)}.jsonl.gz"


def _file(connection: sa.Connection, session_id: int, job_id: int) -> tuple[str, bytes]:
    """Name and contents of a job's log: a line for each trial, by number; equal trials give equal
    bytes.

    Another job of the same layer and solver, such as one with another search, has the same file:
    its trials come first or last, by the jobs' ids.
    """
    columns = (ConfigRow.key, ConfigRow.json, ConfigRow.label, SolverRow.name)
    query = _jobs(session_id).with_only_columns(*columns, Job.config_id, Job.solver_id)
    job = connection.execute(query.where(Job.id == job_id)).one()
    about = {"config": json.loads(job.json), "label": job.label, "solver": job.name}
    same = (Job.config_id == job.config_id, Job.solver_id == job.solver_id)
    trials = (
        sa.select(Job.options, *(getattr(TrialRow, name) for name in FIELDS))
        .join(Job, Job.id == TrialRow.job_id)
        .where(Job.session_id == session_id, *same, Job.steps != FINALS)
        .order_by(TrialRow.job_id, TrialRow.number)
    )
    rows = connection.execute(trials).mappings()
    lines = (json.dumps({**about, **row, **_as_json(row)}) + "\n" for row in rows)
    return _name(job.key, job.name), gzip.compress("".join(lines).encode(), mtime=0)


def _as_json(row: Any) -> dict[str, Any]:
    """The columns that JSON has in another form."""
    moment = row["measured_at"]
    return {
        "times_ms": json.loads(row["times_ms"]),
        "measured_at": moment.isoformat() if moment else None,
    }


def _without_secrets(url: str) -> str:
    return re.sub(r"(//)[^/@]*@", r"\1", url)
