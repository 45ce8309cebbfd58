"""Writes good measurements: rows of the find db, and the code objects that they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.artifacts.store import Artifacts
from tuna.db.bulk import rows_among, upsert, values_among
from tuna.db.engine import reading
from tuna.db.models import FindDb, FindDbKernel, Job, KernelRow, SolverApplicability, TrialRow
from tuna.db.types import utc_now
from tuna.errors import StorageFull
from tuna.jobs.states import AttemptedJob
from tuna.libraries.items import CodeObject, StepResult, Trial
from tuna.libraries.results import is_close, is_time
from tuna.vocabulary import Cause

#: Bytes of a statement that every server accepts; overhead of a statement that carries an artifact
_SMALL_BYTES, _STATEMENT_BYTES = 1 << 18, 4096
#: Number of artifacts that are read at a time, before a transaction; bytes of them that are held in
#: memory, about
_READERS, _FETCHED_BYTES = 8, 1 << 28


def best(result: StepResult) -> Trial | None:
    """The fastest good trial of a result that is eligible; none that ended early, for there is a
    far better one, of an earlier round perhaps."""
    good = [trial for trial in result.trials if trial.cause is None and not trial.ended_early]
    timed = [trial for trial in good if trial.eligible and trial.time_ms is not None]
    return min(timed, key=lambda trial: (trial.time_ms, trial.index), default=None)


class _Built(NamedTuple):
    """Facts of a trial that the steps before left."""

    params: str | None
    artifact: str | None
    workload: str | None  #: digest of the text of its job's problem


_NOTHING = _Built(None, None, None)


@dataclass(frozen=True)
class Fetched:
    """Facts that were read for results before the transaction that writes them."""

    #: facts that the earlier steps left of each trial, by job id and trial number
    trials: Mapping[tuple[int, int], _Built]
    #: artifacts that were not in SQL by digest; a KeyError says why one is missing
    blobs: Mapping[str, bytes | KeyError]

    def of(self, result: StepResult, trial: Trial) -> _Built:
        """Return the facts of a trial of `result` once that is stored."""
        built = self.trials.get((result.job_id, trial.index), _NOTHING)
        return _Built(
            trial.params if trial.params is not None else built.params,
            trial.artifact or built.artifact,
            built.workload or result.workload,
        )


class FindDbWriter:
    """Writes the best trials of results; the drain handles what it returns and raises."""

    def __init__(self, artifacts: Artifacts) -> None:
        self._artifacts = artifacts

    def fetch(self, engine: sa.Engine, results: Iterable[StepResult]) -> Fetched:
        """Read what `write` needs of these results, of which it may get a part; several artifacts
        at a time.

        Raises StoreUnavailable. What is more than memory should hold is left to `write`.
        """
        timed = [
            (result, trial)
            for result in results
            if result.ok and (trial := best(result)) is not None
        ]
        ids = {result.job_id for result, _ in timed}
        if not ids:
            return Fetched({}, {})
        table = TrialRow
        columns = (table.job_id, table.number, table.params, table.artifact, Job.workload)
        trials: dict[tuple[int, int], _Built] = {}
        with reading(engine) as connection:
            query = sa.select(*columns).join(Job, Job.id == table.job_id)
            for row in rows_among(connection, query, table.job_id, ids):
                trials[row.job_id, row.number] = _Built(*row[2:])
            built = Fetched(trials, {})
            digests = {digest for pair in timed for digest in _digests(*pair, built)}
            missing = sorted(digests - _in_sql(connection, digests))
        return Fetched(trials, self._read(missing))

    def _read(self, digests: Sequence[str]) -> dict[str, bytes | KeyError]:
        """The artifacts by digest, up to _FETCHED_BYTES."""
        blobs: dict[str, bytes | KeyError] = {}
        if not digests:
            return blobs
        size_bytes = 0
        with futures.ThreadPoolExecutor(_READERS, "artifacts") as pool:
            for start in range(0, len(digests), _READERS):
                part = digests[start : start + _READERS]
                blobs |= zip(part, pool.map(self._get, part), strict=True)
                size_bytes += sum(
                    len(blob) for name in part if isinstance(blob := blobs[name], bytes)
                )
                if size_bytes > _FETCHED_BYTES:
                    break
        return blobs

    def _get(self, digest: str) -> bytes | KeyError:
        try:
            return self._artifacts.get(digest)
        except KeyError as error:
            return error

    def write(
        self,
        connection: sa.Connection,
        jobs: Mapping[int, AttemptedJob],
        results: Sequence[StepResult],
        fetched: Fetched,
    ) -> dict[int, StepResult]:
        """Find-db rows with their kernels, for results that have a best trial; returns, by job, the
        failures that replace results.

        A result fails when an artifact that it needs is lost, or larger than the database takes.
        """
        if not results:
            return {}
        ids = [result.job_id for result in results]
        _lock(connection, [jobs[job_id] for job_id in ids])
        known = _known(connection, [jobs[job_id] for job_id in ids])
        bests = [(result, trial) for result in results if (trial := best(result)) is not None]
        kept = _in_sql(
            connection, {digest for pair in bests for digest in _digests(*pair, fetched)}
        )
        failed: dict[int, StepResult] = {}
        rows: dict[tuple[int, int, int], dict[str, Any]] = {}
        kernels: dict[tuple[int, int, int], Sequence[CodeObject]] = {}
        for result, fastest in bests:
            job, built = jobs[result.job_id], fetched.of(result, fastest)
            key = (job.session_id, job.config_id, job.solver_id)
            facts = (built.params or "", fastest.time_ms, result.noisy)
            measured = MeasuredResult(job.id, job.search_id, fastest.index, result.step, *facts)
            if key in known and not measured.replaces(known[key]):
                continue
            workload = job.workload or result.workload
            code = result.kernels
            if code is None:
                code = (CodeObject(artifact=built.artifact),) if built.artifact else ()
            try:
                needed = [*(item.artifact for item in code), *([workload] if workload else [])]
                self._keep(connection, needed, kept, fetched.blobs)
            except KeyError as error:
                failed[job.id] = result.failed(
                    Cause.ARTIFACT_LOST, f"artifact {error} is gone or damaged"
                )
                continue
            except StorageFull as error:
                failed[job.id] = result.failed(Cause.INFRA, str(error))
                continue
            known[key], kernels[key] = measured, code
            rows[key] = {
                "session_id": job.session_id,
                "config_id": job.config_id,
                "solver_id": job.solver_id,
                "job_id": job.id,
                "time_ms": fastest.time_ms,
                "workspace_bytes": result.workspace_bytes,
                "params": built.params or "",
                "algorithm": result.algorithm,
                "trial_number": fastest.index,
                "final_job_id": None,
                "source": None,
                "simulated": result.simulated,
                "noisy": result.noisy,
                "clock": fastest.clock,
                "workload": workload,
                "updated_at": utc_now(),
            }
        names = ("session_id", "config_id", "solver_id")
        upsert(connection, FindDb, list(rows.values()), key=names, replace=True)
        _write_kernels(connection, kernels)
        return failed

    def _keep(
        self,
        connection: sa.Connection,
        digests: Iterable[str],
        kept: set[str],
        blobs: Mapping[str, bytes | KeyError],
    ) -> None:
        """Copy artifacts into SQL, which keeps them, unless they are `kept` already.

        Raises KeyError when one of them is lost, StorageFull when the database would not accept it.
        """
        for digest in digests:
            if digest in kept:
                continue
            blob = blobs[digest] if digest in blobs else self._artifacts.get(digest)
            if isinstance(blob, KeyError):
                raise blob
            if not fits(connection, len(blob)):
                raise StorageFull(
                    f"artifact {digest} has {len(blob) >> 20} MiB, more than the database server"
                    " takes; set its max_allowed_packet to 256M, then `tuna retry --session-id ID"
                    " --cause infra`"
                )
            row = {"digest": digest, "blob": blob, "size_bytes": len(blob)}
            upsert(connection, KernelRow, [row], key=("digest",))
            kept.add(digest)


class MeasuredResult(NamedTuple):
    """A measured result of a solver for a config."""

    job_id: int | None
    search_id: int | None  #: search of which the job is a round; None: the job is not a round
    trial_number: int | None
    step: str | None
    params: str
    time_ms: float | None
    noisy: bool

    def replaces(self, stored: MeasuredResult) -> bool:
        """Return whether this result, of the same session and so of the same environment, is the
        one to keep.

        The better one is, and one from a quiet device is better than a noisy one. But a
        re-measurement of the same candidate replaces the earlier time, and what a later step of a
        job finds replaces what an earlier one did. Between rounds of a search, whose candidates
        differ much, noise decides only where the times are close.
        """
        if (
            stored.time_ms is None
            or not is_time(stored.time_ms)
            or (self.job_id == stored.job_id and self.step != stored.step)
        ):
            return True
        fast, slow = sorted((self.time_ms or 0.0, stored.time_ms))
        far = not is_close(slow, fast)
        in_rounds = (
            self.job_id != stored.job_id
            and self.search_id is not None
            and self.search_id == stored.search_id
        )
        if self.noisy != stored.noisy and not (in_rounds and far and self.params != stored.params):
            return stored.noisy
        return self.params == stored.params or (self.time_ms or 0.0) < stored.time_ms


def _lock(connection: sa.Connection, jobs: Sequence[AttemptedJob]) -> None:
    """Keep another process from comparing a result of the same solver and config until this
    transaction ends.

    Two jobs of a session can have them in common. There may be no row of find_db to lock yet, but
    there is one of solver_applicability. On SQLite there is one writer at a time.
    """
    if connection.dialect.name == "sqlite":
        return
    pair = SolverApplicability
    query = sa.select(pair.solver_id).where(
        pair.session_id.in_(sorted({job.session_id for job in jobs})),
        pair.solver_id.in_(sorted({job.solver_id for job in jobs})),
    )
    configs = {job.config_id for job in jobs}
    for _ in rows_among(connection, query.with_for_update(), pair.config_id, configs):
        pass


def _known(
    connection: sa.Connection, jobs: Sequence[AttemptedJob]
) -> dict[tuple[int, int, int], MeasuredResult]:
    """The measured results that the sessions of `jobs` have for their configs; imported ones give
    way to any."""
    of_job = (FindDb.job_id, Job.search_id, FindDb.trial_number, TrialRow.step)
    columns = (*of_job, FindDb.params, FindDb.time_ms, FindDb.noisy)
    same_trial = sa.and_(TrialRow.job_id == FindDb.job_id, TrialRow.number == FindDb.trial_number)
    query = (
        sa.select(FindDb.session_id, FindDb.config_id, FindDb.solver_id, *columns)
        .join(Job, Job.id == FindDb.job_id)
        .join(TrialRow, same_trial, isouter=True)
        .where(FindDb.session_id.in_({job.session_id for job in jobs}), FindDb.job_id.is_not(None))
    )
    found = rows_among(connection, query, FindDb.config_id, {job.config_id for job in jobs})
    return {tuple(row)[:3]: MeasuredResult(*tuple(row)[3:]) for row in found}


def fits(connection: sa.Connection, size_bytes: int) -> bool:
    """Return whether one statement may carry an artifact of this size. On a longer one MySQL closes
    the connection, as in an outage."""
    if connection.dialect.name == "sqlite" or size_bytes <= _SMALL_BYTES:
        return True
    packet_bytes = int(connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())
    # escaping by the driver may double a byte
    return 2 * size_bytes + _STATEMENT_BYTES <= packet_bytes


def _digests(result: StepResult, fastest: Trial, fetched: Fetched) -> set[str]:
    """Every artifact that the result may need."""
    built = fetched.of(result, fastest)
    found = {built.artifact, built.workload, *(code.artifact for code in result.kernels or ())}
    return {digest for digest in found if digest}


def _in_sql(connection: sa.Connection, digests: set[str]) -> set[str]:
    """Return which of `digests` are in SQL, where many results share the same few; locked, so that
    none is deleted meanwhile."""
    query = sa.select(KernelRow.digest).with_for_update(read=True)
    return values_among(connection, query, KernelRow.digest, digests)


def _write_kernels(
    connection: sa.Connection, kernels: Mapping[tuple[int, int, int], Sequence[CodeObject]]
) -> None:
    """The code objects of find-db rows, named by (session, config, solver); those of an older
    result are deleted."""
    if not kernels:
        return
    query = sa.select(FindDb.id, FindDb.session_id, FindDb.config_id, FindDb.solver_id).where(
        FindDb.session_id.in_({key[0] for key in kernels}),
        FindDb.config_id.in_({key[1] for key in kernels}),
    )
    rows_by_key = {
        (row.session_id, row.config_id, row.solver_id): row.id for row in connection.execute(query)
    }
    ids = {key: rows_by_key[key] for key in kernels}
    connection.execute(sa.delete(FindDbKernel).where(FindDbKernel.find_db_id.in_(ids.values())))
    rows = [
        {
            "find_db_id": ids[name],
            "number": number,
            "kernel": code.artifact,
            "name": code.name,
            "args": code.args,
        }
        for name, codes in kernels.items()
        for number, code in enumerate(codes)
    ]
    if rows:
        connection.execute(sa.insert(FindDbKernel), rows)
