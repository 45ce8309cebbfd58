"""Restores a session from its trace in one transaction: its jobs and their results."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import StatementError

from tuna.archives import tables
from tuna.configs import from_json
from tuna.db import configs, sessions
from tuna.db.bulk import upsert
from tuna.db.engine import writing
from tuna.db.models import (
    FindDb,
    FindDbKernel,
    Job,
    KernelRow,
    Search,
    Session,
    SolverApplicability,
    SolverRow,
    StepResultRow,
    TrialRow,
)
from tuna.db.searches import begin_as_recorded
from tuna.db.types import utc_now
from tuna.errors import BadInput
from tuna.vocabulary import SEARCH, State
from tuna_remote.trace import ENDED, LOCAL, OF_JOB, JobName, Trace, TraceHeader, job_name, job_of

#: Largest artifact that is unpacked.
_MAX_ARTIFACT_BYTES = 256 << 20
#: Fields of a trial's line that name its job.
_OF_OWNER = ("solver", *OF_JOB)


def session_of(connection: sa.Connection, header: TraceHeader | None) -> int | None:
    """The session of a trace, where this database has it."""
    assert header is not None
    return connection.execute(sa.select(Session.id).where(Session.uuid == header.uuid)).scalar()


def restore(
    engine: sa.Engine, trace: Trace, keep: Callable[[bytes], object] = lambda _: None
) -> int:
    """Make the session of a trace in a database that does not have it; returns its id.

    A job that had not ended is new again. The solvers of its library must be stored. `keep` gets
    each artifact that results need. Raises BadInput for a trace with names that this version does
    not know, or if there is a session with the same environment and label; then nothing is stored.
    """
    header = trace.header
    assert header is not None
    last = {job_name(line): number for number, line in trace.lines()}
    try:
        with writing(engine) as connection:
            session_id, new = sessions.create(connection, header.environment, header.label)
            if not new:
                raise BadInput(
                    f"Session {session_id} has the environment and the label of the trace"
                    f" {trace.path}, and is another.",
                    hint=(
                        "leave --trace-file out to go on with that session, or name another"
                        " commit-table-name"
                    ),
                )
            connection.execute(
                sa.update(Session).where(Session.id == session_id).values(uuid=header.uuid)
            )
            restoration = _Restoration(
                connection, session_id, header.label, header.environment.library
            )
            for number, line in trace.lines():
                restoration.artifacts(line, keep)
                if last[job_name(line)] == number:
                    restoration.job(job_name(line), line)
            restoration.link()
            begin_as_recorded(connection, session_id)
            return session_id
    except (ValueError, TypeError, LookupError, AttributeError, zlib.error) as error:
        raise BadInput(
            f"The trace {trace.path} cannot be restored by this version of Tuna: {error}."
        ) from None
    except StatementError as error:  # not of an outage or a full disk, which `writing` translates
        raise BadInput(
            f"The trace {trace.path} cannot be restored: {str(error.orig)[:200]}."
        ) from None


@dataclass
class _Restoration:
    connection: sa.Connection
    session_id: int
    tag: str
    library: str
    jobs: dict[JobName, int] = field(default_factory=dict)
    #: The latest find-db row by config and solver.
    best: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    config_ids: dict[str, int] = field(default_factory=dict)
    solver_ids: dict[str, int] = field(default_factory=dict)

    def artifacts(self, line: Mapping[str, Any], keep: Callable[[bytes], object]) -> None:
        """Store the artifacts of a line."""
        for digest, text in ((line["result"] or {}).get("artifacts") or {}).items():
            blob = zlib.decompressobj().decompress(
                base64.b64decode(text, validate=True), _MAX_ARTIFACT_BYTES
            )
            if hashlib.sha256(blob).hexdigest() != digest:
                raise ValueError(f"artifact {digest:.64} has other bytes than its name says")
            row = {"digest": digest, "blob": blob, "size_bytes": len(blob)}
            upsert(self.connection, KernelRow, [row], key=("digest",))
            keep(blob)

    def job(self, name: JobName, line: Mapping[str, Any]) -> None:
        """Store a job, as new unless it has ended; then with its result."""
        named, result = line["job"], line["result"] or {}
        config_id, solver_id = self._config(name.config, named["config"]), self._solver(name.solver)
        steps = name.steps.split(",")
        row = {
            "steps": name.steps,
            "step": steps[0],
            "state": State.NEW.value,
            "attempt": 0,
            "updated_at": utc_now(),
        }
        row |= {
            "reason": str(named["reason"]),
            "options": dict(named["options"]),
            "round": name.round,
            "part": name.part,
        }
        if line["state"] in ENDED:
            row |= _read("job", result["job"])
        pair = {"session_id": self.session_id, "config_id": config_id, "solver_id": solver_id}
        upsert(self.connection, SolverApplicability, [pair], key=tuple(pair))
        if steps[0] == SEARCH:
            row["search_id"] = self._search(pair, row)
        inserted = self.connection.execute(
            sa.insert(Job).values(**pair, **row)
        ).inserted_primary_key
        assert inserted is not None
        self.jobs[name] = job_id = inserted[0]
        self._rows(
            StepResultRow,
            [
                {**_read("step_result", entry), "job_id": job_id}
                for entry in result.get("step_result", ())
            ],
        )
        trials = [(job_of(name.config, entry), entry) for entry in result.get("trial", ())]
        for owner, entry in trials:
            self._trial(
                owner,
                _read("trial", {k: v for k, v in entry.items() if k not in _OF_OWNER}),
            )
        for entry in result.get("find_db", ()):
            self.best[name.config, entry["job"][0]] = entry

    def _search(self, pair: Mapping[str, int], round_: dict[str, Any]) -> int:
        """The search that a job is a round of; it has ended if one of its rounds says why."""
        why = round_.pop("stopped", None)
        mine = {**pair, "steps": round_["steps"]}
        new = {**mine, "reason": round_["reason"], "options": round_["options"], "stopped": why}
        upsert(self.connection, Search, [new], key=tuple(mine), keep_if_null=["stopped"])
        query = sa.select(Search.id).where(*(getattr(Search, name) == mine[name] for name in mine))
        return self.connection.execute(query).scalar_one()

    def link(self) -> None:
        """Store the find-db rows, which refer to jobs, and their code."""
        for (config, solver), best in self.best.items():
            row = dict(best)
            jobs = {key: row.pop(key) for key in ("job", "final_job")}
            code: Iterable[Mapping[str, Any]] = row.pop("kernels")
            ids = {
                f"{key}_id": self.jobs[JobName(config, *owner)]
                for key, owner in jobs.items()
                if owner
            }
            ids |= {
                "session_id": self.session_id,
                "config_id": self.config_ids[config],
                "solver_id": self._solver(solver),
            }
            inserted = self.connection.execute(
                sa.insert(FindDb).values(**_read("find_db", row), **ids)
            )
            assert inserted.inserted_primary_key is not None
            of_row = {"find_db_id": inserted.inserted_primary_key[0]}
            self._rows(FindDbKernel, [{**_read("find_db_kernel", row), **of_row} for row in code])

    def _trial(self, owner: JobName, row: Mapping[str, Any]) -> None:
        """Store a trial, or the newer times of a trial that finals measured again."""
        if owner in self.jobs:
            values = {**row, "job_id": self.jobs[owner]}
            update = [key for key in values if key not in ("job_id", "number")]
            upsert(self.connection, TrialRow, [values], key=("job_id", "number"), update=update)

    def _config(self, key: str, named: Mapping[str, Any]) -> int:
        if key not in self.config_ids:
            config = from_json(named)
            tables.require_key(config, key)
            (found,) = configs.store(self.connection, [config], self.tag).ids
            assert found is not None
            self.config_ids[key] = found
        return self.config_ids[key]

    def _solver(self, name: str) -> int:
        if name not in self.solver_ids:
            query = sa.select(SolverRow.id).where(
                SolverRow.library == self.library, SolverRow.name == name
            )
            found: int | None = self.connection.execute(query).scalar()
            if found is None:
                raise ValueError(f"{self.library} has no solver {name:.128}")
            self.solver_ids[name] = found
        return self.solver_ids[name]

    def _rows(self, model: type[Any], rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self.connection.execute(sa.insert(model), list(rows))


def _read(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row that `trace.plain` wrote; raises ValueError."""
    return tables.RowReader(name, list(row), LOCAL[name]).read(list(row.values()))
