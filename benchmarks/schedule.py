"""Scheduling policies on the load-aware scheduler thesis' set-ups and ours, simulated and real.

Hours are means over seeds. The stage times are those of examples/two_jobs.toml. The thesis measured
each set-up once; its figures are the baseline. Through the pipeline (coordinator, Redis, Celery
workers, SQLite) on a device that sleeps go fewer batches than the thesis had, at 1:`--scale` of its
stage times, `--runs` at once, each with other durations; the simulator is given the same durations.
`--scale 0` leaves that out. The set-ups in which jobs share cores are simulated alone: who sleeps
slows nobody down. Last comes the simulator's own speed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import schedule_pipeline
from benchmarks.harness import Outcome, command_line
from benchmarks.schedule_pipeline import Durations
from tuna_simulate.api import simulate
from tuna_simulate.jobs import JobLine
from tuna_simulate.policies import POLICIES
from tuna_simulate.scenario import Jobs, Pool, Scenario, Simulated, SimulatedSession, read_scenario

TWO_JOBS = Path(__file__).parent.parent / "examples" / "two_jobs.toml"
#: Hours for each job, as the thesis measured them (docs/scheduling.md).
THESIS_H = {
    "sequential": 14.53,
    "unsynchronised": 18.61,
    "synchronous": 19.52,
    "greedy": 20.35,
    "fifo": 24.14,
    "bundled": 21.67,
}
#: Largest deviation from the thesis, of the set-ups whose schedule does not depend on how jobs
#: disturb each other.
_TOLERANCE = {"sequential": 0.05, "greedy": 0.05, "fifo": 0.10}
#: Slowdown of a stage while the other job runs the same one: of the thesis' synchronous
#: set-up to its dedicated one.
_SLOWDOWN = {"select": 0.0, "build": 0.08, "profile": 0.0, "update": 0.86}
_LIMIT_S = 60.0
#: Largest deviation of the pipeline from the simulator.
_AGREEMENT = 0.10
#: Makespan over lower bound, by the number of jobs with a look-ahead of one batch.
_LOOK_AHEAD = {2: 1.15, 4: 1.05}


class _SetUp(NamedTuple):
    """A set-up that goes through the pipeline."""

    policy: str
    jobs: int
    look_ahead: int
    late: bool  #: nothing is published before a process is free


_SET_UPS = {
    "sequential": _SetUp("sequential", 1, 0, late=True),
    "greedy": _SetUp("greedy", 2, 0, late=True),
    "fifo": _SetUp("fifo", 2, 0, late=True),
    "bundled": _SetUp("bundled", 2, 0, late=True),
    **{f"look_ahead_{jobs}_jobs": _SetUp("fair", jobs, 1, late=False) for jobs in _LOOK_AHEAD},
}


def main() -> int:
    """Command line; `--seeds`: simulations of each set-up."""
    numbers = {"seeds": 12, "devices": 1000, "jobs": 100_000, "scale": 20, "batches": 14, "runs": 3}
    options = command_line(__doc__, **numbers).parse_args()
    outcome = Outcome("schedule", {"seeds": options.seeds})
    if options.scale:
        _pipeline(outcome, options.scale, options.batches, options.runs)
    _compare(outcome, options.seeds)
    _look_ahead(outcome, options.seeds)
    _speed(outcome, options.devices, options.jobs)
    return outcome.print()


def two_jobs(
    copies: int = 2, look_ahead: int = 0, *, shared: bool = False, own_builder: bool = False
) -> Scenario:
    """Simulate the thesis' jobs.

    `shared`: they run on the same machines; `own_builder`: builds have their own process.
    """
    given = read_scenario(TWO_JOBS)
    (session,) = given.sessions
    (jobs,) = session.jobs
    steps = tuple(
        step.model_copy(update={"queue": "builder"})
        if own_builder and step.step == "build"
        else step
        for step in jobs.steps
    )
    jobs = jobs.model_copy(update={"look_ahead": look_ahead, "steps": steps})
    pools = given.pools + ((Pool(queue="builder"),) if own_builder else ())
    if shared:
        both = {"processes": copies, "cores": 1, "slowdown": _SLOWDOWN}
        pools = tuple(pool.model_copy(update=both) for pool in pools)
    sessions = (session.model_copy(update={"copies": copies, "jobs": (jobs,)}),)
    return given.model_copy(update={"sessions": sessions, "pools": pools})


def large(devices: int, jobs: int) -> Scenario:
    """Twenty sessions of five solvers, half of which arrive later; half of the devices, too.
    Attempts fail, processes die."""
    each = max(1, jobs // 100)

    def session(more: dict[str, float]) -> dict[str, object]:
        lines = [
            {
                "solver": f"solver{number}",
                "count": each,
                "weight": number + 1,
                "best_ms": [2.0],
                "steps": [
                    {
                        "step": "compile",
                        "queue": "compile",
                        "seconds": 5 + 3 * number,
                        "cv": 0.5,
                        "fails": 0.01,
                    },
                    {
                        "step": "eval",
                        "queue": "eval",
                        "seconds": 12 + 5 * number,
                        "cv": 0.5,
                        "fails": 0.01,
                    },
                ],
            }
            for number in range(5)
        ]
        return {"copies": 10, "jobs": lines, **more}

    half = max(1, devices // 2)
    pools = [
        {"queue": "compile", "processes": half, "crashes_every_s": 36_000},
        {"queue": "eval", "processes": half, "crashes_every_s": 36_000},
        {
            "queue": "eval",
            "processes": max(1, devices - half),
            "joins_s": 120,
            "crashes_every_s": 36_000,
        },
    ]
    sessions = [session({}), session({"arrives_s": 300, "deadline_s": 3000})]
    return Scenario.model_validate({"pools": pools, "sessions": sessions})


def drawn(jobs: int, batches: int, scale: float, seed: int) -> Durations:
    """Seconds of each stage of each batch of the thesis' jobs at 1:`scale`."""
    (session,) = two_jobs(1).sessions
    given = session.jobs[0].model_copy(update={"rounds": batches})
    found = []
    for number in range(jobs):
        flat = JobLine(number, session, given, f"{seed} {number}").seconds
        width = len(given.steps)
        found.append(
            [[s / scale for s in flat[row * width : (row + 1) * width]] for row in range(batches)]
        )
    return found


def given(durations: Durations, look_ahead: int) -> Scenario:
    """A scenario with these durations of the thesis' stages, each job a session without waits."""
    base = two_jobs(1)
    stages = base.sessions[0].jobs[0].steps
    sessions = []
    for rounds in durations:
        columns = zip(*rounds, strict=True)
        steps = tuple(
            stage.model_copy(update={"seconds": column, "cv": 0.0})
            for stage, column in zip(stages, columns, strict=True)
        )
        jobs = Jobs(rounds=len(rounds), look_ahead=look_ahead, steps=steps)
        sessions.append(SimulatedSession(jobs=(jobs,)))
    more = {"sessions": tuple(sessions), "decide_every_s": 0.0, "ahead": 0}
    return base.model_copy(update=more)


def _pipeline(outcome: Outcome, scale: int, batches: int, runs: int) -> None:
    """Each set-up through the pipeline and the simulator, with the same durations."""
    outcome.figures |= {"pipeline_scale": scale, "pipeline_batches": batches, "pipeline_runs": runs}
    loads: list[float] = []
    for name, (policy, jobs, look_ahead, late) in _SET_UPS.items():
        timings: dict[str, list[float]] = defaultdict(list)
        drawn_by_seed = [drawn(jobs, batches, scale, seed) for seed in range(runs)]
        run = partial(
            schedule_pipeline.run, scale=scale, policy=policy, look_ahead=look_ahead, late=late
        )
        with ThreadPoolExecutor(runs) as pool:
            ended = list(pool.map(run, drawn_by_seed))
        for durations, stages in zip(drawn_by_seed, ended, strict=True):
            simulated = simulate(given(durations, look_ahead), policy)
            makespan_s = stages[-1].ended_s
            timings["s"].append(makespan_s)
            timings["vs_simulated"].append(makespan_s / simulated.makespan_s)
            timings["over_bound"].append(makespan_s / simulated.lower_bound_s)
            timings["simulated_over_bound"].append(simulated.makespan_s / simulated.lower_bound_s)
        loads.append(os.getloadavg()[0])
        means = {key: statistics.mean(values) for key, values in timings.items()}
        print(f"pipeline, {name}: {means}, load {loads[-1]:.1f}", file=sys.stderr)
        outcome.figures[f"pipeline_{name}_s"] = means.pop("s")
        outcome.ratios |= {f"pipeline_{name}_{key}": value for key, value in means.items()}
        agreement = f"pipeline_{name}_vs_simulated"
        outcome.budget[agreement], outcome.limits[agreement] = 1 - _AGREEMENT, 1 + _AGREEMENT
        if look_ahead:
            outcome.limits[f"pipeline_{name}_over_bound"] = _LOOK_AHEAD[jobs]
    outcome.figures["pipeline_load"] = statistics.mean(loads)


def _compare(outcome: Outcome, seeds: int) -> None:
    scenarios = {
        "sequential": two_jobs(1),
        "unsynchronised": two_jobs(shared=True),
        "synchronous": two_jobs(shared=True),
    }
    for policy, measured_h in THESIS_H.items():
        hours = statistics.mean(
            _hours(one) for one in _runs(scenarios.get(policy, two_jobs()), policy, seeds)
        )
        outcome.figures[f"{policy}_h"] = hours
        outcome.baseline[f"{policy}_h"] = measured_h
        outcome.ratios[policy] = hours / measured_h
    for policy, tolerance in _TOLERANCE.items():
        outcome.budget[policy], outcome.limits[policy] = 1 - tolerance, 1 + tolerance
    outcome.figures["fair_h"] = statistics.mean(
        _hours(one) for one in _runs(two_jobs(), "fair", seeds)
    )


def _look_ahead(outcome: Outcome, seeds: int) -> None:
    """Makespan over lower bound with one round of look-ahead, on two kinds of machines."""
    for copies, limit in _LOOK_AHEAD.items():
        name = f"look_ahead_{copies}_jobs"
        runs = _runs(two_jobs(copies, 1), "fair", seeds)
        outcome.figures[f"{name}_h"] = statistics.mean(one.makespan_s / 3600 for one in runs)
        outcome.ratios[f"{name}_over_bound"] = statistics.mean(
            one.makespan_s / one.lower_bound_s for one in runs
        )
        outcome.limits[f"{name}_over_bound"] = limit
        runs = _runs(two_jobs(copies, 1, own_builder=True), "fair", seeds)
        outcome.figures[f"{name}_own_builder_h"] = statistics.mean(
            one.makespan_s / 3600 for one in runs
        )
        outcome.ratios[f"{name}_own_builder_over_bound"] = statistics.mean(
            one.makespan_s / one.lower_bound_s for one in runs
        )


def _speed(outcome: Outcome, devices: int, jobs: int) -> None:
    """CPU seconds of one large simulation with each policy."""
    scenario = large(devices, jobs)
    outcome.figures |= {"devices": devices, "jobs": jobs}
    for policy in POLICIES:
        before_s = time.process_time()
        found = simulate(scenario, policy)
        outcome.figures[f"large_{policy}_cpu_s"] = time.process_time() - before_s
        outcome.limits[f"large_{policy}_cpu_s"] = _LIMIT_S
        outcome.figures[f"large_{policy}_efficiency"] = found.efficiency


def _runs(scenario: Scenario, policy: str, seeds: int) -> list[Simulated]:
    return [simulate(scenario, policy, seed) for seed in range(seeds)]


def _hours(one: Simulated) -> float:
    """Mean over the jobs: when each ended, all having begun at 0."""
    return statistics.mean(session.ended_s for session in one.sessions) / 3600


if __name__ == "__main__":
    raise SystemExit(main())
