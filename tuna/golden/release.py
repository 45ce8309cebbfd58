"""Moves golden versions between their states: promotes drafts that pass the gate, rolls back
releases."""

from __future__ import annotations

import sqlalchemy as sa

from tuna.common.files import user
from tuna.common.messages import choices, counted
from tuna.db.engine import transaction
from tuna.db.models import Golden
from tuna.db.types import utc_now
from tuna.errors import BadInput, NotFound
from tuna.golden.compare import PromotionReport, compare
from tuna.golden.releasable import FAULTS
from tuna.golden.versions import (
    GateViolated,
    GoldenFrozen,
    NotReleasable,
    Version,
    current,
    entries_of,
    find,
    of_library,
)
from tuna.vocabulary import GoldenState

#: Tolerance for binary fractions: 2.1 ms has to count as 5 % more than 2.0 ms
_TOLERANCE = 1e-9
#: Length of the column
_MAX_BY_CHARS = 255


def promote(
    engine: sa.Engine,
    version: int,
    *,
    max_regression: float | None = None,
    min_gain: float | None = None,
    library: str | None = None,
    allow_noisy: bool = False,
    by: str | None = None,
    note: str = "",
) -> PromotionReport:
    """Release a draft if it passes the gate against the current version, or against its base if
    there is none.

    `by`: who does, by default this user, and `note`: why; they are kept with the version. Raises
    NotFound, GoldenFrozen for a version that was promoted before, NotReleasable for results that
    were simulated, or noisy unless `allow_noisy`, GateViolated with the violations.
    """
    who = user() if by is None else by

    def release(connection: sa.Connection) -> PromotionReport:
        name = find(connection, version, library).library
        known = {golden.version: golden for golden in of_library(connection, name, lock=True)}
        draft = known[version]
        if draft.state is not GoldenState.DRAFT:
            raise GoldenFrozen(f"The {draft} is {draft.state.value} already.")
        _check_entries(connection, draft, allow_noisy=allow_noisy)
        other = current(known.values()) or (
            known[draft.base_version] if draft.base_version is not None else None
        )
        report = compare(connection, draft, other)
        violations = check_gate(report, max_regression, min_gain)
        if violations:
            against = f" --against {other.version}" if other else ""
            raise GateViolated(
                f"The {draft} is not promoted: {'; '.join(violations)}.",
                hint=f"look at: `tuna golden report {version}{against}`",
            )
        said = {"promoted_at": utc_now(), "promoted_by": who[:_MAX_BY_CHARS], "note": note or None}
        _move(connection, draft, GoldenState.PROMOTED, **said)
        return report

    return transaction(engine, release)


def _check_entries(connection: sa.Connection, draft: Version, *, allow_noisy: bool) -> None:
    """Raise NotReleasable for what `build` refuses too: a draft may have been built with other
    wishes, or by another version."""
    marks = {"present_simulated": "simulated"} | ({} if allow_noisy else {"noisy": "noisy"})
    for mark, fault in marks.items():
        said, hint = FAULTS[fault]
        if count := entries_of(draft).count(connection, mark):
            raise NotReleasable(
                f"The {draft} is not promoted: {count} of its results {said}.", hint=hint
            )


def check_gate(
    report: PromotionReport, max_regression: float | None, min_gain: float | None
) -> list[str]:
    """Violations of the promotion gate, one clause each; both limits are fractions (0.05 is 5 %),
    None: no limit.

    `max_regression`: no layer may be slower by more than this, and none may be missing. `min_gain`:
    the total weighted time must shrink by at least this.
    """
    violations: list[str] = []
    if max_regression is not None:
        count = sum(ratio > 1 + max_regression + _TOLERANCE for ratio in report.slower_ratios)
        if count:
            worst = report.regressions[0]
            violations.append(
                f"{_layers(count)} more than {_percent(max_regression)} slower, the worst by"
                f" {_percent(worst.ratio - 1)}: {worst.after.layer} on {worst.after.arch} x"
                f" {worst.after.num_cu}"
            )
        if report.total.missing:
            entry = report.missing_layers[0]
            violations.append(
                f"{_layers(report.total.missing)} missing that version {report.against} has, such"
                f" as {entry.layer} on {entry.arch} x {entry.num_cu}"
            )
    if min_gain is not None:
        ratio = report.total.ratio
        if ratio is None:
            violations.append(
                "no gain can be measured: no version to compare with has one of these layers"
            )
        elif 1 - ratio < min_gain - _TOLERANCE:
            shrinks = (
                f"shrinks by {_percent(1 - ratio)}"
                if ratio <= 1
                else f"grows by {_percent(ratio - 1)}"
            )
            violations.append(
                f"the total weighted time {shrinks} instead of shrinking by {_percent(min_gain)}"
            )
    return violations


def rollback(engine: sa.Engine, library: str) -> tuple[Version, Version | None]:
    """Withdraw the library's newest release; returns it and the one before it, which is current
    again, if any."""
    return transaction(engine, _withdraw_newest, library)


def _withdraw_newest(connection: sa.Connection, library: str) -> tuple[Version, Version | None]:
    there = of_library(connection, library, lock=True)
    if not there:
        names = connection.execute(
            sa.select(Golden.library).distinct().order_by(Golden.library)
        ).scalars()
        raise NotFound(
            f"{library} has no golden versions.", hint=choices(library, names, "libraries")
        )
    newest = current(there)
    if newest is None:
        raise BadInput(
            f"No golden version of {library} is promoted.", hint="see: `tuna golden list`"
        )
    _move(connection, newest, GoldenState.WITHDRAWN)
    return newest, current(one for one in there if one is not newest)


def _move(connection: sa.Connection, version: Version, state: GoldenState, **said: object) -> None:
    values = {"state": state.value, **said}
    connection.execute(sa.update(Golden).where(Golden.id == version.id).values(**values))


def _layers(count: int) -> str:
    return counted(count, "layer is", "layers are")


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.4g} %"
