"""Search on recorded trials, against random order, and with the table of a similar task.

Replays the tables of `benchmarks/trials`, which `benchmarks/record_trials.py` made; nothing is
built or measured. In a table the search has no points but those recorded, so what is judged is the
cost model, not the breeding of new points.

The curve: after each trial, the time of the table's best candidate over that of the best so far;
its area is the mean over the first `--trials`. A task's figure is the mean over the seeds. Trials
to within 5 % of the best: the median over the seeds.

`search` has a prior that was trained on the tables of the other operators, `alone` has none; a warm
start has none either, but knows the whole table of the task's sibling, which is the same solver at
another size, and is compared with `alone`.

With `--functions TRIALS` nothing is replayed: five functions of a block of BERT without a
convolution or product are tuned on this machine, with so many trials by the search and at random,
in two sessions that are run at the same time. The ratio is the geometric mean of the best times,
random's over the search's. The first trial of both is the schedule by rule.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import sqlalchemy as sa

from benchmarks.harness import Outcome, command_line
from tuna.configs import Config
from tuna.libraries.kernels import Known, Past
from tuna.libraries.search.cost_model import learn
from tuna.libraries.search.proposal import Point, Space, Strategy, propose
from tuna.libraries.tvm.decisions import Design

FOLDER = Path(__file__).parent / "trials"
#: Share of the tasks with a larger area than random's; least area of each task relative to
#: random's; share of the tasks with a warm start that needs at most half of the trials.
_BETTER, _WORSE, _FASTER = 0.75, 0.95, 0.5
_NEAR = 1.05
#: Functions of a block of BERT that `--functions` tunes.
_FUNCTIONS = {
    "softmax",
    "layer_norm",
    "fused_reshape4_divide",
    "fused_reshape6_transpose",
    "fused_reshape2_transpose_reshape",
}
_WHOLE = "random over search, geometric mean"
_MAKE = Path(__file__).resolve().parents[1] / "examples" / "make_models.py"
#: Trees of a prior, and their depth.
_TREES, _DEPTH = 60, 4


@dataclass(frozen=True)
class Table(Space):
    """A table as a space: its rows are all points that there are."""

    name: str
    rows: Sequence[Past]
    described: Mapping[str, Mapping[str, float]]  #: features by params, of all tables
    prior: bytes | None = None

    def points(self) -> Iterator[Point]:
        return ((index,) for index in range(len(self.rows)))

    def size(self) -> int:
        return len(self.rows)

    def point_of(self, params: str) -> Point | None:
        name, _, index = params.rpartition(" ")
        return (int(index),) if name == self.name else None

    def params_of(self, point: Point) -> str | None:
        return self.rows[point[0]].params

    def features(self, point: Point) -> Mapping[str, float]:
        return self.described[self.rows[point[0]].params]

    def features_of(self, params: str, config: Config | None = None) -> Mapping[str, float] | None:
        return self.described.get(params)

    def random(self, chance: Random) -> Point:
        return (chance.randrange(len(self.rows)),)

    def mutated(self, point: Point, chance: Random) -> Point:
        return self.random(chance)

    def crossed(self, one: Point, other: Point, chance: Random) -> Point:
        return one

    def measured(self, params: str) -> Past:
        """The trial as it was recorded."""
        point = self.point_of(params)
        assert point is not None
        return self.rows[point[0]]

    def best(self) -> float:
        """Milliseconds of the fastest candidate."""
        return min(row.time_ms for row in self.rows if row.time_ms is not None)


def main() -> int:
    """Print the figures of every task; 1 if the budget is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=128, help="of a search")
    parser.add_argument("--batch", type=int, default=16, help="trials of one round")
    parser.add_argument(
        "--task",
        action="append",
        help="only this table; a part of the whole has no verdict of its own",
    )
    parser.add_argument(
        "--functions", type=int, metavar="TRIALS", help="tune functions of a model instead"
    )
    given = parser.parse_args()
    if given.functions:
        return functions(given.functions).print()
    known = read(FOLDER)
    tables = {name: known[name] for name in given.task or known}
    figures: dict[str, float] = {}
    areas, speedups = [], []
    for name, table in tables.items():
        sibling = sibling_of(table, known)
        informed = replace(
            table,
            prior=prior_of(one for one in known.values() if _operator(one) != _operator(table)),
        )
        runs = {
            way: [
                replay(
                    informed if way == "search" else table,
                    way,
                    seed,
                    given.trials,
                    given.batch,
                    sibling,
                )
                for seed in range(given.seeds)
            ]
            for way in ("random", "alone", "search", "warm")
        }
        area = {
            way: statistics.mean(statistics.mean(curve) for curve in curves)
            for way, curves in runs.items()
        }
        near = {
            way: statistics.median(map(_trials_to_near, curves)) for way, curves in runs.items()
        }
        figures |= {f"{name} area, {way}": value for way, value in area.items()}
        figures |= {f"{name} trials to 5 %, {way}": value for way, value in near.items()}
        areas.append(area["search"] / area["random"])
        speedups.append(near["alone"] / near["warm"])
    ratios = {f"{name} area": ratio for name, ratio in zip(tables, areas, strict=True)}
    ratios |= {
        f"{name} trials saved by a warm start": ratio
        for name, ratio in zip(tables, speedups, strict=True)
    }
    ratios |= {
        "share of tasks better than random": sum(ratio > 1.0 for ratio in areas) / len(areas),
        "worst area": min(areas),
        "share of tasks in which a warm start halves the trials": sum(
            ratio >= 2.0 for ratio in speedups
        )
        / len(speedups),
    }
    budget = {
        "share of tasks better than random": _BETTER,
        "worst area": _WORSE,
        "share of tasks in which a warm start halves the trials": _FASTER,
    }
    return Outcome("search", figures, ratios=ratios, budget={} if given.task else budget).print()


def functions(trials: int) -> Outcome:
    """The best times of the functions by the search, and at random."""
    with tempfile.TemporaryDirectory(prefix="tuna-search-") as folder:
        os.environ["TUNA_HOME"] = folder
        from tuna import api
        from tuna.db.database import open_database
        from tuna.db.engine import reading
        from tuna.db.models import ConfigRow
        from tuna_models.api import import_model

        path = Path(folder) / "bert.onnx"
        command = [sys.executable, str(_MAKE), "bert", "-o", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        model = import_model("bert", path).model
        tasks = {entry.task.key: entry.task for entry in model.manifest.tasks}
        keys = [key for key, task in tasks.items() if task.name in _FUNCTIONS]
        assert len(keys) == len(_FUNCTIONS), sorted(task.name for task in tasks.values())
        with reading(open_database()) as connection:
            wanted = sa.select(ConfigRow.id).where(ConfigRow.key.in_(keys))
            only = api.Only(config_ids=list(connection.execute(wanted).scalars()))
        api.update_solvers("tvm")
        sessions = {}
        for way in ("random", "search"):
            session_id = sessions[way] = api.init_session("tvm", way).id
            api.update_applicability(session_id, model.tag)
            options = {"candidates": trials, "strategy": way, "warm_start": False}
            api.load_jobs(
                session_id,
                tag=None,
                reason=way,
                solvers=["TvmFunction"],
                options=options,
                only=only,
            )
        api.run(list(sessions.values()))
        times_ms = {way: _best_ms(session_id) for way, session_id in sessions.items()}
    figures, ratios = dict[str, float](), dict[str, float]()
    for kind, what in enumerate(("", " without the schedule by rule")):
        for label, random_ms in times_ms["random"].items():
            search_ms = times_ms["search"][label]
            figures[f"{label}{what} ms, random"] = random_ms[kind]
            figures[f"{label}{what} ms, search"] = search_ms[kind]
            ratios[f"{label}{what}"] = random_ms[kind] / search_ms[kind]
        matching = [ratio for name, ratio in ratios.items() if name.endswith(what or name)]
        ratios[f"{_WHOLE}{what}"] = statistics.geometric_mean(matching)
    return Outcome("search", figures, ratios=ratios, budget={_WHOLE: 1.0})


def _best_ms(session_id: int) -> dict[str, tuple[float, float]]:
    """The best time of each function, with and without its first trial, the schedule by rule."""
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.db.models import ConfigRow, Job, TrialRow

    query = (
        sa.select(ConfigRow.label, Job.round, TrialRow.number, TrialRow.time_ms)
        .join(Job, Job.id == TrialRow.job_id)
        .join(ConfigRow, ConfigRow.id == Job.config_id)
        .where(Job.session_id == session_id, TrialRow.time_ms.is_not(None))
    )
    found: dict[str, tuple[float, float]] = {}
    with reading(open_database()) as connection:
        for label, round_, number, timed in connection.execute(query):
            best, sampled = found.get(label, (math.inf, math.inf))
            time_ms = timed or math.inf
            by_rule = (round_, number) == (0, 0)
            found[label] = min(best, time_ms), sampled if by_rule else min(sampled, time_ms)
    return found


def read(folder: Path) -> dict[str, Table]:
    """The tables by name."""
    described: dict[str, Mapping[str, float]] = {}
    tables = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        header, *lines = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
        designs = [Design.read(trace) for trace in header["designs"]]
        rows = []
        for index, line in enumerate(lines):
            design, *values = line["point"]
            time_ms = None if line["seconds"] is None else 1000 * line["seconds"]
            rows.append(Past(f"{header['task']} {index}", time_ms, line["cause"]))
            described[rows[-1].params] = designs[design].features(tuple(values))
        tables[header["task"]] = Table(header["task"], rows, described)
    return tables


def sibling_of(table: Table, tables: Mapping[str, Table]) -> Table:
    """The other table of the same solver and layout."""
    (found,) = (
        other
        for other in tables.values()
        if other is not table and _family(other) == _family(table)
    )
    return found


def replay(
    table: Table, way: str, seed: int, trials: int, batch: int, sibling: Table
) -> list[float]:
    """The curve of one search."""
    history: list[Past] = []
    strategy: Strategy = "random" if way == "random" else "search"
    others = [Known(sibling.name, sibling.rows, same=False)] if way == "warm" else []
    while len(history) < trials:
        asked = min(batch, trials - len(history))
        proposed = propose(table, history, count=asked, seed=seed, strategy=strategy, others=others)
        history += map(table.measured, proposed)
        if len(proposed) < asked:
            break
    best, fastest, curve = table.best(), math.inf, []
    for trial in history:
        fastest = min(fastest, trial.time_ms or math.inf)
        curve.append(best / fastest)
    return curve


def prior_of(tables: Iterable[Table]) -> bytes:
    """A cost model trained on these tables, with the features of `tiling` alone."""
    known = list(tables)
    described = {
        row.params: {
            name: value
            for name, value in table.described[row.params].items()
            if name.startswith("tiling.")
        }
        for table in known
        for row in table.rows
    }
    return learn(
        lambda params, _: described.get(params),
        [Known(table.name, table.rows) for table in known],
        trees=_TREES,
        depth=_DEPTH,
    )


def _trials_to_near(curve: Sequence[float]) -> int:
    """Number of trials until the best is within 5 % of the table's; one more than all if never."""
    return next(
        (number for number, value in enumerate(curve, 1) if value >= 1 / _NEAR), len(curve) + 1
    )


def _operator(table: Table) -> str:
    return table.name.partition("-")[0]


def _family(table: Table) -> str:
    return table.name.rpartition("-")[0]


if __name__ == "__main__":
    raise SystemExit(main())
