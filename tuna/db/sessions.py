"""Sessions and environments in SQL, and the installation that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tuna.db import known_sessions
from tuna.db.bulk import upsert
from tuna.db.models import EnvironmentRow, FormerKey, Installation, Session
from tuna.db.session_options import DEFAULTS, SessionOptions
from tuna.db.types import utc_now
from tuna.errors import BadInput

if TYPE_CHECKING:
    from tuna.artifacts.signatures import Keys
    from tuna.libraries.base import Environment
    from tuna.settings import Settings

#: Fields of an environment that are one text
_TEXTS = ("library", "library_version", "arch", "toolchain", "device", "target")


@dataclass(frozen=True)
class SessionInfo:
    """A session with its environment."""

    id: int
    reason: str
    environment: Environment
    options: SessionOptions = DEFAULTS


def set_options(
    connection: sa.Connection, session_id: int, values: Mapping[str, object]
) -> SessionOptions:
    """Change options of a session, and return all; raises NotFound, and BadInput for a value that
    is none."""
    changed = get(connection, session_id).options.changed(values)
    same = Session.id == session_id
    connection.execute(sa.update(Session).where(same).values(options=changed.json_values()))
    return changed


def set_fault(connection: sa.Connection, session_id: int, fault: str | None) -> None:
    """Store why a session is set aside; None: it is not."""
    row = Session
    changed = row.fault.is_not(None) if fault is None else sa.true()
    connection.execute(sa.update(row).where(row.id == session_id, changed).values(fault=fault))


def create(connection: sa.Connection, environment: Environment, reason: str) -> tuple[int, bool]:
    """Get or create the session for (environment, reason); returns its id and True if it is new."""
    if not reason.strip() or len(reason) > 255:
        raise BadInput("A session needs a reason of 1 to 255 characters.", hint="give it with -l")
    row: dict[str, Any] = {"key": environment.key, "machine_key": environment.machine_key}
    row |= {"flags": dict(environment.flags), "conditions": dict(environment.conditions)}
    row |= {n: getattr(environment, n) for n in (*_TEXTS, "num_cu")}
    for name in _TEXTS:
        limit = getattr(EnvironmentRow.__table__.c[name].type, "length", None)
        if limit and len(row[name]) > limit:
            raise BadInput(
                f"The environment's {name.replace('_', ' ')} has more than {limit} characters."
            )
    upsert(connection, EnvironmentRow, [row], key=("key",))
    environment_id = connection.execute(
        sa.select(EnvironmentRow.id).where(EnvironmentRow.key == environment.key)
    ).scalar_one()
    same = sa.and_(Session.environment_id == environment_id, Session.reason == reason)
    session_id: int | None = connection.execute(sa.select(Session.id).where(same)).scalar()
    if session_id is not None:
        return session_id, False
    row = {"environment_id": environment_id, "reason": reason, "created_at": utc_now()}
    upsert(connection, Session, [row], key=("environment_id", "reason"))
    return connection.execute(sa.select(Session.id).where(same)).scalar_one(), True


def get(connection: sa.Connection, session_id: int) -> SessionInfo:
    """The session; raises NotFound, whose hint lists the existing ids."""
    row = connection.execute(
        sa.select(Session.reason, Session.options, EnvironmentRow)
        .join(EnvironmentRow, EnvironmentRow.id == Session.environment_id)
        .where(Session.id == session_id)
    ).first()
    if row is None:
        raise known_sessions.missing(connection, session_id)
    options = SessionOptions.stored(row.options)
    return SessionInfo(session_id, row.reason, environment_of(row._asdict()), options)


def environment_of(row: Mapping[str, Any]) -> Environment:
    """Return the environment in the columns of `EnvironmentRow`."""
    from tuna.libraries.base import Environment

    facts = {name: row[name] for name in (*_TEXTS, "num_cu", "flags")}
    return Environment(**facts, conditions=row.get("conditions") or {})


def libraries(connection: sa.Connection, session_ids: Iterable[int]) -> dict[int, str]:
    """The name of each session's library."""
    rows = connection.execute(
        sa.select(Session.id, EnvironmentRow.library)
        .join(EnvironmentRow, EnvironmentRow.id == Session.environment_id)
        .where(Session.id.in_(list(session_ids)))
    )
    return {row.id: row.library for row in rows}


def namespace(connection: sa.Connection) -> str:
    """The namespace that separates this database's keys from others' in a shared Redis."""
    return connection.execute(sa.select(Installation.namespace)).scalar_one()


def artifact_keys(connection: sa.Connection, settings: Settings) -> Keys:
    """The keys that sign and verify artifacts: that of TUNA_ARTIFACTS_KEY, else this installation's
    with its former ones."""
    from tuna.artifacts.signatures import Keys

    if settings.artifacts_key is not None:
        return Keys.of_secret(settings.artifacts_key.get_secret_value())
    former = sa.select(FormerKey.public).order_by(FormerKey.superseded_at.desc(), FormerKey.public)
    secret = connection.execute(sa.select(Installation.secret)).scalar_one()
    return Keys.of_secret(secret, connection.execute(former).scalars())
