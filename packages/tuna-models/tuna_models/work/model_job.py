"""A planned model as a job: its functions are compiled by one worker, and it is checked and timed
by another."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna.api import Progress, RunStopped, jobs, preparation
from tuna.api.rows import (
    ConfigRow,
    ConfigTag,
    FindDb,
    Job,
    Only,
    SolverRow,
    StepResultRow,
    TrialRow,
    configs,
    open_database,
    reading,
    writing,
)
from tuna.api.services import artifact_store, remove_unneeded
from tuna.common.files import write_errors
from tuna.common.messages import last_line
from tuna.configs.model import WholeModelConfig
from tuna.errors import BadInput, ServiceError
from tuna.libraries.tvm.solvers import MODEL
from tuna.vocabulary import END_STATES, Cause, State
from tuna_models.child_answers import BODY, PROGRAM
from tuna_models.refusals import REPORT_HINT
from tuna_models.work.session import ModelWork
from tuna_models.work.store import StoredModel

#: One kernel of each task, checked and timed once; a whole model may take long to build and to run.
_OPTIONS: Mapping[str, object] = {
    "candidates": 1,
    "finalists": 0,
    "build_timeout_s": 1800.0,
    "measure_timeout_s": 1800.0,
}


@dataclass(frozen=True)
class MeasuredModel:
    """The outcome of the job of a planned model."""

    job_id: int
    functions: str  #: SHA-256 of its compiled functions
    times_ms: Sequence[float]  #: Times of whole runs; none for a wrong answer
    time_ms: float  #: Median of these times
    low_ms: float
    high_ms: float
    clock: str  #: Clock of the times, see `libraries.items.Trial`
    parts_ms: Mapping[str, float]  #: Times of its functions, see `ModelKernel.parts_ms`
    #: Largest error, relative to the largest magnitude; None: another rule is broken
    error: float | None
    right: bool
    report: str  #: Sentence of `ModelProblem.report`
    device: str
    noisy: bool  #: the device was not quiet

    @property
    def fault(self) -> str:
        """A sentence on the error."""
        return self.report or f"its error is {self.error}"


def measure(
    work: ModelWork, model: StoredModel, folder: Path, answers: Path, operations: int
) -> MeasuredModel:
    """Have the planned model in `folder` compiled, checked against the `answers`, and timed.

    What has been measured is not measured again. Its program and answers are in the artifact store
    until the job ends. Raises BadInput if it cannot be built or run, and
    StorageFull.
    """
    engine, body = open_database(), (folder / BODY).read_bytes()
    artifacts = artifact_store(engine)
    data = {"program": folder / PROGRAM, "answers": answers}
    config = WholeModelConfig(
        name=model.tag,
        target=work.target,
        body=hashlib.sha256(body).hexdigest(),
        **{name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in data.items()},
        operations=operations,
    )
    session_id = work.session_id()
    outcome = _outcome(session_id, config)
    if outcome is None or not outcome.is_over:
        for path in data.values():
            artifacts.put(path.read_bytes())
        with writing(engine) as connection:
            stored = configs.store(connection, [config], model.tag, bodies={config.body: body})
        _load(session_id, model.tag, stored.ids[0], outcome)
        with contextlib.suppress(RunStopped):
            work.run(_Following(work, config).follow)
        outcome = _outcome(session_id, config)
    _remove_data(model.tag)
    assert outcome is not None
    return outcome.measured(model.name)


def _remove_data(tag: str) -> None:
    """Remove the programs and answers of a model's jobs that have ended from the artifact store,
    those of builds that were killed too; other open jobs may need the same."""
    query = (
        sa.select(ConfigRow.json, Job.state, ConfigTag.tag)
        .join(Job, Job.config_id == ConfigRow.id)
        .join(ConfigTag, ConfigTag.config_id == ConfigRow.id)
        .where(ConfigRow.kind == WholeModelConfig.kind)
        .where(sa.or_(ConfigTag.tag == tag, Job.state.not_in(END_STATES)))
    )
    ended, needed = set[str](), set[str]()
    with reading(open_database()) as connection:
        for row in connection.execute(query):
            fields = json.loads(row.json)
            data = {fields[name] for name in WholeModelConfig.data_fields}
            (ended if row.state in END_STATES else needed).update(data)
    remove_unneeded(ended, beside=needed)


class _Following:
    """The progress of a model's job."""

    def __init__(self, work: ModelWork, config: WholeModelConfig) -> None:
        self._work, self._config = work, config
        self._seen: Progress | None = None  #: the latest progress of the session

    def follow(self, whole: Progress) -> None:
        """Show the progress of the job; raises RunStopped once it is over, whatever else the
        session has to do."""
        if whole == self._seen:
            return
        self._seen = whole
        found = _outcome(self._work.session_id(), self._config)
        if found is None:
            return
        ended, errored = found.state in END_STATES, found.state is State.ERRORED
        states = {found.state.value: 1}
        self._work.events.on_progress(Progress(states, 1, int(not ended), int(errored)))
        if whole.unfinished and ended:
            raise RunStopped("The model is measured")


def _load(session_id: int, tag: str, config_id: int | None, failed: _Outcome | None) -> None:
    """Make the job of a planned model, or begin it anew if it failed before."""
    if failed is not None:
        jobs.retry(session_id, jobs=[failed.job_id])
        return
    preparation.update_solvers("tvm")
    preparation.update_applicability(session_id, tag)
    jobs.load_jobs(
        session_id,
        tag=None,
        reason="models",
        solvers=[MODEL.name],
        options=_OPTIONS,
        only=Only(config_ids=[config_id or 0]),
    )


def compiled_functions(digest: str, path: Path) -> Path:
    """Write the compiled functions of a measured model to `path`; raises NotFound if they are
    gone, StorageFull."""
    engine = open_database()
    try:
        functions = artifact_store(engine).get(digest)
    except KeyError:
        with reading(engine) as connection:
            functions = configs.body(connection, digest)
    with write_errors(path):
        path.write_bytes(functions)
    return path


@dataclass(frozen=True)
class _Outcome:
    """A job of a planned model, with its only trial and the last attempt."""

    session_id: int
    job_id: int
    state: State
    cause: str | None
    trial: Any
    attempt: Any
    noisy: bool

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to try again: a wrong answer was confirmed."""
        wrong = self.state is State.ERRORED and self.cause == Cause.WRONG_RESULT.value
        return self.state is State.EVALUATED or wrong

    def measured(self, name: str) -> MeasuredModel:
        """The measurement; raises BadInput if the model could not be built or run, ServiceError if
        its job was canceled."""
        if self.state is State.CANCELED:
            raise ServiceError(f"The job {self.job_id} of the model {name} was canceled.")
        if not self.is_over or self.trial is None:
            tail = self.attempt.output_tail if self.attempt else ""
            hint = f"see `tuna status --session-id {self.session_id}`"
            if self.cause in (Cause.BUILD_ERROR.value, Cause.RUN_ERROR.value):
                hint = f"{hint}; {REPORT_HINT}"
            last = last_line(tail) if tail.strip() else "no attempt"
            raise BadInput(f"The model {name} cannot be built: {self.cause} ({last}).", hint=hint)
        trial = self.trial
        times_ms = json.loads(trial.times_ms)
        return MeasuredModel(
            job_id=self.job_id,
            functions=trial.artifact or "",
            times_ms=times_ms,
            time_ms=trial.time_ms or 0.0,
            low_ms=trial.low_ms or 0.0,
            high_ms=trial.high_ms or 0.0,
            clock=trial.clock,
            parts_ms=json.loads(trial.parts or "{}"),
            error=trial.max_error,
            right=self.state is State.EVALUATED,
            report=trial.output_tail,
            device=self.attempt.device,
            noisy=self.noisy,
        )


def _outcome(session_id: int, config: WholeModelConfig) -> _Outcome | None:
    """The job of a planned model; None where there is none."""
    query = (
        sa.select(Job.id, Job.state, Job.cause)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .join(SolverRow, SolverRow.id == Job.solver_id)
        .where(Job.session_id == session_id, ConfigRow.key == config.key)
        .where(SolverRow.name == MODEL.name)
    )
    with reading(open_database()) as connection:
        job = connection.execute(query).one_or_none()
        if job is None:
            return None
        trials = sa.select(TrialRow.__table__).where(TrialRow.job_id == job.id)
        attempts = sa.select(StepResultRow.__table__).where(StepResultRow.job_id == job.id)
        trial = connection.execute(trials).one_or_none()
        attempt = connection.execute(
            attempts.order_by(StepResultRow.id.desc()).limit(1)
        ).one_or_none()
        noisy = connection.execute(sa.select(FindDb.noisy).where(FindDb.job_id == job.id)).scalar()
    return _Outcome(
        session_id, job.id, State(job.state), job.cause, trial, attempt, noisy=bool(noisy)
    )
