"""The TVM library together with what a worker lends it, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuna.configs import Config
from tuna.libraries.context import RunContext
from tuna.libraries.items import Candidate, StepResult, WorkItem
from tuna.libraries.steps import find_step
from tuna.libraries.tvm import TvmLibrary


@dataclass
class Bench:
    """The library and what a worker lends it."""

    library: TvmLibrary
    context: RunContext
    target: str

    def item(self, config: Config, solver: str, *, seed: int = 7, **options: Any) -> WorkItem:
        """A compile item; builds and measurements get long, for this machine may be busy."""
        options = {"candidates": 2, "build_timeout_s": 150, "measure_timeout_s": 150, **options}
        facts = {
            "job_id": 1,
            "attempt": 3,
            "session_id": 1,
            "library": "tvm",
            "step": "compile",
            "target": self.target,
        }
        return WorkItem(solver=solver, config=config.to_json(), seed=seed, options=options, **facts)

    def run(self, item: WorkItem) -> StepResult:
        """The one result of one item."""
        (result,) = self.library.run(find_step(self.library, item.step), [item], self.context)
        assert (result.job_id, result.attempt, result.step) == (
            item.job_id,
            item.attempt,
            item.step,
        )
        return result

    def compile(self, config: Config, solver: str, **options: Any) -> StepResult:
        """Compile a few candidates."""
        return self.run(self.item(config, solver, **options))

    def evaluate(
        self, config: Config, solver: str, artifacts: list[str | None], **options: Any
    ) -> StepResult:
        """Evaluate compiled code, whoever compiled it."""
        return self.run(self.eval_item(self.item(config, solver, **options), artifacts))

    def eval_item(self, item: WorkItem, artifacts: list[str | None]) -> WorkItem:
        """The item of the next step."""
        candidates = tuple(
            Candidate(index=i, artifact=artifact) for i, artifact in enumerate(artifacts)
        )
        return item.model_copy(update={"step": "eval", "candidates": candidates})
