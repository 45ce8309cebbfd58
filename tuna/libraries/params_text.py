"""Params of candidates as people, tables and predictors read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuna.libraries.kernels import CandidateFacts


def json_object(params: str) -> Mapping[str, Any]:
    """Return the values of a JSON object by name; empty for another text."""
    try:
        values = json.loads(params)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


@dataclass(frozen=True)
class ParamsText:
    """Functions of the text of a candidate's params, which may come from another version of the
    library; they need neither the device nor the library itself."""

    #: function that returns params as one short readable line; the default changes nothing
    readable: Callable[[str], str] = str
    #: function that returns JSON values by name, for tools that compare candidates; empty: they
    #: have no names
    by_name: Callable[[str], Mapping[str, Any]] = json_object
    #: function that returns the features of a candidate for a predictor; None: it is not learned
    #: from
    facts: Callable[[str], CandidateFacts | None] = lambda _: None
    #: function that returns the cost model with which searches begin where no predictor was
    #: trained; None: there is none
    prior: Callable[[], bytes | None] = lambda: None
    #: true if work items carry the best params that the session has for their config and solver
    uses_known: bool = False
