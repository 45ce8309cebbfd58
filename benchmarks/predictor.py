"""A predictor on layers that it has not seen, from recorded trials; nothing is built or measured.

A database gets the tables of `benchmarks/trials` and the trials of two sessions of the tvm library
(`benchmarks/sessions.jsonl.gz`: layers for the families of kernels, and 3D convolutions with random
schedules), as trials that a session has. `tuna predictor train` learns from them, and each layer is
judged by a predictor of other layers.

Searches are replayed as `scripts/bench search` does. The built-in prior of a layer of
`benchmarks/trials` is trained as that in the package, without the tables of the layer's operator;
the predictor is trained without the layer's own trials. `lost` is what is left of a curve's area.
Latencies are those of answers for layers without a result, after the first.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.harness import Outcome, command_line
from benchmarks.search import FOLDER, Table, prior_of, read, replay
from tuna.configs import Config, from_json, read_line
from tuna.libraries.kernels import Past
from tuna.libraries.tvm.decisions import Design, built_in_prior, facts_of
from tuna_predict import evaluation, predictor
from tuna_predict.api import train_predictor, use_predictor
from tuna_predict.training import Seen

SESSIONS = Path(__file__).parent / "sessions.jsonl.gz"
#: Layer, solver, params, milliseconds and cause of a trial.
Trial = tuple[Config, str, str, float | None, str | None]
#: Trials of a replayed search, at most half of the table.
_TRIALS, _BATCH = 128, 16
_ASKED = 50


def main() -> int:
    """Print all figures; 1 if a limit is missed."""
    given = command_line(__doc__, seeds=5).parse_args()
    with tempfile.TemporaryDirectory(prefix="tuna-predictor-") as folder:
        os.environ["TUNA_HOME"] = folder
        from tuna import api

        api.update_solvers("tvm")
        store(api.init_session("tvm", "recorded tables").id, recorded())
        store(api.init_session("tvm", "two sessions").id, sessions())
        seen = Seen("tvm")
        started = time.process_time()
        trained = train_predictor(seen)
        figures = {"train CPU-s": time.process_time() - started}
        assert trained.name == train_predictor(seen).name, "another predictor the second time"
        evaluation = trained.evaluation
        used = use_predictor(trained.name, "tvm", force=True)
        assert used is not None
        figures |= {"layers": trained.layers, "trials": trained.trials}
        figures |= _figures("held out", evaluation["ways"])
        figures |= {"searched layers": evaluation["searched"]}
        figures |= _figures("searched", evaluation["searched_ways"])
        answers = evaluation["answers"]
        figures |= {f"answers, {name}": value for name, value in answers.items()}
        figures |= _latencies(api)
    lost = _lost(given.seeds)
    figures |= {f"{name} lost, {way}": each[way] for name, each in lost.items() for way in each}
    ratios = {
        "regret@8 over nearest": evaluation["ways"]["trained"]["regret@8"]
        / evaluation["ways"]["nearest"]["regret@8"],
        "answers over 32 trials": answers["over_found"],
        "answers over random": answers["over_random"],
        "lost area over built-in": sum(one["trained"] for one in lost.values())
        / sum(one["built-in"] for one in lost.values()),
    }
    limits = {
        "regret@8 over nearest": 1.0,
        "answers over 32 trials": 1.5,
        "answers over random": 0.9,
        "lost area over built-in": 1.0,
        "warm answer ms, longest": 100.0,
    }
    return Outcome("predictor", figures, ratios=ratios, limits=limits).print()


def recorded() -> Iterator[Trial]:
    """Yield the trials of `benchmarks/trials`."""
    for path in sorted(FOLDER.glob("*.jsonl.gz")):
        header, *lines = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
        designs = [Design.read(trace) for trace in header["designs"]]
        for line in lines:
            design, *values = line["point"]
            params = json.dumps([designs[design].trace(tuple(values))], separators=(",", ":"))
            time_ms = None if line["seconds"] is None else 1000 * line["seconds"]
            yield from_json(header["config"]), header["solver"], params, time_ms, line["cause"]


def sessions() -> Iterator[Trial]:
    """Yield the trials of `SESSIONS`."""
    config = None
    for line in gzip.decompress(SESSIONS.read_bytes()).decode().splitlines():
        row = json.loads(line)
        config = from_json(row["config"]) if "config" in row else config
        assert config is not None
        yield config, row["solver"], row["params"], row["time_ms"], row["cause"]


def store(session_id: int, trials: Iterator[Trial]) -> None:
    """Write trials into a session, a job for each layer and solver."""
    from tuna.db import configs
    from tuna.db.database import open_database
    from tuna.db.engine import writing
    from tuna.db.models import Job, SolverRow, TrialRow

    with writing(open_database()) as connection:
        solver = sa.select(SolverRow.name, SolverRow.id).where(SolverRow.library == "tvm")
        solvers: dict[str, int] = {row.name: row.id for row in connection.execute(solver)}
        jobs: dict[tuple[Config, str], int] = {}
        for number, (config, name, params, time_ms, cause) in enumerate(trials):
            if (config, name) not in jobs:
                (config_id,) = configs.store(connection, [config], None).ids
                ids = {"session_id": session_id, "config_id": config_id, "solver_id": solvers[name]}
                job = {"steps": "compile,eval", "step": "eval", "state": "evaluated", "reason": ""}
                done = connection.execute(sa.insert(Job).values(**ids, **job, options={}))
                assert done.inserted_primary_key is not None
                jobs[config, name] = done.inserted_primary_key[0]
            row = {"job_id": jobs[config, name], "number": number, "params": params}
            row |= {"time_ms": time_ms, "cause": cause, "output_tail": "", "times_ms": "[]"}
            connection.execute(sa.insert(TrialRow).values(**row))


def _figures(title: str, ways: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        f"{title}, {way}, {name}": value
        for way, found in ways.items()
        for name, value in found.items()
    }


def _latencies(api: Any) -> dict[str, float]:
    """Milliseconds of answers for layers that are in no session."""
    from tuna.results.best import LayerIndex

    index, took = LayerIndex(), []
    for channels in range(_ASKED):
        sizes = f"-c {40 + channels} -H 14 -W 14 -k {40 + channels}"
        line = f"MIOpenDriver conv -n 1 {sizes} -y 3 -x 3 -p 1 -q 1 -u 1 -v 1 -l 1 -j 1 -F 1"
        read_line(line)
        started = time.perf_counter()
        (answer,) = api.best([line], index=index, predict=True)
        took.append(1000 * (time.perf_counter() - started))
        assert str(answer.cover) in ("predicted", "exact"), answer
    first, *warm = took
    return {
        "first answer ms": first,
        "warm answer ms": statistics.median(warm),
        "warm answer ms, longest": max(warm),
    }


def _lost(seeds: int) -> dict[str, dict[str, float]]:
    """By searched layer: one less the area of the curve, with each prior."""
    known = read(FOLDER)
    by_layer: dict[Config, list[Trial]] = {}
    for trial in (*recorded(), *sessions()):
        by_layer.setdefault(trial[0], []).append(trial)
    tables = predictor.usable(map(_table, by_layer.values()))
    models = {
        table.config: predictor.train(others)
        for out, others in evaluation.held_out(tables, 0)
        for table in out
    }
    losses = {}
    for config, trials in by_layer.items():
        if facts_of(trials[0][2]) is None or _table(trials).times:
            continue
        name, built_in = config.label, built_in_prior()
        described, rows = {}, []
        for number, (_, _, params, time_ms, cause) in enumerate(trials):
            rows.append(Past(f"{name} {number}", time_ms, cause))
            facts = facts_of(params)
            assert facts is not None
            described[rows[-1].params] = facts.features
        for task, one in known.items():
            if [row.time_ms for row in one.rows] == [row.time_ms for row in rows]:
                operator = task.partition("-")[0]
                others = (other for key, other in known.items() if not key.startswith(operator))
                built_in = prior_of(others)
        space = Table(name, rows, described)
        losses[name] = {
            way: 1 - _area(replace(space, prior=prior), len(rows), seeds)
            for way, prior in (("built-in", built_in), ("trained", models[config]))
        }
    return losses


def _table(trials: list[Trial]) -> predictor.Table:
    candidates = []
    for _, solver, params, time_ms, _ in sorted(trials, key=lambda one: one[1:3]):
        facts = facts_of(params)
        assert facts is not None
        candidates.append(predictor.TimedCandidate(solver, facts.name, facts.features, time_ms))
    return predictor.Table(trials[0][0], "", "", "", candidates)


def _area(space: Table, rows: int, seeds: int) -> float:
    trials = min(_TRIALS, rows // 2)
    curves = [replay(space, "search", seed, trials, _BATCH, space) for seed in range(seeds)]
    return statistics.mean(statistics.mean(curve) for curve in curves)


if __name__ == "__main__":
    raise SystemExit(main())
