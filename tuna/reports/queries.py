"""Queries for a session's report."""

from __future__ import annotations

from collections import Counter, defaultdict

import sqlalchemy as sa

from tuna.db import benchmarks, networks, searches, sessions
from tuna.db.models import Session
from tuna.db.searches import Searches
from tuna.libraries.base import Environment
from tuna.reports.against import read_against
from tuna.reports.failures import read_failures
from tuna.reports.layers import read_layers
from tuna.reports.network_totals import totals
from tuna.reports.report_data import Header, ReportFigures
from tuna.reports.steps import read_steps
from tuna.results.selectable import SESSIONS

_ENVIRONMENT = {
    "library": "Library",
    "library_version": "Library version",
    "toolchain": "Toolchain",
    "arch": "Architecture",
    "num_cu": "Compute units",
    "device": "Device",
    "target": "Target",
    "key": "Environment key",
}


def read_figures(
    connection: sa.Connection, session_id: int, against: int | None = None
) -> ReportFigures:
    """All figures of the session, a valid (empty) set if it has no results, beside the times of
    session `against`.

    Raises NotFound for an unknown session, BadInput if both are the same.
    """
    session = sessions.get(connection, session_id)
    row = connection.execute(
        sa.select(Session.environment_id, Session.created_at).where(Session.id == session_id)
    ).one()
    other, others = (None, {}) if against is None else read_against(connection, session_id, against)
    steps = read_steps(connection, session_id, row.environment_id)
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for config_id, by_model in networks.occurrences(connection).items():
        for name, count in by_model.items():
            counts[name][config_id] = count
    layers = read_layers(connection, session_id, session.environment.library, steps, counts, others)
    # Served by ix_find_db_simulated_session_id.
    of_session = SESSIONS.only(SESSIONS["session_id"] == session_id)
    header = Header(
        session_id=session.id,
        reason=session.reason,
        library=session.environment.library,
        device=session.environment.device,
        environment=_described(session.environment),
        created_at=row.created_at,
        first=steps.first,
        last=steps.last,
        simulated=of_session.count(connection, "simulated"),
        noisy=sum(solver.noisy for layer in layers for solver in layer.solvers),
        against=other,
    )
    states = Counter(solver.state for layer in layers for solver in layer.solvers)
    return ReportFigures(
        header=header,
        layers=layers,
        totals=totals(layers, counts),
        jobs=tuple(sorted(states.items(), key=lambda item: (-item[1], item[0]))),
        failures=read_failures(connection, session_id),
        devices=steps.devices,
        searches=searches.read(connection, [session_id]).get(session_id, Searches()),
        models=tuple(benchmarks.of_session(connection, session_id)),
    )


def _described(environment: Environment) -> tuple[tuple[str, str], ...]:
    fields = [(title, str(getattr(environment, name))) for name, title in _ENVIRONMENT.items()]
    fields += [
        (f"Condition {name}", value) for name, value in sorted(environment.conditions.items())
    ]
    fields += [(f"Flag {name}", str(value)) for name, value in sorted(environment.flags.items())]
    fields += [
        (f"Condition {name}", value) for name, value in sorted(environment.conditions.items())
    ]
    return tuple((title, value or "not recorded") for title, value in fields)
