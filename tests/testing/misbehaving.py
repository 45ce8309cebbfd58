"""A library that keeps the contract, and others that each break it in one way."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuna.configs import Config
from tuna.libraries.base import Environment, Library, Retry, SearchRules, Solver, Step
from tuna.libraries.context import RunContext
from tuna.libraries.items import DeviceReport, StepResult, Trial, WorkItem, result_of
from tuna.libraries.options import JobOptions
from tuna.vocabulary import Cause, Resource


class Good(Library):
    """Builds an artifact for each item, and has measured it at once. No entry point names it."""

    name = "good"
    kinds = ("gemm",)
    steps = (Step("build", Resource.CPU), Step("measure", Resource.DEVICE))

    def environment(self) -> Environment:
        return Environment(self.name, "1", "any", 1, "good-1")

    def solvers(self) -> Sequence[Solver]:
        return [Solver("GoodOne", self.kinds, "Direct"), Solver("GoodTwo", self.kinds, "GEMM")]

    def applicable(
        self, configs: Iterable[Config], environment: Environment
    ) -> Iterator[tuple[Config, Sequence[str]]]:
        return ((config, ["GoodOne", "GoodTwo"]) for config in configs)

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        for item in reversed(items):  # any order is right
            yield (
                self._build(item, context) if step.name == "build" else self._measure(item, context)
            )

    def _build(self, item: WorkItem, context: RunContext) -> StepResult:
        artifact = context.artifacts.put(item.solver.encode())
        return result_of(
            item, ok=True, trials=(Trial(index=0, params="{}", artifact=artifact),), **_now()
        )

    def _measure(self, item: WorkItem, context: RunContext) -> StepResult:
        try:
            for candidate in item.candidates:
                context.artifacts.get(candidate.artifact or "")
        except KeyError as error:
            return result_of(
                item, ok=False, cause=Cause.ARTIFACT_LOST, output_tail=str(error), **_now()
            )
        trial = Trial(index=0, times_ms=(1.0, 2.0, 3.0), time_ms=2.0)
        return result_of(item, ok=True, trials=(trial,), device=DeviceReport(name="any"), **_now())


def _now() -> dict[str, float]:
    return {"started_at": time.time() - 1, "ended_at": time.time(), "busy_s": 0.5}


def bad_results(
    change: Callable[[StepResult], Iterable[StepResult]], step: str = "measure"
) -> type[Library]:
    """Each result of `step` is replaced by what `change` makes of it."""

    class Bad(Good):
        def run(
            self, step_: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            for result in super().run(step_, items, context):
                yield from change(result) if result.step == step else [result]

    return Bad


def changed(**facts: Any) -> type[Library]:
    """Each good measurement with other facts."""
    return bad_results(lambda result: [result.model_copy(update=facts) if result.ok else result])


def trial(**facts: Any) -> type[Library]:
    """Each good measurement with another trial, which pydantic would not refuse."""
    return bad_results(
        lambda result: [
            result.model_copy(
                update={"trials": tuple(t.model_copy(update=facts) for t in result.trials)}
            )
        ]
    )


def overriding(**methods: Any) -> type[Library]:
    """The good library with other attributes."""
    return type("Overriding", (Good,), methods)


def _raise(
    self: Good, step: Step, items: Sequence[WorkItem], context: RunContext
) -> Iterator[StepResult]:
    raise ValueError("a bug")
    yield


def _mutate(
    self: Good, step: Step, items: Sequence[WorkItem], context: RunContext
) -> Iterator[StepResult]:
    for item in items:
        item.options["seen"] = True
        yield from Good.run(self, step, [item], context)


def _unstable(self: Good) -> Environment:
    return Environment(self.name, "1", "any", 1, "good-1", flags={"now": str(time.monotonic_ns())})


class NoTrials(JobOptions):
    @property
    def max_trials(self) -> int:
        return 0


class Propose(SearchRules):
    step = Step("propose", Resource.CPU)

    def solvers(self, names: Iterable[str], options: Mapping[str, Any]) -> Collection[str]:
        return ()


def _steps(**facts: Any) -> tuple[Step, ...]:
    return tuple(replace(step, **facts) for step in Good.steps)


class Undescribed(JobOptions):
    """One without a description."""

    candidates: int = 1


#: Each way to misbehave, with the test that must fail of it.
BAD: dict[str, tuple[type[Library], str]] = {
    "raises": (overriding(run=_raise), "test_a_step_raises_nothing"),
    "no result": (bad_results(lambda result: []), "test_each_item_has_one_result"),
    "a result twice": (
        bad_results(lambda result: [result, result]),
        "test_each_item_has_one_result",
    ),
    "another job's id": (changed(job_id=1), "test_each_item_has_one_result"),
    "another attempt": (changed(attempt=77), "test_results_name_the_attempt_and_the_step"),
    "another step": (changed(step="build"), "test_results_name_the_attempt_and_the_step"),
    "good, with a cause": (changed(cause=Cause.RUN_ERROR), "test_a_result_is_good_or_has_a_cause"),
    "bad, without a cause": (changed(ok=False), "test_a_result_is_good_or_has_a_cause"),
    "nothing succeeds": (
        changed(ok=False, cause=Cause.RUN_ERROR, trials=()),
        "test_some_job_succeeds_in_every_step",
    ),
    "negative time": (trial(times_ms=(-1.0,), time_ms=-1.0), "test_times_are_positive_and_finite"),
    "less than a nanosecond": (
        trial(times_ms=(1e-7,), time_ms=1e-7),
        "test_times_are_positive_and_finite",
    ),
    "zero": (trial(times_ms=(0.0,), time_ms=0.0), "test_times_are_positive_and_finite"),
    "NaN": (
        trial(times_ms=(float("nan"),), time_ms=float("nan")),
        "test_times_are_positive_and_finite",
    ),
    "infinite time": (
        trial(times_ms=(float("inf"),), time_ms=float("inf")),
        "test_times_are_positive_and_finite",
    ),
    "a time that was not measured": (trial(time_ms=9.0), "test_times_are_positive_and_finite"),
    "a failed trial with a time": (
        trial(cause=Cause.WRONG_RESULT),
        "test_trials_have_an_index_each_and_an_outcome",
    ),
    "good without a good trial": (
        trial(cause=Cause.WRONG_RESULT, time_ms=None, times_ms=()),
        "test_trials_have_an_index_each_and_an_outcome",
    ),
    "more trials than it says": (
        overriding(options=NoTrials),
        "test_trials_have_an_index_each_and_an_outcome",
    ),
    "an index twice": (
        bad_results(lambda result: [result.model_copy(update={"trials": result.trials * 2})]),
        "test_trials_have_an_index_each_and_an_outcome",
    ),
    "an artifact that is not in the store": (
        trial(artifact="0" * 64),
        "test_artifacts_are_in_the_store",
    ),
    "no device": (changed(device=None), "test_what_is_measured_names_its_device"),
    "busy for longer than it took": (
        changed(busy_s=1e6),
        "test_an_item_took_no_longer_than_from_its_start_to_its_end",
    ),
    "a lost artifact is not noticed": (
        overriding(
            _measure=lambda self, item, context: Good._measure(
                self, item.model_copy(update={"candidates": ()}), context
            )
        ),
        "test_an_artifact_that_is_gone_sends_the_job_back",
    ),
    "changes its items": (overriding(run=_mutate), "test_items_are_left_as_they_were"),
    "an unknown solver": (
        overriding(
            applicable=lambda self, configs, environment: (
                (config, ["Other"]) for config in configs
            )
        ),
        "test_each_config_is_answered_once_with_solvers_of_its_kind",
    ),
    "a config left out": (
        overriding(
            applicable=lambda self, configs, environment: (
                (c, ["GoodOne"]) for c in list(configs)[:1]
            )
        ),
        "test_each_config_is_answered_once_with_solvers_of_its_kind",
    ),
    "a solver twice": (
        overriding(
            solvers=lambda self: (
                2 * [Solver("GoodOne", ("gemm",), "GEMM"), Solver("GoodTwo", ("gemm",), "GEMM")]
            )
        ),
        "test_solvers_are_distinct_and_have_canonical_names",
    ),
    "a name that is not canonical": (
        overriding(
            solvers=lambda self: [
                Solver(n, ("gemm",), "GEMM") for n in ("GoodOne", "GoodTwo", "A<1, 2>")
            ]
        ),
        "test_solvers_are_distinct_and_have_canonical_names",
    ),
    "another environment at each look": (
        overriding(environment=_unstable),
        "test_the_environment_is_stable",
    ),
    "a step that there is not": (
        overriding(steps=_steps(needs=("other",))),
        "test_steps_have_names_limits_and_a_way",
    ),
    "a search that would end after its first round": (
        overriding(search=Propose()),
        "test_steps_have_names_limits_and_a_way",
    ),
    "no time": (
        overriding(time_limit_s=lambda self, step, item: 0.0),
        "test_steps_have_names_limits_and_a_way",
    ),
    "no retry": (
        overriding(steps=_steps(retries=dict.fromkeys(Cause))),
        "test_each_cause_has_a_retry",
    ),
    "waits for ever": (
        overriding(
            steps=_steps(
                retries=dict.fromkeys(
                    Cause, Retry(delay_s=1, max_delay_s=float("inf"), backoff=float("inf"))
                )
            )
        ),
        "test_each_cause_has_a_retry",
    ),
    "an option without a description": (
        overriding(options=Undescribed),
        "test_job_options_are_described_and_checked",
    ),
    "says that it is installed": (
        overriding(name="example"),
        "test_the_command_line_repeats_the_job_when_pasted",
    ),
}
