"""The training of a predictor: the trials that it is from, and the rows that keep it."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tuna.api.rows import (
    KernelRow,
    PredictorRow,
    config,
    environment,
    find_db,
    job,
    session,
    solver,
    timed,
    trial,
    upsert,
    utc_now,
)
from tuna.configs import from_json_text
from tuna.libraries.base import Library
from tuna.vocabulary import BASELINE
from tuna_predict.evaluation import Evaluation
from tuna_predict.predictor import Table, TimedCandidate, write_tables
from tuna_predict.predictors import StoredPredictor, get

#: Trials that are learned from, the latest ones.
MAX_TRIALS = 20_000
_NAME_DIGITS = 8


@dataclass(frozen=True)
class Seen:
    """The trials that a predictor is trained from."""

    library: str
    arch: str | None = None
    since: datetime | None = None


def trials_of(connection: sa.Connection, library: Library, seen: Seen) -> list[Table]:
    """Return the latest trials by layer and environment, simulated ones left out, and those with a
    time that no run can have taken."""
    simulated = sa.exists().where(
        *(find_db.c[name] == job.c[name] for name in ("session_id", "config_id", "solver_id")),
        find_db.c.simulated.is_(True),
    )
    ok = timed(trial.c.time_ms)
    query = (
        sa.select(
            *(trial.c.params, trial.c.id, solver.c.name),
            *(config.c.json, environment.c.key, environment.c.arch, environment.c.device),
            sa.case((ok, trial.c.time_ms)).label("time_ms"),
        )
        .select_from(trial)
        .join(job, job.c.id == trial.c.job_id)
        .join(solver, solver.c.id == job.c.solver_id)
        .join(config, config.c.id == job.c.config_id)
        .join(session, session.c.id == job.c.session_id)
        .join(environment, environment.c.id == session.c.environment_id)
        .where(environment.c.library == seen.library, trial.c.params.is_not(None))
        .where(sa.or_(ok, trial.c.cause.is_not(None)), ~simulated, solver.c.algorithm != BASELINE)
        .order_by(trial.c.id.desc())
        .limit(MAX_TRIALS)
    )
    if seen.arch is not None:
        query = query.where(environment.c.arch == seen.arch)
    if seen.since is not None:
        query = query.where(trial.c.measured_at >= seen.since)
    tables: dict[tuple[str, ...], dict[tuple[str, str], TimedCandidate]] = defaultdict(dict)
    for row in connection.execute(query):
        facts = library.params.facts(row.params)
        if facts is not None:
            place = row.json, row.key, row.arch, row.device
            name = row.name, facts.name or row.params
            known = tables[place].get(name)
            if known is None or (row.time_ms or 1e300) < (known.time_ms or 1e300):
                tables[place][name] = TimedCandidate(
                    row.name, facts.name, facts.features, row.time_ms
                )
    return [
        Table(from_json_text(text), key, arch, device, [each[name] for name in sorted(each)])
        for (text, key, arch, device), each in tables.items()
    ]


@dataclass(frozen=True)
class Trained:
    """A predictor that is not kept yet."""

    seen: Seen
    seed: int
    tables: Sequence[Table]  #: usable ones
    model: bytes
    evaluation: Evaluation


def store(connection: sa.Connection, made: Trained) -> StoredPredictor:
    """Keep a predictor, unless it is there already: the same trials and seed make the same one."""
    document = write_tables(made.tables)
    blobs = [made.model, gzip.compress(document, mtime=0)]
    model, tables = (hashlib.sha256(blob).hexdigest() for blob in blobs)
    for name, blob in zip((model, tables), blobs, strict=True):
        row = {"digest": name, "blob": blob, "size_bytes": len(blob)}
        upsert(connection, KernelRow, [row], key=("digest",))
    digits = hashlib.sha256((model + tables).encode()).hexdigest()[:_NAME_DIGITS]
    name = f"{made.seen.library}-{digits}"
    used = sa.select(environment.c.library_version).distinct()
    used = used.where(environment.c.key.in_({table.environment for table in made.tables}))
    row = {
        **vars(made.seen),
        "name": name,
        "arch": made.seen.arch or "",
        "seed": made.seed,
        "library_version": ", ".join(sorted(connection.execute(used).scalars()))[:255],
        "seen": hashlib.sha256(document).hexdigest(),
        "trials": sum(len(table.candidates) for table in made.tables),
        "layers": len({table.config.key for table in made.tables}),
        "model": model,
        "tables": tables,
        "evaluation": json.dumps(made.evaluation.as_json()),
        "created_at": utc_now(),
    }
    upsert(connection, PredictorRow, [row], key=("name",))
    return get(connection, name)
