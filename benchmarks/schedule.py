"""Scheduling policies, simulated: the set-ups of the load-aware scheduler thesis, ours, and the simulator's own speed.

Hours are means over seeds. The stage times are those of examples/two_jobs.toml. The thesis measured each set-up once; its figures
are the baseline. The same set-ups through the real pipeline on a simulated device are not measured here.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from benchmarks.harness import Outcome, command_line
from tuna.api import read_scenario, simulate
from tuna.pipeline.policies import POLICIES
from tuna.simulation.outcome import Simulated
from tuna.simulation.scenario import Pool, Scenario

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
#: Largest deviation from the thesis, of the set-ups whose schedule does not depend on how jobs disturb each other.
_TOLERANCE = {"sequential": 0.05, "greedy": 0.05, "fifo": 0.10}
#: How much slower a stage is while the other job runs the same one: of the thesis' synchronous set-up to its dedicated one.
_SLOWDOWN = {"select": 0.0, "build": 0.08, "profile": 0.0, "update": 0.86}
_LIMIT_S = 60.0


def main() -> int:
    """Command line; `--seeds`: simulations of each set-up."""
    options = command_line(__doc__, seeds=12, devices=1000, jobs=100_000).parse_args()
    print("through the real pipeline: not measured", file=sys.stderr)
    outcome = Outcome("schedule", {"seeds": options.seeds})
    _compare(outcome, options.seeds)
    _look_ahead(outcome, options.seeds)
    _speed(outcome, options.devices, options.jobs)
    return outcome.print()


def two_jobs(copies: int = 2, look_ahead: int = 0, *, shared: bool = False, own_builder: bool = False) -> Scenario:
    """The thesis' jobs; `shared`: they run on the same machines at once; `own_builder`: builds have a process to themselves."""
    given = read_scenario(TWO_JOBS)
    (session,) = given.sessions
    (jobs,) = session.jobs
    steps = tuple(
        step.model_copy(update={"queue": "builder"}) if own_builder and step.step == "build" else step
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
    """Twenty sessions of five solvers, half of which arrive later; half of the devices, too. Attempts fail, processes die."""
    each = max(1, jobs // 100)

    def session(more: dict[str, float]) -> dict[str, object]:
        lines = [
            {
                "solver": f"solver{number}",
                "count": each,
                "weight": number + 1,
                "best_ms": [2.0],
                "steps": [
                    {"step": "compile", "queue": "compile", "seconds": 5 + 3 * number, "cv": 0.5, "fails": 0.01},
                    {"step": "eval", "queue": "eval", "seconds": 12 + 5 * number, "cv": 0.5, "fails": 0.01},
                ],
            }
            for number in range(5)
        ]
        return {"copies": 10, "jobs": lines, **more}

    half = max(1, devices // 2)
    pools = [
        {"queue": "compile", "processes": half, "crashes_every_s": 36_000},
        {"queue": "eval", "processes": half, "crashes_every_s": 36_000},
        {"queue": "eval", "processes": max(1, devices - half), "joins_s": 120, "crashes_every_s": 36_000},
    ]
    sessions = [session({}), session({"arrives_s": 300, "deadline_s": 3000})]
    return Scenario.model_validate({"pools": pools, "sessions": sessions})


def _compare(outcome: Outcome, seeds: int) -> None:
    scenarios = {
        "sequential": two_jobs(1),
        "unsynchronised": two_jobs(shared=True),
        "synchronous": two_jobs(shared=True),
    }
    for policy, measured_h in THESIS_H.items():
        hours = statistics.mean(_hours(one) for one in _runs(scenarios.get(policy, two_jobs()), policy, seeds))
        outcome.figures[f"{policy}_h"] = hours
        outcome.baseline[f"{policy}_h"] = measured_h
        outcome.ratios[policy] = hours / measured_h
    for policy, tolerance in _TOLERANCE.items():
        outcome.budget[policy], outcome.limits[policy] = 1 - tolerance, 1 + tolerance
    outcome.figures["fair_h"] = statistics.mean(_hours(one) for one in _runs(two_jobs(), "fair", seeds))


def _look_ahead(outcome: Outcome, seeds: int) -> None:
    """Makespan over lower bound with a look-ahead of one round, on the thesis' machines and with builds beside them."""
    for copies, limit in ((2, 1.15), (4, 1.05)):
        name = f"look_ahead_{copies}_jobs"
        runs = _runs(two_jobs(copies, 1), "fair", seeds)
        outcome.figures[f"{name}_h"] = statistics.mean(one.makespan_s / 3600 for one in runs)
        outcome.ratios[f"{name}_over_bound"] = statistics.mean(one.makespan_s / one.lower_bound_s for one in runs)
        outcome.limits[f"{name}_over_bound"] = limit
        runs = _runs(two_jobs(copies, 1, own_builder=True), "fair", seeds)
        outcome.figures[f"{name}_own_builder_h"] = statistics.mean(one.makespan_s / 3600 for one in runs)
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
