"""Workers that joined by token speak to a gateway: a secret for its key; who had joined by a Redis
user is revoked, and joins again with a new token.

Revision: 0034
"""

import json
import logging
import secrets

import sqlalchemy as sa
from alembic import op

from tuna.db.types import UtcDateTime, utc_now

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

_log = logging.getLogger("tuna.db.migrations")


def upgrade() -> None:
    connection = op.get_bind()
    secret = sa.Column("gateway_secret", sa.String(64), nullable=False, server_default="")
    op.add_column("installation", secret)
    installation = sa.table("installation", sa.column("gateway_secret"))
    connection.execute(sa.update(installation).values(gateway_secret=secrets.token_hex(32)))

    worker = sa.table("worker", *map(sa.column, ("state", "name", "seen_at", "revoked_at")))
    joined = worker.c.state != "revoked"
    names = sorted(connection.execute(sa.select(worker.c.name).where(joined)).scalars())
    if names:
        _log.warning(
            "%d workers that had joined by token are revoked: each joins a gateway with a new"
            " token (docs/operations.md): %s",
            len(names),
            ", ".join(names),
        )
    connection.execute(
        sa.update(worker).where(joined).values(state="revoked", revoked_at=worker.c.seen_at)
    )
    token = sa.table("token", sa.column("used_at"), sa.column("revoked_at", UtcDateTime()))
    unused = sa.and_(token.c.used_at.is_(None), token.c.revoked_at.is_(None))
    connection.execute(sa.update(token).where(unused).values(revoked_at=utc_now()))

    for table in ("token", "worker"):
        op.drop_index(op.f(f"ix_{table}_cleared_at"), table)
    with op.batch_alter_table("token") as changed:
        changed.drop_column("cleared_at")
    with op.batch_alter_table("worker") as changed:
        changed.drop_column("cleared_at")
        changed.drop_column("rights")
        changed.drop_column("password")
        changed.add_column(sa.Column("digest", sa.String(64), nullable=False, server_default=""))
    _rename_in_letters(connection)


def _rename_in_letters(connection: sa.Connection) -> None:
    """Reports that wait for a library name the worker that joined `remote`."""
    letter = sa.table(
        "dead_letter", sa.column("id"), sa.column("library"), sa.column("body", sa.LargeBinary())
    )
    waiting = sa.select(letter.c.id, letter.c.body).where(letter.c.library != "")
    for row in connection.execute(waiting).all():
        report = json.loads(row.body)
        if "member" in report:
            report["remote"] = report.pop("member")
            connection.execute(
                sa.update(letter)
                .where(letter.c.id == row.id)
                .values(body=json.dumps(report).encode())
            )
