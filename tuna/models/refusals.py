"""Refusals of models: one message for all obstacles, and errors that cross from a child."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuna.errors import BadInput, NotFound, ServiceError, TunaError

#: Largest error of a built model, relative to the largest magnitude of the answer.
TOLERANCE = 1e-3
#: Most nodes of an operator that a message names.
_NAMED = 6

_KINDS: Mapping[str, type[TunaError]] = {
    kind.__name__: kind for kind in (BadInput, NotFound, ServiceError)
}


def refusing(handler: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Decorate a child's handler: a TunaError becomes an answer with `refused`, `hint`, `kind`."""

    @functools.wraps(handler)
    def answer(**arguments: Any) -> dict[str, Any]:
        try:
            return handler(**arguments)
        except TunaError as error:
            return {"refused": str(error), "hint": error.hint, "kind": type(error).__name__}

    return answer


def obstacles(
    name: str,
    operators: Mapping[str, Sequence[str]],
    open_shapes: Mapping[str, Sequence[int | str]],
) -> BadInput | None:
    """One message for all obstacles to the import of a model; None if there are none.

    `operators` are unsupported ones with the names of their nodes; `open_shapes` are shapes of
    inputs with the names of the extents that are still open, or ? for one without a name.
    """
    parts, hints = [], []
    if operators:
        listed = ", ".join(
            f"{operator} ({_nodes(nodes)})" for operator, nodes in sorted(operators.items())
        )
        parts.append(f"operators that cannot be imported: {listed}")
    if open_shapes:
        shown = (f"{given}={','.join(map(str, extents))}" for given, extents in open_shapes.items())
        parts.append(
            "open extents in the shape of its"
            f" input{'s' if len(open_shapes) > 1 else ''} {' and '.join(shown)}"
        )
        named = dict.fromkeys(
            extent
            for extents in open_shapes.values()
            for extent in extents
            if isinstance(extent, str)
        )
        hints += [f"--shape {extent}=N" for extent in named if extent != "?"]
        for given, extents in open_shapes.items():
            if "?" in extents:
                hints.append(
                    "--shape"
                    f" {given}={','.join('N' if one == '?' else str(one) for one in extents)}"
                )
    if not parts:
        return None
    first = any(isinstance(extents[0], str) for extents in open_shapes.values())
    hint = (
        f"give them: {' '.join(hints)}{'; --batch N is the first of every input' if first else ''}"
        if hints
        else ""
    )
    return BadInput(f"{name} has {'; and '.join(parts)}.", hint=hint)


def _nodes(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return f"{len(names)}: {', '.join(names[:_NAMED])}{f' and {more} more' if more > 0 else ''}"


def accepted(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a child's answer, or raise the error that it holds."""
    if "refused" in answer:
        raise _KINDS.get(answer["kind"], BadInput)(answer["refused"], hint=answer["hint"])
    return answer
