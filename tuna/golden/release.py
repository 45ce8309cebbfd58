"""Moves golden versions between their states: promotes drafts, rolls back releases."""

from __future__ import annotations

import sqlalchemy as sa

from tuna.db.engine import transaction
from tuna.db.models import Golden
from tuna.db.types import utc_now
from tuna.errors import BadInput, NotFound
from tuna.golden import compare, entries
from tuna.golden.compare import PromotionReport
from tuna.golden.errors import GateViolated, GoldenFrozen, NotReleasable
from tuna.golden.versions import Version, current, find, of_library
from tuna.messages import choices
from tuna.vocabulary import GoldenState


def promote(
    engine: sa.Engine,
    version: int,
    *,
    max_regression: float | None = None,
    min_gain: float | None = None,
    library: str | None = None,
    allow_noisy: bool = False,
) -> PromotionReport:
    """Release a draft if it passes the gate against the current version, or against its base if
    there is none.

    Raises NotFound, GoldenFrozen for a version that was promoted before, NotReleasable for results
    that were simulated, or noisy unless `allow_noisy`, GateViolated with the violations.
    """

    def release(connection: sa.Connection) -> PromotionReport:
        name = find(connection, version, library).library
        there = {one.version: one for one in of_library(connection, name, lock=True)}
        draft = there[version]
        if draft.state is not GoldenState.DRAFT:
            raise GoldenFrozen(f"The {draft} is {draft.state.value} already.")
        _check_entries(connection, draft, allow_noisy=allow_noisy)
        other = current(there.values()) or (
            there[draft.base_version] if draft.base_version is not None else None
        )
        report = compare.compare(connection, draft, other)
        violations = compare.check_gate(report, max_regression, min_gain)
        if violations:
            against = f" --against {other.version}" if other else ""
            raise GateViolated(
                f"The {draft} is not promoted: {'; '.join(violations)}.",
                hint=f"look at: `tuna golden report {version}{against}`",
            )
        _move(connection, draft, GoldenState.PROMOTED)
        return report

    return transaction(engine, release)


def _check_entries(connection: sa.Connection, draft: Version, *, allow_noisy: bool) -> None:
    """Raise NotReleasable for what `build` refuses too: a draft may have been built with other
    wishes, or by another version."""
    mine = entries.of_version(draft)
    simulated = mine.count(connection, "present_simulated")
    if simulated:
        raise NotReleasable(
            f"The {draft} is not promoted: {simulated} of its results were timed by a stand-in, not"
            " by a device.",
            hint=(
                "build it again from a session on a machine with the device, without TUNA_SIMULATED"
            ),
        )
    noisy = 0 if allow_noisy else mine.count(connection, "noisy")
    if noisy:
        raise NotReleasable(
            f"The {draft} is not promoted: {noisy} of its results were measured on a device that"
            " was not quiet.",
            hint=(
                "measure these layers again on a quiet machine, or add --allow-noisy to release"
                " them nevertheless"
            ),
        )


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


def _move(connection: sa.Connection, version: Version, state: GoldenState) -> None:
    values = {"state": state.value} | (
        {"promoted_at": utc_now()} if state is GoldenState.PROMOTED else {}
    )
    connection.execute(sa.update(Golden).where(Golden.id == version.id).values(**values))
