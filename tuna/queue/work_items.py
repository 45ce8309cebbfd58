"""From rows of `job` to work items: configs, solvers, candidates and known params, each read in
bulk."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.configs import from_json
from tuna.db.bulk import parts, rows_among
from tuna.db.jobs import step_names
from tuna.db.models import ConfigRow, FindDb, SolverRow, TrialRow
from tuna.db.types import timed
from tuna.jobs import finals, history
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import ClaimedJob
from tuna.libraries.base import FINALS, SearchRules
from tuna.libraries.items import Candidate, Rival, WorkItem
from tuna.libraries.steps import every_step, find_step
from tuna.vocabulary import SEARCH, Resource


def _among(column: sa.SQLColumnExpression[Any]) -> sa.ColumnElement[bool]:
    return column.in_(sa.bindparam("some", expanding=True))


#: Solvers by id, built once: building a statement costs more than running it
_SOLVERS = sa.select(SolverRow.id, SolverRow.name).where(_among(SolverRow.id))
_CONFIGS = sa.select(ConfigRow.id, ConfigRow.key, ConfigRow.json, ConfigRow.body).where(
    _among(ConfigRow.id)
)
_BEST = sa.select(FindDb.config_id, FindDb.solver_id, FindDb.time_ms, FindDb.noisy).where(
    FindDb.session_id == sa.bindparam("of_session"),
    _among(FindDb.config_id),
    FindDb.job_id.is_not(None),
    timed(FindDb.time_ms),
)


def _trials(needed: sa.orm.InstrumentedAttribute[str | None]) -> sa.Select[int, int, str | None]:
    """Trials that have what is `needed`. Unique key (job_id, number): one range per job."""
    good = sa.and_(
        TrialRow.cause.is_(None), TrialRow.step.not_in(sa.bindparam("done", expanding=True))
    )
    failed = sa.and_(TrialRow.cause.is_not(None), TrialRow.step == sa.bindparam("at"))
    wanted = (_among(TrialRow.job_id), needed.is_not(None), sa.or_(good, failed))
    return (
        sa.select(TrialRow.job_id, TrialRow.number, needed)
        .where(*wanted)
        .order_by(TrialRow.job_id, TrialRow.number)
    )


_TO_BUILD, _TO_MEASURE = _trials(TrialRow.params), _trials(TrialRow.artifact)


def work_items(
    connection: sa.Connection,
    work: SessionWork,
    step: str,
    rows: Sequence[ClaimedJob],
    *,
    bare: bool = False,
) -> list[WorkItem]:
    """The items of the next attempts at `step` of jobs; `bare`: without what earlier steps and jobs
    found."""
    configs = _configs(connection, {row.config_id for row in rows})
    named = connection.execute(_SOLVERS, {"some": sorted({row.solver_id for row in rows})})
    solvers: dict[int, str] = {row.id: row.name for row in named}
    later = [row.id for row in rows if step_names(row.steps)[0] != step and not bare]
    builds = find_step(work.library, step).resource is Resource.CPU
    measures = [
        known.name for known in every_step(work.library) if known.resource is Resource.DEVICE
    ]
    candidates = _candidates(connection, step, later, measures, builds=builds)
    later_rounds = [row for row in rows if row.round and not bare]
    rules = work.library.search if step == SEARCH else None
    past = _history(connection, rules, later_rounds) if rules else {}
    known_searches = history.warm_starts_of(connection, rows) if rules and not bare else {}
    bests = _bests(connection, work.session_id, later_rounds)
    rivals = _rivals(connection, work, configs) if step == FINALS else {}
    uses_known = work.library.params.uses_known and not bare
    known = _known_params(connection, work.session_id, rows) if uses_known else {}
    return [
        WorkItem(
            job_id=row.id,
            attempt=row.attempt + 1,
            session_id=work.session_id,
            library=work.library.name,
            step=step,
            solver=solvers[row.solver_id],
            config=configs[row.config_id].json,
            body=configs[row.config_id].body,
            data=() if builds else configs[row.config_id].data,
            target=work.environment.target,
            conditions=dict(work.environment.conditions),
            seed=seed(configs[row.config_id].key, solvers[row.solver_id]),
            options=row.options,
            candidates=tuple(candidates.get(row.id, ())),
            round=row.round,
            history=past.get(row.id, ()),
            siblings=known_searches.get(row.id, ()),
            **bests.get((row.config_id, row.solver_id), {}),
            rivals=rivals.get(row.config_id, ()),
            avoid=row.avoid or "",
            known_params=known.get((row.config_id, row.solver_id)),
        )
        for row in rows
    ]


def seed(config_key: str, solver: str) -> int:
    """The seed of a job's proposals, 31 bits: the same layer and solver get the same candidates in
    every session."""
    return (
        int.from_bytes(hashlib.sha256(f"{config_key}/{solver}".encode()).digest()[:4], "big") >> 1
    )


class _StoredConfig(NamedTuple):
    key: str
    json: dict[str, Any]
    body: str | None

    @property
    def data(self) -> tuple[str, ...]:
        """The digests of `Config.data_fields`, which only kinds with a body have."""
        return from_json(self.json).data_digests if self.body else ()


def _configs(connection: sa.Connection, ids: Iterable[int]) -> dict[int, _StoredConfig]:
    found: dict[int, _StoredConfig] = {}
    for part in parts(sorted(ids)):
        for config_id, key, text, body in connection.execute(_CONFIGS, {"some": part}):
            found[config_id] = _StoredConfig(key, json_object(text), body)
    return found


@functools.lru_cache(maxsize=10_000)
def json_object(text: str) -> dict[str, Any]:
    """The object in the JSON of a config or of options, shared by all jobs that have it: do not
    change it."""
    found: dict[str, Any] = json.loads(text)
    return found


def _candidates(
    connection: sa.Connection,
    step: str,
    job_ids: Sequence[int],
    measures: Sequence[str],
    *,
    builds: bool,
) -> dict[int, list[Candidate]]:
    """Return the candidates that earlier steps proposed (if `step` builds) or built, and did not
    find wrong, without those that `measures` did well.

    A candidate that failed at `step` is among them: an attempt that repeats the step tries it
    again. What was built and is lost is built again.
    """
    query, done = (_TO_BUILD, measures) if builds else (_TO_MEASURE, [step])
    candidates: dict[int, list[Candidate]] = defaultdict(list)
    for part in parts(job_ids):
        for row in connection.execute(query, {"some": part, "done": done, "at": step}):
            candidate = (
                Candidate(index=row[1], params=row[2])
                if builds
                else Candidate(index=row[1], artifact=row[2])
            )
            candidates[row.job_id].append(candidate)
    return candidates


def _history(
    connection: sa.Connection, rules: SearchRules, rows: Iterable[ClaimedJob]
) -> dict[int, tuple[str, ...]]:
    """By job: the names of the blocks of trials of the rounds before its own."""
    found: dict[int, tuple[str, ...]] = {}
    for row in rows:
        if row.search_id is not None:
            rounds = rules.look_ahead(row.options)
            blocks = history.blocks(connection, row.search_id, row.round, rounds)
            found[row.id] = tuple(map(history.digest, blocks))
    return found


def _rivals(
    connection: sa.Connection, work: SessionWork, configs: Mapping[int, _StoredConfig]
) -> dict[int, tuple[Rival, ...]]:
    """Whom the finals of these configs measure."""
    return {
        config_id: tuple(
            Rival(
                index=row.id,
                solver=row.name,
                seed=seed(configs[config_id].key, row.name),
                options=row.options,
                number=row.number,
                params=row.params,
                artifact=row.artifact,
                time_ms=row.time_ms,
            )
            for row in rows
        )
        for config_id, rows in finals.rivals(
            connection, work.session_id, work.library, configs
        ).items()
    }


def _bests(
    connection: sa.Connection, session_id: int, rows: Sequence[ClaimedJob]
) -> dict[tuple[int, int], dict[str, Any]]:
    """The fields of items about the result that the session measured, by config and solver."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for part in parts(sorted({row.config_id for row in rows})):
        some = connection.execute(_BEST, {"of_session": session_id, "some": part})
        found |= {
            (row.config_id, row.solver_id): {"best_ms": row.time_ms, "best_noisy": row.noisy}
            for row in some
        }
    return found


def _known_params(
    connection: sa.Connection, session_id: int, rows: Sequence[ClaimedJob]
) -> dict[tuple[int, int], str]:
    """The best known params of the session, by config and solver."""
    query = sa.select(FindDb.config_id, FindDb.solver_id, FindDb.params).where(
        FindDb.session_id == session_id, FindDb.params != ""
    )
    configs = {row.config_id for row in rows}
    found = rows_among(connection, query, FindDb.config_id, configs)
    return {(row.config_id, row.solver_id): row.params for row in found}
