"""The session of a trace: its lines as rows of jobs and their results, which `archives.restore`
inserts in one transaction."""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import (
    Restoration,
    Search,
    Session,
    SolverRow,
    configs,
    restoring,
    sessions,
    tables,
    utc_now,
)
from tuna.configs import from_json
from tuna.errors import BadInput
from tuna.vocabulary import END_STATES, SEARCH, State
from tuna_remote.trace import LOCAL, OF_JOB, JobName, Trace, TraceHeader, job_name, job_of

#: Largest artifact that is unpacked.
_MAX_ARTIFACT_BYTES = 256 << 20
#: Number of lines whose rows are inserted together
_LINES = 500
#: Fields of a trial's line that name its job.
_OF_OWNER = ("solver", *OF_JOB)
#: Tables whose rows have no ids in a trace: names stand for them
_NAMED = {"search", "job", "step_result", "trial", "find_db"}


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
    assert trace.header is not None
    what = f"The trace {trace.path}"
    with restoring(engine, what) as connection:
        session_id = _session(connection, trace)
        rows = _TraceRows(Restoration(connection, what, {*_NAMED}, session_id), trace.header, keep)
        last = {job_name(line): number for number, line in trace.lines()}
        for number, line in trace.lines():
            rows.add(line, is_last=last[job_name(line)] == number)
            if number % _LINES == 0:
                rows.write()
        rows.finish()
        return session_id


def _session(connection: sa.Connection, trace: Trace) -> int:
    header = trace.header
    assert header is not None
    session_id, new = sessions.create(connection, header.environment, header.label)
    if not new:
        raise BadInput(
            f"Session {session_id} has the environment and the label of the trace {trace.path}, and"
            " is another.",
            hint="leave --trace-file out to go on with that session, or name another"
            " commit-table-name",
        )
    same = Session.id == session_id
    connection.execute(sa.update(Session).where(same).values(uuid=header.uuid))
    return session_id


class _TraceRows:
    """The rows of lines, by table, until they are written: names are their ids."""

    def __init__(
        self, restoration: Restoration, header: TraceHeader, keep: Callable[[bytes], object]
    ) -> None:
        self._restoration, self._label, self._keep = restoration, header.label, keep
        query = sa.select(SolverRow.name, SolverRow.id)
        query = query.where(SolverRow.library == header.environment.library)
        solvers = {row.name: row.id for row in restoration.connection.execute(query)}
        self._library = header.environment.library
        session = {header.uuid: restoration.session_id}
        self._ids = restoration.ids
        self._ids |= {"session": session, "solver": solvers, "config": {}}
        self._session = {"session_id": header.uuid}
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._known: set[object] = set()  # names of jobs, and pairs and searches that have rows
        self._stopped: dict[tuple[str, str, str], str] = {}  # why searches have ended
        #: the latest find-db row by config and solver
        self._best: dict[tuple[str, str], Mapping[str, Any]] = {}

    def add(self, line: Mapping[str, Any], *, is_last: bool) -> None:
        """Store a line's artifacts and, where it is the last of its job, note its rows."""
        result = line["result"] or {}
        for digest, text in (result.get("artifacts") or {}).items():
            blob = zlib.decompressobj().decompress(
                base64.b64decode(text, validate=True), _MAX_ARTIFACT_BYTES
            )
            kernel = {"digest": digest, "blob": blob, "size_bytes": len(blob)}
            self._restoration.write({"kernel": [kernel]})
            self._keep(blob)
        if is_last:
            self._job(job_name(line), line, result)

    def _job(self, name: JobName, line: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        named = line["job"]
        self._config(name.config, named["config"])
        if name.solver not in self._ids["solver"]:
            raise ValueError(f"{self._library} has no solver {name.solver:.128}")
        pair = {**self._session, "config_id": name.config, "solver_id": name.solver}
        self._once("solver_applicability", (name.config, name.solver), pair)
        about = {"reason": str(named["reason"]), "options": dict(named["options"])}
        step = name.steps.split(",")[0]
        row = {
            **{"id": name, "steps": name.steps, "step": step, "state": State.NEW.value},
            **{"attempt": 0, "updated_at": utc_now(), "round": name.round, "part": name.part},
            **(_read("job", result["job"]) if line["state"] in END_STATES else {}),
            **{"search_id": None, **pair, **about},
        }
        if step == SEARCH:
            key = (name.config, name.solver, name.steps)
            self._once("search", key, {"id": key, **pair, "steps": name.steps, **about})
            row["search_id"] = key
            if why := row.pop("stopped", None):  # one of its rounds says so
                self._stopped[key] = why
        self._rows["job"].append(row)
        self._known.add(name)
        for entry in result.get("step_result", ()):
            self._rows["step_result"].append({**_read("step_result", entry), "job_id": name})
        for entry in result.get("trial", ()):  # of finals those that they measured again
            owner = job_of(name.config, entry)
            if owner in self._known:
                own = {key: value for key, value in entry.items() if key not in _OF_OWNER}
                self._rows["trial"].append({**_read("trial", own), "job_id": owner})
        for entry in result.get("find_db", ()):
            self._best[name.config, entry["job"][0]] = entry

    def _once(self, table: str, key: object, row: dict[str, Any]) -> None:
        if key not in self._known:
            self._known.add(key)
            self._rows[table].append(row)

    def _config(self, key: str, fields: Mapping[str, Any]) -> None:
        if key not in self._ids["config"]:
            config = from_json(fields)
            tables.require_key(config, key)
            stored = configs.store(self._restoration.connection, [config], self._label)
            (config_id,) = stored.ids
            assert config_id is not None
            self._ids["config"][key] = config_id

    def write(self) -> None:
        """Insert the rows that are noted."""
        self._restoration.write(self._rows)
        self._rows.clear()

    def finish(self) -> None:
        """Insert what is left, and the find-db rows, which refer to jobs, with their code."""
        self.write()
        for (config, solver), best in self._best.items():
            entry = dict(best)
            owners = {name: entry.pop(name) for name in ("job", "final_job")}
            code = entry.pop("kernels")
            jobs = {f"{key}_id": JobName(config, *name) for key, name in owners.items() if name}
            of_row = {"find_db_id": (config, solver)}
            row: dict[str, Any] = {"id": (config, solver), "config_id": config, "solver_id": solver}
            row |= {**self._session, "job_id": None, "final_job_id": None, **jobs}
            self._rows["find_db"].append({**_read("find_db", entry), **row})
            self._rows["find_db_kernel"] += [{**_read("find_db_kernel", c), **of_row} for c in code]
        self.write()
        for key, why in self._stopped.items():
            same = Search.id == self._ids["search"][key]
            self._restoration.connection.execute(sa.update(Search).where(same).values(stopped=why))
        self._restoration.finish()


def _read(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row that `trace.plain` wrote; raises ValueError."""
    return tables.RowReader(name, list(row), LOCAL[name]).read(list(row.values()))
