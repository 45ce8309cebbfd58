"""Repeat a job or a candidate outside of any session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuna.api.jobs import Options
from tuna.configs import read_one
from tuna.db import configs
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import NotFound
from tuna.libraries.items import StepResult, WorkItem
from tuna.libraries.options import check, chosen
from tuna.libraries.registry import get_library
from tuna.messages import choices
from tuna.queue.reproduction import trial_item
from tuna.workers.local_run import run_steps


@dataclass(frozen=True)
class JobOrigin:
    """The facts about a job that is repeated which its session had."""

    seed: int = 0
    conditions: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None  #: default: this machine's


_HERE = JobOrigin()


def reproduce(
    driver: str,
    *,
    library: str,
    solver: str,
    step: str,
    options: Options | None = None,
    index: int | None = None,
    origin: JobOrigin = _HERE,
) -> list[StepResult]:
    """Repeat a job of the layer `driver`, or the candidate `index` of it, here and now; nothing is
    stored.

    Runs the steps up to `step` and returns their results, of which the last one has the outcome.
    Raises NotFound for an unknown solver, BadInput unless the layer is one.
    """
    tuned = get_library(library)
    if solver not in [known.name for known in tuned.solvers()]:
        raise NotFound(
            f"{library} has no solver {solver!r}.",
            hint=choices(solver, (one.name for one in tuned.solvers()), "solvers"),
        )
    layer = read_one(driver)
    item = WorkItem(
        job_id=1,
        attempt=1,
        session_id=0,
        library=library,
        step=step,
        solver=solver,
        config=layer.to_json(),
        body=layer.body_digest,
        target=tuned.environment().target if origin.target is None else origin.target,
        conditions=chosen(tuned.conditions, origin.conditions, library),
        seed=origin.seed,
        options=check(tuned.options, options or {}, library),
    )
    return run_steps(tuned, item, step, index, _body(item.body))


def reproduce_trial(trial: int) -> tuple[list[StepResult], str]:
    """Build the candidate of this trial (its id in the database) from its params, and measure it if
    the trial was measured.

    It is done here and now, and nothing is stored. Returns the results of the steps, of which the
    last one has the outcome, and the layer's driver line. Raises NotFound for an unknown trial,
    BadInput if its library builds nothing from params.
    """
    with reading(open_database()) as connection:
        library, item = trial_item(connection, trial)
    (candidate,) = item.candidates
    return run_steps(library, item, item.step, candidate.index, _body(item.body)), item.layer.text()


def _body(digest: str | None) -> bytes | None:
    """The body of a layer that has one, from the database."""
    if digest is None:
        return None
    with reading(open_database()) as connection:
        return configs.body(connection, digest)
