"""Changes that visitors of the service made: who, when and what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuna.api.rows import ActionRow, RowPage, TokenRow


@dataclass(frozen=True)
class Action:
    """One change that was asked for, with what came of it."""

    id: int
    at: datetime
    token: str  #: id
    label: str  #: whom the token was made for
    what: str
    subject: str
    details: Mapping[str, Any]


_COLUMNS = (
    *(ActionRow.id, ActionRow.at, ActionRow.token_id.label("token"), TokenRow.label),
    *(ActionRow.what, ActionRow.subject, ActionRow.details),
)


def add(
    connection: sa.Connection, token_id: str, what: str, subject: str, details: Mapping[str, Any]
) -> int:
    """Store what is asked for, before it is done; return its id."""
    row = {"token_id": token_id, "what": what, "subject": subject[:255]}
    insert = sa.insert(ActionRow).values(**row, details=json.dumps(dict(details)))
    (action_id,) = connection.execute(insert).inserted_primary_key or (0,)
    return int(action_id)


def set_details(connection: sa.Connection, action_id: int, details: Mapping[str, Any]) -> None:
    """Store what came of it."""
    update = sa.update(ActionRow).where(ActionRow.id == action_id)
    connection.execute(update.values(details=json.dumps(dict(details))))


def latest(
    connection: sa.Connection, limit: int, before: int | None = None, subject: str | None = None
) -> RowPage[Action]:
    """Return actions, the newest first; those with a smaller id than `before`, about `subject`."""
    query = (
        sa.select(*_COLUMNS)
        .join(TokenRow, TokenRow.id == ActionRow.token_id)
        .order_by(ActionRow.id.desc())
        .limit(limit + 1)
    )
    if before is not None:
        query = query.where(ActionRow.id < before)
    if subject is not None:
        query = query.where(ActionRow.subject == subject)
    actions = [
        Action(**{**row._mapping, "details": json.loads(row.details)})
        for row in connection.execute(query)
    ]
    return RowPage.of(actions, limit)
