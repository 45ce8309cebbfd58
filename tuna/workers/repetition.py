"""Repetition of an item that had succeeded, which tells the device's faults from those of jobs."""

from __future__ import annotations

import dataclasses
import time

import structlog

from tuna.errors import StorageFull, StoreUnavailable
from tuna.libraries.base import Library
from tuna.libraries.context import RunContext
from tuna.libraries.items import StepResult, WorkItem
from tuna.libraries.steps import find_step
from tuna.sandbox.processes import ChildCancelled
from tuna.vocabulary import Cause

log = structlog.get_logger(__name__)

#: Seconds for repeating an item, which must have taken half of it at most
REPEAT_S = 120.0
#: Causes that do not tell whether the machine is sound
OF_THE_JOB = frozenset({Cause.ARTIFACT_LOST, Cause.NOT_APPLICABLE})


def to_repeat(item: WorkItem, result: StepResult, seconds: float) -> WorkItem | None:
    """The least of an item that succeeded in `seconds`: one of its good candidates, if it has some;
    None if that takes too long."""
    if item.rivals:
        return None
    good = {trial.index for trial in result.trials if trial.cause is None}
    candidates = tuple(candidate for candidate in item.candidates if candidate.index in good)[:1]
    is_quick = seconds / max(1, len(item.candidates)) <= REPEAT_S / 2
    return item.model_copy(update={"candidates": candidates}) if is_quick else None


def does_again(library: Library, item: WorkItem, context: RunContext) -> bool | None:
    """True if an item that succeeded succeeds again; None if that is not known: it was canceled, or
    its artifact is gone."""
    until = time.monotonic() + REPEAT_S
    in_time = dataclasses.replace(
        context, cancelled=lambda: context.cancelled() or time.monotonic() >= until
    )
    try:
        results = list(library.run(find_step(library, item.step), [item], in_time))
    except (StorageFull, StoreUnavailable):
        return None
    except ChildCancelled:
        return None if context.cancelled() else False
    except Exception as error:  # the library's own code, which has done this before
        log.warning("library failed to repeat an item", job=item.job_id, error=str(error))
        return False
    found = next((result for result in results if result.job_id == item.job_id), None)
    if found is not None and found.cause in OF_THE_JOB:
        return None
    return found is not None and found.ok
