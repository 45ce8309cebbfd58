"""A base for libraries whose candidates are built where they are measured, such as those that come with a vendor's library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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

    def _eval(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        store = Artifacts((context.scratch / "built").as_uri(), context.scratch / "cache")
        private = replace(context, artifacts=store)
        built = self._compile(item, private)
        if not built["ok"]:
            return {**built, "trials": _without_artifacts(built.get("trials", ()))}
        trials: Mapping[int, Trial] = {trial.index: trial for trial in built["trials"]}
        good = [Candidate(index=t.index, artifact=t.artifact) for t in trials.values() if t.cause is None]
        measured = super()._eval(item.model_copy(update={"candidates": tuple(good)}), private)
        found = dict(trials)
        for trial in measured.get("trials", ()):
            origin = trials[trial.index]
            found[trial.index] = trial.model_copy(update={"params": origin.params, "build_s": origin.build_s})
        measured["trials"] = _without_artifacts(found.values())
        measured["busy_s"] = measured.get("busy_s", 0.0) + built["busy_s"]
        return measured


def _without_artifacts(trials: Any) -> tuple[Trial, ...]:
    """Nothing is left of what they name."""
    return tuple(trial.model_copy(update={"artifact": None}) for trial in trials)
