"""Which kernels are known for the tasks of a model: the fastest ones of each, else those of a
similar task."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import RELEASES, SESSIONS, TRIALS, Results, parts, timed
from tuna.configs import Config, TaskConfig, from_json_text
from tuna.configs.similarity import size_distance
from tuna.configs.task import Core
from tuna.libraries.results import is_close
from tuna.libraries.tvm.decisions import readable
from tuna.libraries.tvm.toolchain import toolchain_of
from tuna_models.manifest import Manifest

#: Candidates of a task that are compared in the model, at most: those close to the fastest.
_MAX_CANDIDATES = 3


@dataclass(frozen=True)
class Winner:
    """A measured kernel of a task."""

    solver: str
    params: str
    time_ms: float
    session_id: int
    job_id: int | None = None  #: None: of a golden version, or imported


@dataclass(frozen=True)
class ResultScope:
    """Which results count: those of one session, of one golden version, or all on machines like the
    model's target."""

    session_id: int | None = None
    golden_id: int | None = None  #: Id of the row of `golden`
    winograd: bool = True  #: False: direct sums alone
    simulated: bool = False  #: True: results of emulated devices alone; False: of real ones


def winners(
    connection: sa.Connection, manifest: Manifest, source: ResultScope
) -> dict[str, Winner]:
    """The fastest result of each task by its key."""
    found = _results(connection, manifest, source, manifest.weights())
    return {key: each[0] for key, each in found.items()}


def finalists(
    connection: sa.Connection, manifest: Manifest, source: ResultScope
) -> dict[str, list[Winner]]:
    """The fastest kernels of each task by its key: the best of each solver first, then what came
    close to one of them."""
    winners = _results(connection, manifest, source, manifest.weights())
    trials = _close_trials(connection, [winner for each in winners.values() for winner in each])
    chosen = {}
    for key, each in winners.items():
        best_ms = each[0].time_ms
        close = [winner for winner in each if is_close(winner.time_ms, best_ms)]
        others = [
            trial
            for winner in close
            for trial in trials.get(winner.job_id, ())
            if trial.params != winner.params
        ]
        others.sort(key=lambda trial: (trial.time_ms, trial.params))
        near = [trial for trial in others if is_close(trial.time_ms, best_ms)]
        chosen[key] = [*close, *near][:_MAX_CANDIDATES]
    return chosen


def nearest(
    connection: sa.Connection, manifest: Manifest, source: ResultScope, known: Iterable[str]
) -> dict[str, Winner]:
    """For each task that is not among the `known` keys the winner of that one which is the most
    alike.

    The most alike is the same layer with another epilogue or none, then one that differs in sizes
    alone (`size_distance`).
    """
    there_already = set(known)
    missing = [task for task in _with_cores(manifest) if task.key not in there_already]
    found = _alike(connection, manifest, source, missing, other_layouts=False)
    return {key: each[0] for key, each in found.items()}


def warm_starts(
    connection: sa.Connection, manifest: Manifest, source: ResultScope
) -> dict[str, dict[str, str]]:
    """For each task the points that won for the task or bare layer that is the most alike, by
    solver, the fastest first.

    As `nearest`; the same layer in other layouts is the next after the same one. A point is its
    text (`params.readable`).
    """
    found = _alike(connection, manifest, source, _with_cores(manifest), other_layouts=True)
    return {
        key: {winner.solver: readable(winner.params) for winner in each}
        for key, each in found.items()
    }


def _with_cores(manifest: Manifest) -> list[TaskConfig]:
    return [entry.task for entry in manifest.tasks if entry.task.core is not None]


def _alike(
    connection: sa.Connection,
    manifest: Manifest,
    source: ResultScope,
    tasks: Sequence[TaskConfig],
    *,
    other_layouts: bool,
) -> dict[str, list[Winner]]:
    """The best result of each solver for what is the most alike, the fastest first, by the keys of
    `tasks`."""
    if not tasks:
        return {}
    others = _others(connection, manifest, source, [task.core for task in tasks if task.core])
    chosen: dict[str, str] = {}
    for task in tasks:
        distances = [
            (distance, key)
            for key, other in others
            if key != task.key
            and (other_layouts or other.layouts == task.layouts)
            and (distance := _distance(task, other)) is not None
        ]
        if distances:
            _, chosen[task.key] = min(distances)
    winners = _results(connection, manifest, source, set(chosen.values()))
    return {key: winners[other] for key, other in chosen.items() if other in winners}


def _distance(task: TaskConfig, other: TaskConfig) -> tuple[int, float] | None:
    if task.core == other.core:
        return int(task.layouts != other.layouts), 0.0
    found = size_distance(task, other)
    return None if found is None else (2, found)


def _others(
    connection: sa.Connection,
    manifest: Manifest,
    source: ResultScope,
    cores: Sequence[Core],
) -> list[tuple[str, TaskConfig]]:
    """All tasks that have a result, and the bare layers among `cores` that have one, as tasks; with
    their keys."""
    results = _comparable(manifest, source)
    core_keys = {core.key for core in cores}
    wanted = sa.or_(results["kind"] == TaskConfig.kind, results["config_key"].in_(core_keys))
    query = results.select("config_key", "json", "target", "conditions").where(wanted)
    found = {}
    for row in connection.execute(query.distinct()):
        if json.loads(row.target) == json.loads(manifest.target):
            task = _as_task(from_json_text(row.json), row.conditions or {})
            if task is not None:
                found[row.config_key] = task
    return sorted(found.items())


def _as_task(config: Config, conditions: Mapping[str, Any]) -> TaskConfig | None:
    if isinstance(config, TaskConfig):
        return config if config.core is not None else None
    assert isinstance(config, Core)
    layouts = str(conditions.get("layouts", "layer"))
    return TaskConfig(core=config, layouts=layouts)


def _results(
    connection: sa.Connection, manifest: Manifest, source: ResultScope, keys: Iterable[str]
) -> dict[str, list[Winner]]:
    """The best result of each solver of these configs, the fastest first.

    Results with emptied caches count alone where there are any: such is a model, and other times
    cannot be compared with them.
    """
    results = _comparable(manifest, source)
    columns = ["config_key", "solver", "params", "time_ms", "session_id", "target", "conditions"]
    query = results.select(*columns, *([] if results.released else ["job_id"]))
    same = json.loads(manifest.target)
    winners: dict[str, dict[tuple[bool, str], Winner]] = defaultdict(dict)
    for part in parts(sorted(keys)):
        for row in connection.execute(query.where(results["config_key"].in_(part))):
            if json.loads(row.target) == same:
                place = (row.conditions or {}).get("caches") == "cold", row.solver
                job_id = None if results.released else row.job_id
                winner = Winner(row.solver, row.params, float(row.time_ms), row.session_id, job_id)
                known = winners[row.config_key].get(place)
                if known is None or (winner.time_ms, winner.params) < (
                    known.time_ms,
                    known.params,
                ):
                    winners[row.config_key][place] = winner
    return {key: _fastest_first(each) for key, each in winners.items()}


def _fastest_first(found: Mapping[tuple[bool, str], Winner]) -> list[Winner]:
    cold = any(is_cold for is_cold, _ in found)
    alike = [winner for (is_cold, _), winner in found.items() if is_cold == cold]
    return sorted(alike, key=lambda winner: (winner.time_ms, winner.solver))


def _comparable(manifest: Manifest, source: ResultScope) -> Results:
    """Measured results of TVM's version and the kernels as they are now."""
    results = SESSIONS if source.golden_id is None else RELEASES
    emulated = timed(results["time_ms"]), results["simulated"].is_(True), results.no_baseline
    where = [
        *(emulated if source.simulated else results.measured),
        results["library"] == "tvm",
        results["library_version"] == manifest.tvm,
        results["toolchain"] == toolchain_of(manifest.tvm),
    ]
    if source.golden_id is not None:
        where.append(results["golden_id"] == source.golden_id)
    elif source.session_id is not None:
        where.append(results["session_id"] == source.session_id)
    if not source.winograd:
        where.append(results["family"] != "Winograd")
    return results.only(*where, by=["library", "family"])


def _close_trials(
    connection: sa.Connection, found: Sequence[Winner]
) -> dict[int | None, list[Winner]]:
    """Good trials of the winners' jobs, by job."""
    by_job = {winner.job_id: winner for winner in found if winner.job_id is not None}
    trials: dict[int | None, list[Winner]] = defaultdict(list)
    query = TRIALS.select("job_id", "params", "time_ms").where(*TRIALS.measured)
    for part in parts(sorted(by_job)):
        of_jobs = query.where(TRIALS["job_id"].in_(part), TRIALS["params"].is_not(None))
        for row in connection.execute(of_jobs):
            job = by_job[row.job_id]
            trial = Winner(
                job.solver, row.params or "", float(row.time_ms or 0.0), job.session_id, row.job_id
            )
            trials[row.job_id].append(trial)
    return trials
