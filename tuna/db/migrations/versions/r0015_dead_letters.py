"""Reports that could not be drained, with their bytes and the reason.

Revision: 0015
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import BigId, LongBlob, LongText, UtcDateTime

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "dead_letter",
        sa.Column("id", BigId, nullable=False),
        sa.Column("library", sa.String(64), nullable=False, quote=True),
        sa.Column("session_id", sa.Integer(), nullable=True),
        sa.Column("fault", LongText, nullable=False),
        sa.Column("body", LongBlob, nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["session.id"],
            name=op.f("fk_dead_letter_session_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dead_letter")),
        **TABLE_OPTIONS,
    )
    op.create_index(
        op.f("ix_dead_letter_library_session_id"),
        "dead_letter",
        ["library", "session_id"],
        unique=False,
    )
    op.create_index(op.f("ix_dead_letter_session_id"), "dead_letter", ["session_id"], unique=False)
