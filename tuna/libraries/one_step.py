"""A base for libraries whose candidates are built where they are measured, such as those that come with a vendor's library."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuna.artifacts import Artifacts
from tuna.libraries.base import Step
from tuna.libraries.candidates import CandidateLibrary
from tuna.libraries.context import RunContext
from tuna.libraries.items import Candidate, Trial, WorkItem
from tuna.vocabulary import Resource


class OneStepLibrary(CandidateLibrary):
    """One step, `eval` on the device: proposes, builds and measures; what was built stays on this machine."""

    steps: tuple[Step, ...] = (Step("eval", Resource.DEVICE, time_limit_s=1800.0),)

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """The time of both parts."""
        asked = self._options(item)
        building = self.start_timeout_s + asked.candidates * (self.start_timeout_s + asked.build_timeout_s)
        return building + super().time_limit_s(step, item)

    def _eval(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=context.scratch) as folder:
            store = Artifacts(Path(folder, "built").as_uri(), Path(folder, "cache"))
            return self._built_and_measured(item, replace(context, artifacts=store))

    def _built_and_measured(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        built = self._compile(item, context)
        trials: dict[int, Trial] = {trial.index: trial for trial in built.get("trials", ())}
        if not built["ok"]:
            return {**built, "trials": _without_artifacts(trials.values())}
        good = [Candidate(index=t.index, artifact=t.artifact) for t in trials.values() if t.cause is None]
        found = super()._eval(item.model_copy(update={"candidates": tuple(good)}), context)
        for trial in found.get("trials", ()):
            origin = trials[trial.index]
            trials[trial.index] = trial.model_copy(update={"params": origin.params, "build_s": origin.build_s})
        busy_s = built["busy_s"] + found.get("busy_s", 0.0)
        return {**found, "trials": _without_artifacts(trials.values()), "busy_s": busy_s}


def _without_artifacts(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Nothing is left of what they name."""
    return tuple(trial.model_copy(update={"artifact": None}) for trial in trials)
