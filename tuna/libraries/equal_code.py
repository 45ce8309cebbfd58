"""What was measured in earlier rounds of a search, by its code: equal code is measured once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuna.libraries.items import Trial, WorkItem

#: Searches whose trials are kept: those of a worker take turns.
_KEPT = 64


@dataclass
class _Measured:
    """The trials of one search."""

    #: number of the round and its trial, by the artifact's digest
    trials: dict[str, tuple[int, Trial]] = field(default_factory=dict)
    #: fields of a result that say where and how they were measured
    facts: Mapping[str, Any] = field(default_factory=dict)


class MeasuredCode:
    """The trials that this worker has measured, for later rounds of their searches.

    A search proposes candidates before they are built, and different ones may be the same code,
    such as those that differ in an option that the compiler has no use for. Rounds of equal number
    share nothing: an attempt that is repeated is measured anew.
    """

    def __init__(self) -> None:
        self._searches: OrderedDict[tuple[object, ...], _Measured] = OrderedDict()

    def known(self, item: WorkItem) -> Mapping[str, Trial]:
        """Return the trials of earlier rounds of the item's search by the artifact's digest."""
        found = self._searches.get(_search_of(item), _Measured()).trials
        return {digest: trial for digest, (round_, trial) in found.items() if round_ < item.round}

    def facts(self, item: WorkItem) -> Mapping[str, Any]:
        """Return the fields of a result in which nothing new is measured."""
        return self._searches.get(_search_of(item), _Measured()).facts

    def add(self, item: WorkItem, trials: Mapping[str, Trial], facts: Mapping[str, Any]) -> None:
        """Keep the good trials by the artifact's digest; failed ones, and those of a device that
        was not quiet, are measured again where their code comes up again."""
        if facts.get("noisy"):
            return
        key = _search_of(item)
        measured = self._searches.pop(key, None) or _Measured()
        for digest, trial in trials.items():
            if trial.cause is None:
                measured.trials.setdefault(digest, (item.round, trial))
        measured.facts = {name: facts[name] for name in ("device", "drift") if name in facts}
        self._searches[key] = measured
        if len(self._searches) > _KEPT:
            self._searches.popitem(last=False)


def _search_of(item: WorkItem) -> tuple[object, ...]:
    """Return what the rounds of a search have in common."""
    return item.session_id, item.solver, item.layer.key
