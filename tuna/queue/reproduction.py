"""The command lines that repeat attempts: made of the jobs in SQL when they are printed, never of
what a worker says."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import sqlalchemy as sa
import structlog

from tuna.db.bulk import rows_among
from tuna.db.engine import reading
from tuna.db.models import Job, TrialRow
from tuna.db.overview import Failure, Overview
from tuna.errors import BadInput, NotFound
from tuna.jobs import finals
from tuna.jobs.serving import SessionWork, works_of
from tuna.jobs.states import ClaimedJob
from tuna.libraries.base import FINALS, Library
from tuna.libraries.candidates import CandidateLibrary
from tuna.libraries.items import Candidate, WorkItem, of_rival
from tuna.libraries.steps import command_line
from tuna.queue.work_items import work_items

log = structlog.get_logger(__name__)

_COLUMNS = tuple(getattr(Job, name) for name in ClaimedJob._fields)


class Repeated(NamedTuple):
    """A job, or one of its candidates, that is to be repeated."""

    job_id: int
    step: str
    candidate: int | None = None  #: index of the candidate; None: all candidates of the job


def commands(connection: sa.Connection, wanted: Iterable[Repeated]) -> dict[Repeated, str]:
    """The commands, without those for jobs whose library is not installed here."""
    by_job: dict[int, list[Repeated]] = defaultdict(list)
    for spec in wanted:
        by_job[spec.job_id].append(spec)
    found_rows = rows_among(connection, sa.select(*_COLUMNS), Job.id, by_job)
    rows = list(map(ClaimedJob._make, found_rows))
    works = works_of(connection, {row.session_id for row in rows})
    rows = [row for row in rows if row.session_id in works]
    groups: dict[tuple[int, str], list[ClaimedJob]] = defaultdict(list)
    for row in rows:
        for step in {spec.step for spec in by_job[row.id]}:
            groups[row.session_id, step].append(row)
    rounds = [row.id for row in rows if row.search_id is not None]
    lines = _of_rounds(connection, [spec for key in rounds for spec in by_job[key]])
    for (session_id, step), whole in groups.items():
        work = works[session_id]
        if step == FINALS:
            lines |= {Repeated(row.id, step): _of_finals(connection, work, row) for row in whole}
            continue
        plain_jobs = [row for row in whole if row.search_id is None]
        for item in work_items(connection, work, step, plain_jobs, bare=True):
            same = [spec for spec in by_job[item.job_id] if spec.step == step]
            lines |= {spec: item_command(work.library, item, spec.candidate) for spec in same}
    return lines


def trial_item(connection: sa.Connection, trial_id: int) -> tuple[Library, WorkItem]:
    """The library, and the item that repeats this trial alone from its params, up to the step that
    the trial is from.

    Raises NotFound for an unknown trial, BadInput if its library does not build candidates
    from their params.
    """
    query = sa.select(TrialRow.number, TrialRow.params, TrialRow.step, *_COLUMNS)
    row = connection.execute(
        query.join(Job, Job.id == TrialRow.job_id).where(TrialRow.id == trial_id)
    ).one_or_none()
    if row is None:
        raise NotFound(
            f"Unknown trial {trial_id}.",
            hint="take the command that a failure or a result is shown with",
        )
    number, params, of_step, *rest = row
    job = ClaimedJob(*rest)
    work = works_of(connection, [job.session_id]).get(job.session_id)
    if work is None:
        raise NotFound(
            f"The library of session {job.session_id} is not installed here.",
            hint="install it: `tuna doctor`",
        )
    library = work.library
    if params is None or not (library.search or isinstance(library, CandidateLibrary)):
        raise BadInput(
            f"Trial {trial_id} cannot be built from its params.",
            hint="repeat its job: `tuna reproduce --solver ...`",
        )
    names = [step.name for step in library.steps]
    step = of_step if of_step in names else names[-1]
    (item,) = work_items(connection, work, step, [job], bare=True)
    return library, item.model_copy(
        update={"candidates": (Candidate(index=number, params=params),)}
    )


def _of_rounds(connection: sa.Connection, wanted: Iterable[Repeated]) -> dict[Repeated, str]:
    """The commands for rounds of searches, whose candidates cannot be proposed again; of a whole
    job, that for a failed one."""
    by_job: dict[int, list[Repeated]] = defaultdict(list)
    for one in wanted:
        by_job[one.job_id].append(one)
    found: dict[Repeated, str] = {}
    query = sa.select(TrialRow.id, TrialRow.job_id, TrialRow.number)
    query = query.order_by(TrialRow.cause.is_(None), TrialRow.number)
    for row in rows_among(connection, query, TrialRow.job_id, by_job):
        for one in by_job[row.job_id]:
            if one.candidate in (None, row.number):
                found.setdefault(one, _of_trial(row.id))
    return found


def _of_finals(connection: sa.Connection, work: SessionWork, row: ClaimedJob) -> str:
    """The commands for its rivals, one after the other; one that a search found cannot be proposed
    again."""
    (item,) = work_items(connection, work, FINALS, [row], bare=True)
    rows = finals.rivals(connection, work.session_id, work.library, [row.config_id]).get(
        row.config_id, ()
    )
    last = work.library.steps[-1].name
    trials = {rival.id: rival.trial_id for rival in rows if rival.search_id is not None}
    return " && ".join(
        _of_trial(trials[rival.index])
        if rival.index in trials
        else item_command(work.library, of_rival(item, rival, last), rival.number)
        for rival in item.rivals
    )


def _of_trial(trial_id: int) -> str:
    return shlex.join(["tuna", "reproduce", "--trial", str(trial_id)])


def with_commands(engine: sa.Engine, sessions: Iterable[Overview]) -> list[Overview]:
    """The same with the commands that repeat their failures."""
    found = list(sessions)
    with reading(engine) as connection:
        made = commands(
            connection, [_latest(failure) for session in found for failure in session.failures]
        )
    return [
        replace(
            session,
            failures=tuple(
                replace(one, reproduce=made.get(_latest(one), "")) for one in session.failures
            ),
        )
        for session in found
    ]


def _latest(failure: Failure) -> Repeated:
    return Repeated(failure.job_id, failure.step)


def item_command(library: Library, item: WorkItem, index: int | None = None) -> str:
    """The command line that repeats an item, or one candidate of it; empty where the library's code
    fails to say it."""
    try:
        return command_line(library, item, index)
    # a plug-in's own code, or a kind of config that is not installed here
    except Exception as error:
        log.warning(
            "no command repeats the job", job=item.job_id, fault=f"{type(error).__name__}: {error}"
        )
        return ""
