"""The times in which sessions were served, so that pauses are no part of the time of a search.

Revision: 0030
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models.base import TABLE_OPTIONS
from tuna.db.types import UtcDateTime

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "served_time",
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("began_at", UtcDateTime(), nullable=False),
        sa.Column("ended_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", "began_at", name=op.f("pk_served_time")),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["session.id"],
            name=op.f("fk_served_time_session_id"),
            ondelete="CASCADE",
        ),
        **TABLE_OPTIONS,
    )
