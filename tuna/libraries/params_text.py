"""Params of candidates as people, tables and predictors read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuna.libraries.kernels import CandidateFacts


@dataclass(frozen=True)
class ParamsText:
    """Text of a candidate's params, which may come from another version of the library; it needs
    neither the device nor the library itself."""

    #: Whether work items carry the best params that the session has for their config and solver.
    uses_known: bool = False

    def readable(self, params: str) -> str:
        """Return them as one short readable line. The default changes nothing."""
        return params

    def by_name(self, params: str) -> Mapping[str, Any]:
        """Return them as JSON values by name, for tools that compare candidates; empty: they have
        no names. The default reads a JSON object."""
        try:
            values = json.loads(params)
        except (ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    def facts(self, params: str) -> CandidateFacts | None:
        """Return what a predictor sees of the candidate; None, the default: it is not learned
        from."""
        return None

    def prior(self) -> bytes | None:
        """Return the cost model with which searches begin where no predictor was trained; None, the
        default: there is none."""
        return None
