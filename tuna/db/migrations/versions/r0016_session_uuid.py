"""The UUID of a session, the same in every database.

Revision: 0016
"""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("uuid", sa.String(36), server_default="", nullable=False))
    session = sa.table("session", sa.column("id"), sa.column("uuid"))
    connection = op.get_bind()
    for number in connection.execute(sa.select(session.c.id)).scalars().all():
        connection.execute(
            sa.update(session).where(session.c.id == number).values(uuid=str(uuid.uuid4()))
        )
    op.create_index(op.f("ix_session_uuid"), "session", ["uuid"], unique=True)
