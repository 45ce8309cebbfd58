"""A base for libraries whose candidates are built where they are measured, such as those that come
with a vendor's library."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuna.artifacts.files import folder_url
from tuna.artifacts.store import Artifacts
from tuna.libraries.base import Step
from tuna.libraries.candidate_children import artifact
from tuna.libraries.candidates import BuildChild, CandidateLibrary
from tuna.libraries.context import RunContext
from tuna.libraries.items import Candidate, Rival, Trial, WorkItem, of_rival
from tuna.libraries.measurement import build_fault
from tuna.sandbox.processes import ChildFault
from tuna.vocabulary import Resource


class OneStepLibrary(CandidateLibrary):
    """One step, `eval` on the device: proposes, builds and measures; what was built stays on this
    machine."""

    steps: tuple[Step, ...] = (Step("eval", Resource.DEVICE, time_limit_s=1800.0),)

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """The time of both parts."""
        asked = self._options(item)
        building = self.start_timeout_s + asked.candidates * (
            self.start_timeout_s + asked.build_timeout_s
        )
        return building + super().time_limit_s(step, item)

    def _eval(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        with _here(context, item.body) as with_store:
            return self._built_and_measured(item, with_store)

    def _finals(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        with _here(context, item.body) as with_store:
            built = {rival.index: self._built(item, rival, with_store) for rival in item.rivals}
            rivals = [
                rival.model_copy(update={"artifact": built[rival.index].artifact})
                for rival in item.rivals
                if built[rival.index].cause is None
            ]
            found = super()._finals(item.model_copy(update={"rivals": tuple(rivals)}), with_store)
        failed = [trial for trial in built.values() if trial.cause is not None]
        return {**found, "trials": (*found["trials"], *failed)}

    def _built(self, item: WorkItem, rival: Rival, context: RunContext) -> Trial:
        """A trial of the rival, with an artifact or a cause."""
        own = of_rival(item, rival, self.steps[-1].name)
        asked = self._options(own)
        job = self._job(own, asked, context)
        call = self._builder_caller(job, context)
        propose = functools.partial(call, "propose", self.start_timeout_s)
        try:
            propose()
        except ChildFault as error:
            return Trial(index=rival.index, params=rival.params, **build_fault(error))
        building = BuildChild(call, propose, asked.build_timeout_s, context)
        return self._build(building, rival.index, rival.params)

    def _built_and_measured(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        clock = time.monotonic()
        built = self._compile(item, context)
        built_s = time.monotonic() - clock
        trials: dict[int, Trial] = {trial.index: trial for trial in built.get("trials", ())}
        if "cause" in built:
            return {**built, "trials": _without_artifacts(trials.values())}
        good = [
            Candidate(index=t.index, artifact=t.artifact)
            for t in trials.values()
            if t.cause is None
        ]
        found = super()._eval(item.model_copy(update={"candidates": tuple(good)}), context)
        for trial in found["trials"]:
            origin = trials[trial.index]
            trials[trial.index] = trial.model_copy(
                update={"params": origin.params, "build_s": origin.build_s}
            )
        busy_s = built_s + found["busy_s"]
        return {**found, "trials": _without_artifacts(trials.values()), "busy_s": busy_s}


@contextlib.contextmanager
def _here(context: RunContext, body: str | None) -> Iterator[RunContext]:
    """Lend a context with a store of artifacts that is removed afterwards, and has the config's
    body."""
    with tempfile.TemporaryDirectory(dir=context.scratch) as folder:
        store = Artifacts(folder_url(Path(folder, "built")), Path(folder, "cache"))
        if body:
            store.put(artifact(body, context))
        yield replace(context, artifacts=store)


def _without_artifacts(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Nothing is left of what they name."""
    return tuple(trial.model_copy(update={"artifact": None}) for trial in trials)
