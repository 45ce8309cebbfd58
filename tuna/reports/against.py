"""The layers' best times in another session, such as the vendor's library on the same device."""

from __future__ import annotations

import sqlalchemy as sa

from tuna.errors import BadInput
from tuna.reports.comparison import compare
from tuna.reports.report_data import Against, OtherTime


def read_against(
    connection: sa.Connection, session_id: int, other_id: int
) -> tuple[Against, dict[int, OtherTime]]:
    """Session `other_id` and its best time of each config, by config id.

    Raises NotFound for an unknown session or one without a layer in common, BadInput if both are
    one.
    """
    if session_id == other_id:
        raise BadInput(f"Session {session_id} cannot be compared with itself.")
    found = compare(connection, [session_id, other_id])
    times = {}
    for layer in found.layers:
        best, ratio = layer.bests[1], layer.ratios[1]
        if best is None:
            continue
        interval = (
            (ratio.low, ratio.high)
            if ratio and ratio.low is not None and ratio.high is not None
            else None
        )
        times[layer.config_id] = OtherTime(best.solver, best.time_ms, interval, best.noisy)
    other = found.sessions[1]
    against = Against(
        other.session_id, other.library, other.library_version, other.reason, found.differences
    )
    return against, times
