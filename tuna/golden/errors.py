"""Errors of golden versions."""

from __future__ import annotations

from tuna.errors import BadInput, TunaError


class GoldenExists(BadInput):
    """This golden version exists already."""

    hint = "add --overwrite to change a draft, or take another number"


class GoldenFrozen(BadInput):
    """A golden version that was promoted never changes."""

    hint = "build a new version on it"


class NotReleasable(BadInput):
    """Results cannot become golden: they were not measured, or not on a quiet device, or their
    origin is unknown."""


class SessionChanged(TunaError):
    """The session's results changed while the golden version was built; nothing was written."""

    hint = "wait until the session's jobs are done, then build again"


class ResultsChanged(TunaError):
    """Results were replaced while they were read."""

    hint = "run the command again"


class GateViolated(TunaError):
    """The golden version violates the limits of its promotion."""

    hint = "look at: `tuna golden report VERSION`"
