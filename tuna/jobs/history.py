"""The trials that a search learns from, as blocks in the artifact store, since workers have no SQL.

Its own history is a block for each earlier round. A block is gzip of one JSON object a line, in the
order of the candidates: `params`, `time_ms` (null: it failed) and `cause`. The round just before
the one that is proposed (as many as `SearchRules.look_ahead` says) may still be measured, so its
block has params alone, whether it is or not: what is proposed depends on results, never on when
they arrived.

Its warm start are searches of the same solver that have results, not simulated ones:

1. of the same config in other sessions of this environment,
2. of other configs in this environment that differ in sizes alone, first those that differ in the
batch size alone, the nearest first,
3. of either in other environments of the same version of the library, such as those of other
devices.

They are chosen in the transaction that opens the search's first round, just before it is first
claimed, and again in that which opens its first round that is proposed from results of its own: by
then searches that began beside it have some. They are stored with the trials that they had (table
`warm_start`; the block of trials, before which a line has the `config`, in `kernel`), with the
trained predictor that is used instead of the library's own prior, if there is one. So rounds learn
from the same in each attempt, whatever ends or is deleted meanwhile, and a block that the artifact
store loses is written again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import sqlalchemy as sa

from tuna.common.files import gunzip
from tuna.configs import Config, TaskConfig, from_json_text
from tuna.configs.similarity import differ_in_batch, size_distance
from tuna.db.bulk import parts, rows_among, upsert
from tuna.db.models import (
    ConfigRow,
    EnvironmentRow,
    FindDb,
    Job,
    KernelRow,
    PredictorRow,
    Search,
    Session,
    SolverRow,
    TrialRow,
    WarmStartRow,
)
from tuna.db.types import timed
from tuna.jobs.serving import SessionWork
from tuna.jobs.states import ClaimedJob
from tuna.libraries.base import Step
from tuna.libraries.items import Sibling
from tuna.libraries.results import is_time
from tuna.vocabulary import SEARCH


def blocks(connection: sa.Connection, search_id: int, before: int, unmeasured: int) -> list[bytes]:
    """The blocks of the rounds of a search `before` this one, the first round first; the last
    `unmeasured` of them may still be measured."""
    return [
        block(trials, measured=number < before - unmeasured)
        for number, trials in enumerate(_trials_of_rounds(connection, search_id, before))
    ]


def _trials_of_rounds(connection: sa.Connection, search_id: int, before: int) -> list[list[Any]]:
    query = (
        sa.select(Job.round, TrialRow.params, TrialRow.time_ms, TrialRow.cause)
        .join(TrialRow, TrialRow.job_id == Job.id)
        .where(Job.search_id == search_id, Job.round < before, TrialRow.params.is_not(None))
        .order_by(Job.round, TrialRow.number)
    )
    trials: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(query):
        trials[row.round].append(row)
    return [trials[number] for number in range(before)]


def find_blocks(connection: sa.Connection, digests: Mapping[str, int]) -> dict[str, bytes]:
    """Blocks by their SHA-256, of the searches of the jobs whose ids are given; what changed
    meanwhile is left out."""
    found: dict[str, bytes] = {}
    query = sa.select(Job.search_id, Job.round).where(Job.search_id.is_not(None))
    for search_id, before in rows_among(connection, query, Job.id, set(digests.values())):
        for trials in _trials_of_rounds(connection, search_id, before):
            either = (block(trials, measured=measured) for measured in (True, False))
            found |= {digest(one): one for one in either}
    return {name: found[name] for name in digests if name in found}


def digest(block: bytes) -> str:
    """The name of a block in the artifact store."""
    return hashlib.sha256(block).hexdigest()


def block(trials: Sequence[Any], *, measured: bool, config: str = "") -> bytes:
    """Rows of `trial` with `params`, and with `time_ms` and `cause` if they are `measured`;
    `config`: JSON of the search's own, where it is another one's."""
    lines = [f'{{"config":{config}}}'] if config else []
    lines += [
        json.dumps(
            {
                "params": row.params,
                **({"time_ms": _time_ms(row), "cause": row.cause} if measured else {}),
            },
            separators=(",", ":"),
        )
        for row in trials
    ]
    return gzip.compress("\n".join(lines).encode(), mtime=0)


def _time_ms(row: Any) -> float | None:
    """The time of a row of `trial`; None for one that an older version took in and that no run can
    have taken."""
    time_ms: float | None = row.time_ms
    return time_ms if is_time(time_ms) else None


def read(blocks: Sequence[bytes]) -> list[list[dict[str, Any]]]:
    """The trials of blocks."""
    rows = ([json.loads(line) for line in gunzip(block).splitlines()] for block in blocks)
    return [[row for row in each if "params" in row] for each in rows]


#: Maximum of searches in a warm start; minimum of trials with a time in a search that is learned
#: from
MAX_SEARCHES, _MIN_TIMED_TRIALS = 8, 8
#: Numbers of trials taken from each search: the fastest, slower ones spread over all times, and
#: failed ones. With the fastest 64 alone, the mean area of `scripts/bench search` is 0.92, not
#: 0.94.
_FASTEST, _SPREAD, _FAILED = 32, 32, 16
#: Maximum of bytes of a block of trials; a larger one is left out, because its candidates' params
#: are long
_LARGEST_BYTES = 1 << 20
#: Maximum of searches that are considered, the latest ones, first those of this environment, then
#: those of others
_LATEST = 1000
_LABEL_CHARS = 255


class Origin(str, Enum):
    """The relation of a sibling to the search, the nearest first."""

    SESSION = "session"  #: the same config, in another session of this environment
    CONFIG = "config"  #: another config, in this environment
    DEVICE = "device"  #: a search in another environment
    PRIOR = "prior"  #: a trained predictor that is used in searches, instead of a search


class WarmStart(NamedTuple):
    """A search of a session, and what it learns from."""

    layer: str
    solver: str
    siblings: tuple[SiblingFacts, ...]


class SiblingFacts(NamedTuple):
    """One search that another learns from."""

    origin: str
    noisy: bool  #: true if the device of that search was not quiet
    trials: int  #: number of its trials that are learned from
    label: str


class _KnownSearch(NamedTuple):
    """A search that has a result, with its config and environment."""

    id: int
    session_id: int
    config_id: int
    json: str
    label: str
    noisy: bool
    environment_id: int
    arch: str
    device: str

    def origin(self, row: ClaimedJob, environment_id: int) -> Origin:
        if self.environment_id != environment_id:
            return Origin.DEVICE
        return Origin.SESSION if self.config_id == row.config_id else Origin.CONFIG

    def named(self, origin: Origin) -> str:
        """For people."""
        place = f" on {self.device or self.arch}" if origin is Origin.DEVICE else ""
        return f"{self.label} in session {self.session_id}{place}"[:_LABEL_CHARS]


def choose_warm_starts(
    connection: sa.Connection, work: SessionWork, step: Step, rows: Iterable[ClaimedJob]
) -> None:
    """Choose and store the warm starts of the searches of which the first round, or the first one
    that is proposed from results of its own, is opened: its first attempt at `step` is next."""
    rules = work.library.search
    if rules is None or step.name != SEARCH:
        return
    for row in rows:
        chooses = row.round in (0, 1 + rules.look_ahead(row.options)) and row.attempt == 0
        if chooses and row.search_id is not None and rules.warm_starts(row.options):
            chosen = _chosen(connection, row)
            _store(connection, row.search_id, row.round, chosen, _prior(connection, work))


#: Rounds of searches, built once: building a statement costs more than running it
_OF_ROUNDS = (
    sa.select(
        *(Job.id, WarmStartRow.round, WarmStartRow.digest),
        *(WarmStartRow.origin, WarmStartRow.noisy, WarmStartRow.label),
    )
    .join(WarmStartRow, WarmStartRow.search_id == Job.search_id)
    .where(Job.id.in_(sa.bindparam("ids", expanding=True)), WarmStartRow.round <= Job.round)
    .order_by(Job.id, WarmStartRow.number)
)


def warm_starts_of(
    connection: sa.Connection, rows: Iterable[ClaimedJob]
) -> dict[int, tuple[Sibling, ...]]:
    """By job: the warm start of the search that it is a round of, the nearest search first."""
    found: dict[int, tuple[Sibling, ...]] = {}
    for part in parts(sorted(row.id for row in rows)):
        latest = _latest(connection.execute(_OF_ROUNDS, {"ids": part}))
        for job_id, of_job in latest.items():
            found[job_id] = tuple(
                Sibling(
                    artifact=row.digest,
                    prior=row.origin == Origin.PRIOR.value,
                    same=row.origin == Origin.SESSION.value and not row.noisy,
                    label=row.label,
                )
                for row in of_job
            )
    return found


def _latest(rows: Iterable[Any]) -> dict[int, list[Any]]:
    """By the rows' `id`, those that were chosen last, of rows in the order of their numbers."""
    found: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        if found[row.id] and found[row.id][0].round < row.round:
            found[row.id].clear()
        found[row.id].append(row)
    return found


def warm_starts_of_session(connection: sa.Connection, session_id: int) -> list[WarmStart]:
    """The session's searches that learn from others, in the order in which they were loaded."""
    names = ("round", "origin", "noisy", "trials", "label")
    query = (
        sa.select(
            *(Search.id, ConfigRow.label.label("layer"), SolverRow.name.label("solver")),
            *(getattr(WarmStartRow, name) for name in names),
        )
        .select_from(Search)
        .join(WarmStartRow, WarmStartRow.search_id == Search.id)
        .join(ConfigRow, ConfigRow.id == Search.config_id)
        .join(SolverRow, SolverRow.id == Search.solver_id)
        .where(Search.session_id == session_id)
        .order_by(Search.id, WarmStartRow.number)
    )
    return [
        WarmStart(
            rows[0].layer,
            rows[0].solver,
            tuple(SiblingFacts(row.origin, bool(row.noisy), row.trials, row.label) for row in rows),
        )
        for rows in _latest(connection.execute(query)).values()
    ]


def _chosen(
    connection: sa.Connection, row: ClaimedJob
) -> list[tuple[_KnownSearch, Origin, list[Any]]]:
    """The nearest searches, with their trials."""
    environment = connection.execute(
        sa.select(EnvironmentRow.id, EnvironmentRow.library, EnvironmentRow.library_version)
        .join(Session, Session.environment_id == EnvironmentRow.id)
        .where(Session.id == row.session_id)
    ).one()
    text = connection.execute(
        sa.select(ConfigRow.json).where(ConfigRow.id == row.config_id)
    ).scalar_one()
    config = from_json_text(text)
    here = EnvironmentRow.id == environment.id
    like = (
        EnvironmentRow.library == environment.library,
        EnvironmentRow.library_version == environment.library_version,
    )
    ranked: list[tuple[tuple[Any, ...], _KnownSearch, Origin]] = []
    for which in ((here,), (~here, *like)):
        for search in _known(connection, row, which):
            same, other = search.config_id == row.config_id, from_json_text(search.json)
            distance = 0.0 if same else _distance(config, other)
            if distance is not None and (search.session_id != row.session_id or not same):
                origin = search.origin(row, environment.id)
                differs = same, not search.noisy, differ_in_batch(config, other)
                place = list(Origin).index(origin), *(not flag for flag in differs)
                ranked.append(((*place, distance, -search.id), search, origin))
    chosen: list[tuple[_KnownSearch, Origin, list[Any]]] = []
    for _, search, origin in sorted(ranked, key=lambda entry: entry[0]):
        if len(chosen) == MAX_SEARCHES:
            break
        if trials := _trials(connection, search):
            chosen.append((search, origin, trials))
    return chosen


def _known(
    connection: sa.Connection, row: ClaimedJob, which: Sequence[sa.ColumnElement[bool]]
) -> Iterator[_KnownSearch]:
    """The latest searches of the row's solver that have a result, in the environments that `which`
    says."""
    result = [
        getattr(FindDb, name) == getattr(Search, name)
        for name in ("session_id", "config_id", "solver_id")
    ]
    query = (
        sa.select(
            *(Search.id, Search.session_id, Search.config_id),
            *(ConfigRow.json, ConfigRow.label, FindDb.noisy),
            *(EnvironmentRow.id, EnvironmentRow.arch, EnvironmentRow.device),
        )
        .select_from(Search)
        .join(Session, Session.id == Search.session_id)
        .join(EnvironmentRow, EnvironmentRow.id == Session.environment_id)
        .join(ConfigRow, ConfigRow.id == Search.config_id)
        .join(FindDb, sa.and_(*result))
        # Index ix_search_solver_id, backwards.
        .where(Search.solver_id == row.solver_id, Search.steps == row.steps)
        .where(timed(FindDb.time_ms), FindDb.simulated.is_(False), *which)
        .order_by(Search.id.desc())
        .limit(_LATEST)
    )
    return map(_KnownSearch._make, connection.execute(query))


def _distance(config: Config, other: Config) -> float | None:
    """The distance between two layers in size; not known of functions without a core. None:
    they are of different kinds."""
    if (
        isinstance(config, TaskConfig)
        and isinstance(other, TaskConfig)
        and config.name
        and config.name == other.name
    ):
        return math.inf
    return size_distance(config, other)


def _trials(connection: sa.Connection, search: _KnownSearch) -> list[Any]:
    """The trials that are learned from a search, as `block` takes it; empty if that is too
    little."""
    query = (
        sa.select(TrialRow.id)
        .join(Job, Job.id == TrialRow.job_id)
        .where(Job.search_id == search.id)
    )
    known = query.where(TrialRow.params.is_not(None))
    good = known.where(TrialRow.cause.is_(None), timed(TrialRow.time_ms)).order_by(
        TrialRow.time_ms, TrialRow.id
    )
    fastest = list(connection.execute(good).scalars())
    if len(fastest) < _MIN_TIMED_TRIALS:
        return []
    slower = fastest[_FASTEST:]
    spread = slower[:: max(1, math.ceil(len(slower) / _SPREAD))]
    failed = known.where(TrialRow.cause.is_not(None)).order_by(TrialRow.id).limit(_FAILED)
    ids = [*fastest[:_FASTEST], *spread, *connection.execute(failed).scalars()]
    columns = (TrialRow.params, TrialRow.time_ms, TrialRow.cause)
    return list(
        connection.execute(sa.select(*columns).where(TrialRow.id.in_(ids)).order_by(TrialRow.id))
    )


def _store(
    connection: sa.Connection,
    search_id: int,
    round_: int,
    chosen: Sequence[tuple[_KnownSearch, Origin, list[Any]]],
    prior: Any,
) -> None:
    """Store the warm start of the rounds from this one on, after those of earlier ones; `prior`:
    the row of a predictor, or None."""
    of_search = WarmStartRow.search_id == search_id
    first = connection.execute(sa.select(sa.func.count()).where(of_search)).scalar_one()
    learned: list[tuple[str, Origin, bool, int, str]] = []
    for search, origin, trials in chosen:
        blob = block(trials, measured=True, config=search.json)
        if len(blob) <= _LARGEST_BYTES:
            name = digest(blob)
            row = {"digest": name, "blob": blob, "size_bytes": len(blob)}
            # The row is locked until there is one that refers to it.
            upsert(connection, KernelRow, [row], key=("digest",))
            learned.append((name, origin, search.noisy, len(trials), search.named(origin)))
    if prior is not None:
        learned.append((prior.model, Origin.PRIOR, False, prior.trials, prior.name))
    place = {"search_id": search_id, "round": round_}
    rows = [
        {**place, "number": number, "digest": name, "origin": origin.value}
        | {"noisy": noisy, "trials": count, "label": label}
        for number, (name, origin, noisy, count, label) in enumerate(learned, first)
    ]
    if rows:
        connection.execute(sa.insert(WarmStartRow), rows)


def _prior(connection: sa.Connection, work: SessionWork) -> Any:
    """The predictor that is used in searches in the session's environment; None without one."""
    used = sa.select(PredictorRow.name, PredictorRow.model, PredictorRow.trials).where(
        PredictorRow.library == work.library.name,
        PredictorRow.arch.in_(("", work.environment.arch)),
        PredictorRow.in_searches.is_(True),
    )
    return connection.execute(used).first()
