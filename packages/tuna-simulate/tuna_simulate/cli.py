"""`tuna simulate`: what a policy would do with sessions, without running anything."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from tuna.cli import options
from tuna.cli.console import Column, fitted, print_json, print_table, say, table_width
from tuna.common.files import atomic_file
from tuna.errors import BadInput
from tuna_simulate import api
from tuna_simulate.policies import POLICIES
from tuna_simulate.scenario import MAX_COUNT, Scenario, Simulated, read_scenario

_PROCESSES = click.IntRange(1, MAX_COUNT)


@dataclass(frozen=True)
class _Scenario:
    """Sessions or a scenario, and policies."""

    session_ids: tuple[int, ...] = options.option(
        "A recorded session; may be repeated.", "--session-id", type=options.ID
    )
    workers: int | None = options.option(
        "Processes for the CPU steps of recorded sessions.", type=_PROCESSES
    )
    devices: int | None = options.option(
        "Devices of each environment of recorded sessions.", type=_PROCESSES
    )
    policies: tuple[str, ...] = options.option(
        f"What decides: {', '.join(POLICIES)}, or all. May be repeated.",
        "--policy",
        type=click.Choice([*POLICIES, "all"]),
        default=("fair",),
        metavar="NAME",
    )
    seed: int = options.option(
        "Of all random numbers.", type=click.IntRange(0, 2**31 - 1), default=0
    )
    output: Path | None = options.option(
        "Write the scenario as JSON, to change and simulate it.", "-o", type=options.OUTPUT_FILE
    )


@click.command()
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@options.collected(_Scenario)
@options.as_json
def simulate(file: Path | None, as_json: bool, wanted: _Scenario) -> None:
    """Simulate sessions under a scheduling policy: how long they take, and how busy devices are.

    FILE is a scenario in TOML or JSON: sessions with the durations of their steps, pools of workers
    and devices, failures, late joiners. Or name sessions, whose recorded durations are replayed
    side by side. docs/scheduling.md has the fields of both, and of --json.
    """
    scenario = _scenario(file, wanted)
    if wanted.output:
        with atomic_file(wanted.output) as path:
            path.write_text(scenario.model_dump_json(indent=1) + "\n")
    names = list(POLICIES) if "all" in wanted.policies else list(dict.fromkeys(wanted.policies))
    found = [api.simulate(scenario, name, wanted.seed) for name in names]
    if as_json:
        print_json(found)
    else:
        _show(found)


def _scenario(file: Path | None, wanted: _Scenario) -> Scenario:
    if (file is None) == (not wanted.session_ids):
        raise BadInput("Name a scenario file, or sessions with --session-id, and not both.")
    if file is None:
        ids = list(dict.fromkeys(wanted.session_ids))
        return api.recorded_scenario(ids, workers=wanted.workers, devices=wanted.devices)
    if wanted.workers or wanted.devices:
        raise BadInput(
            "--workers and --devices are of recorded sessions; a scenario file has its own pools."
        )
    return read_scenario(file)


def _names(found: list[Simulated]) -> dict[str, str]:
    """Return the name of each queue in the table: its role alone, where no other has it."""
    queues = dict.fromkeys(queue.queue for one in found for queue in one.queues)
    roles = Counter(queue.partition(".")[0] for queue in queues)
    return {
        queue: role if roles[role := queue.partition(".")[0]] == 1 else queue for queue in queues
    }


def _over_bound(one: Simulated) -> str:
    return f"{one.makespan_s / one.lower_bound_s:.3f}" if one.lower_bound_s else "-"


def _mean_session_s(one: Simulated) -> str:
    return f"{statistics.mean(each.ended_s - each.arrives_s for each in one.sessions):,.1f}"


def _waited_s(one: Simulated) -> float:
    return sum(session.waited_s for session in one.sessions)


def _busy(one: Simulated, queue: str) -> str:
    return next((f"{each.busy_share:.0%}" for each in one.queues if each.queue == queue), "-")


def _show(simulations: list[Simulated]) -> None:
    errored = Column[Simulated]("errored", lambda one: str(one.errored), 1, right=True)
    columns: list[Column[Simulated]] = [
        Column("policy", lambda one: one.policy),
        Column("done s", lambda one: f"{one.makespan_s:,.1f}", right=True),
        Column("/ bound", _over_bound, right=True),
        Column("session s", _mean_session_s, 2, right=True),
        Column("waited s", lambda one: f"{_waited_s(one):,.0f}", 4, right=True),
        *([errored] if any(one.errored for one in simulations) else []),
        *(
            Column(f"{name}\nbusy", partial(_busy, queue=queue), 3, right=True)
            for queue, name in _names(simulations).items()
        ),
    ]
    print_table(*fitted(columns, simulations, table_width()))
    missed = [
        f"{run.policy}: {session.name or session.session_id}"
        for run in simulations
        for session in run.sessions
        if session.deadline_met is False
    ]
    if missed:
        say(f"missed deadlines: {'; '.join(missed)}")
