"""The options of a session in one column, so that a new one needs no revision.

Revision: 0032
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import UtcDateTime

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

_session = sa.table(
    "session",
    sa.column("id", sa.Integer()),
    sa.column("priority", sa.Integer()),
    sa.column("deadline", UtcDateTime()),
    sa.column("options", sa.JSON()),
)


def upgrade() -> None:
    op.add_column("session", sa.Column("options", sa.JSON(), nullable=True))
    connection = op.get_bind()
    columns = {column["name"] for column in sa.inspect(connection).get_columns("session")}
    if "priority" in columns:  # else an upgrade that was cut off has moved them
        for row in connection.execute(sa.select(_session)).all():
            options = {"priority": row.priority} if row.priority else {}
            if row.deadline is not None:
                options["deadline"] = row.deadline.isoformat()
            if options:
                connection.execute(
                    sa.update(_session).where(_session.c.id == row.id).values(options=options)
                )
    # no batch: SQLite would make the table anew, and delete what refers to it
    op.drop_column("session", "priority")
    op.drop_column("session", "deadline")
