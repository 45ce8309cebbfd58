"""Errors of users that cross from a child process to its caller: an answer with `refused`, `hint` and `kind`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tuna.errors import BadInput, NotFound, ServiceError, TunaError

_KINDS: Mapping[str, type[TunaError]] = {kind.__name__: kind for kind in (BadInput, NotFound, ServiceError)}


def refusing(handler: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Of a child: a TunaError that the handler raises becomes an answer, for it is no fault of the child's."""

    @functools.wraps(handler)
    def answer(**arguments: Any) -> dict[str, Any]:
        try:
            return handler(**arguments)
        except TunaError as error:
            return {"refused": str(error), "hint": error.hint, "kind": type(error).__name__}

    return answer


def accepted(answer: dict[str, Any]) -> dict[str, Any]:
    """Of the caller: the answer, or what it refuses as an error of the same kind."""
    if "refused" in answer:
        raise _KINDS.get(answer["kind"], BadInput)(answer["refused"], hint=answer["hint"])
    return answer
