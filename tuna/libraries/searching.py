"""A base for candidate libraries with solvers that are searched in rounds, each of which learns
from the rounds before it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from tuna.common.files import empty, gunzip
from tuna.libraries.base import Finals, RoundsOutcome, SearchLimits, SearchRules, Step
from tuna.libraries.candidate_children import ArtifactLost, artifact
from tuna.libraries.candidates import CandidateLibrary, CandidateOptions, Work
from tuna.libraries.context import RunContext
from tuna.libraries.items import Trial, WorkItem
from tuna.libraries.measurement import build_fault
from tuna.libraries.options import read
from tuna.libraries.search.stop import Effort, SearchState, Stop, StopRule
from tuna.sandbox.processes import ChildFault
from tuna.vocabulary import SEARCH, Cause

#: Part of the minutes that is reserved for the start of workers and for finals, and its limit in
#: seconds
_AROUND, _AROUND_S = 0.1, 30.0
#: Maximum of rounds open beside the oldest one where all candidates are tried, which bounds what
#: the artifact store holds of a layer that is built faster than it is measured
_EXHAUSTIVE_AHEAD = 16
_WHY = {
    Stop.TARGET: "a result is as fast as target_ms",
    Stop.EXHAUSTED: "there is no further candidate",
    Stop.TRIALS: "all trials are done",
    Stop.MINUTES: "another round would end after the minutes",
    Stop.FLAT: "the last trials improved the best by less than 1 %",
}


class SearchOptions(CandidateOptions):
    """Job options of libraries that search; where a solver is searched, `candidates` limits its
    trials if it is set."""

    renamed: ClassVar[Mapping[str, str]] = {"search": "strategy"}

    strategy: Literal["search", "random", "exhaustive"] = Field(
        "search",
        description=(
            "way of choosing candidates of a large space: by a search that learns, at random, or"
            " all of them"
        ),
    )
    effort: Literal["quick", "full"] | None = Field(
        None,
        description=(
            "effort of a search that learns, which ends when flat, quick after 64 trials at most;"
            " default: quick, if no limit is set"
        ),
    )
    minutes: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="minutes of a search: no round but the first is opened that would end later",
    )
    target_ms: float | None = Field(
        None, gt=0, le=1e9, description="time of a result, in ms, at which a search ends"
    )
    warm_start: bool = Field(
        True,
        description=(
            "whether a search learns from earlier searches of similar layers, here and on other"
            " devices"
        ),
    )
    batch: int = Field(16, ge=1, le=1000, description="candidates in a round of a search")

    @property
    def max_trials(self) -> int:
        """The larger one of the candidates and the trials of a round."""
        return max(super().max_trials, self.batch)

    @field_validator("effort")
    @classmethod
    def _of_a_part(cls, effort: str | None, info: ValidationInfo) -> str | None:
        if effort is not None and info.data.get("strategy") == "exhaustive":
            raise ValueError("all candidates are tried with the strategy exhaustive")
        return effort


class CandidateSearch(SearchRules):
    """The rules that job options of candidate libraries set."""

    def __init__(self, options: type[SearchOptions], in_rounds: Collection[str]) -> None:
        self._options, self._in_rounds = options, in_rounds

    def solvers(self, names: Iterable[str], options: Mapping[str, Any]) -> Collection[str]:
        """Return the solvers of `in_rounds`, unless the job options say otherwise."""
        if read(self._options, options).strategy == "random":
            return []
        return [name for name in names if name in self._in_rounds]

    def ends(self, options: Mapping[str, Any], outcome: RoundsOutcome) -> str | None:
        """Return the reason of the first rule of `search.stop` that holds."""
        asked = read(self._options, options)
        rule = _rule(asked)
        planned = asked.batch * outcome.opened
        done = SearchState(
            seconds=[None if one is None else one / 1000 for one in outcome.times_ms],
            result_s=None if outcome.result_ms is None else outcome.result_ms / 1000,
            elapsed_s=outcome.elapsed_s + outcome.round_s + _around_s(asked),
            exhausted=outcome.proposed
            < (planned if rule.trials is None else min(planned, rule.trials)),
        )
        why = rule.stopped_by(done) or (Stop.TRIALS if rule.left(outcome.proposed) == 0 else None)
        return _WHY[why] if why else None

    def look_ahead(self, options: Mapping[str, Any]) -> int:
        """Return enough rounds for many processes that build where none learns from another."""
        if read(self._options, options).strategy == "exhaustive":
            return _EXHAUSTIVE_AHEAD
        return super().look_ahead(options)

    def warm_starts(self, options: Mapping[str, Any]) -> bool:
        """Return the option `warm_start`; where all candidates are tried there is nothing to
        learn."""
        asked = read(self._options, options)
        return asked.warm_start and asked.strategy == "search"

    def limits_s(self, options: Mapping[str, Any]) -> SearchLimits | None:
        """Return the option `minutes`, without the time before and after, and in full."""
        asked = read(self._options, options)
        if asked.minutes is None:
            return None
        return SearchLimits(60 * asked.minutes - _around_s(asked), 60 * asked.minutes)

    def gives_up_rest(self, why: str) -> bool:
        """True if the search ended by its target."""
        return why == _WHY[Stop.TARGET]

    def max_rounds(self, options: Mapping[str, Any]) -> int | None:
        """Return the limit on trials, which an effort has too, as rounds."""
        asked = read(self._options, options)
        trials = _rule(asked).trials
        return None if trials is None else math.ceil(trials / asked.batch)


class SearchingLibrary(CandidateLibrary):
    """Solvers that are searched have the step `search`, which proposes, before those of every
    candidate library.

    A subclass gives `in_rounds` too, and its builder `Builder.search`.
    """

    finals = Finals(after_rounds=True)
    options: type[SearchOptions] = SearchOptions
    in_rounds: ClassVar[Collection[str]] = ()  #: names of the solvers that are searched

    def __init__(self) -> None:
        super().__init__()
        self.search = CandidateSearch(self.options, self.in_rounds)

    def work_of(self, step: Step) -> Work:
        """Return the function that does `step` for one item."""
        return self._search if step.name == SEARCH else super().work_of(step)

    def time_limit_s(self, step: Step, item: WorkItem) -> float:
        """A search takes the step's own limit."""
        return step.time_limit_s if step.name == SEARCH else super().time_limit_s(step, item)

    def _search(self, item: WorkItem, context: RunContext) -> dict[str, Any]:
        asked = read(self.options, item.options)
        left = _rule(asked).left(item.round * asked.batch)
        count = asked.batch if left is None else min(asked.batch, left)
        folder = context.scratch / "history"
        folder.mkdir(exist_ok=True)
        own = _written(folder / "own", item.history, context)
        known = [
            {
                "label": sibling.label,
                "same": sibling.same,
                "path": _written(folder / str(number), [sibling.artifact], context),
            }
            for number, sibling in enumerate(item.siblings)
            if not sibling.prior
        ]
        prior = [artifact(sibling.artifact, context) for sibling in item.siblings if sibling.prior]
        job = self._job(item, asked, context)
        call = self._builder_caller(job, context)
        try:
            facts = {"history": own, "count": count, "known": known}
            if prior:
                (folder / "prior").write_bytes(prior[0])
                facts["prior"] = str(folder / "prior")
            params = call("search", self.start_timeout_s, asked=facts)["params"]
        except ChildFault as error:
            return build_fault(error)
        finally:
            empty(folder)
        if not params and not item.round:
            words = "no valid candidate was proposed"
            return {"cause": Cause.NOT_APPLICABLE, "output_tail": words}
        return {"trials": tuple(Trial(index=n, params=text) for n, text in enumerate(params))}


def _written(path: Path, digests: Sequence[str], context: RunContext) -> str:
    """The trials of these blocks in one file; raises ArtifactLost."""
    try:
        path.write_bytes(b"\n".join(gunzip(artifact(one, context)) for one in digests))
    except ValueError:
        raise ArtifactLost(digests[0]) from None
    return str(path)


def _around_s(asked: SearchOptions) -> float:
    return 0.0 if asked.minutes is None else min(_AROUND_S, _AROUND * 60 * asked.minutes)


def _rule(asked: SearchOptions) -> StopRule:
    trials = asked.candidates if "candidates" in asked.model_fields_set else None
    if asked.strategy == "exhaustive":
        return StopRule(trials, asked.minutes, asked.target_ms)
    free = (
        asked.effort is None
        and trials is None
        and asked.minutes is None
        and asked.target_ms is None
    )
    named = "quick" if free else asked.effort
    effort = None if named is None else Effort(named)
    return StopRule.of(effort, trials=trials, minutes=asked.minutes, target_ms=asked.target_ms)
