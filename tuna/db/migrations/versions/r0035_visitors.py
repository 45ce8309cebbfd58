"""Tokens of visitors of the service, and what they changed.

Revision: 0035
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import BigId, LongText, UtcDateTime

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    label = sa.Column("label", sa.String(128), nullable=False, server_default="")
    op.add_column("token", label)
    op.create_table(
        "action",
        sa.Column("id", BigId, nullable=False),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("token_id", sa.String(16), nullable=False),
        sa.Column("what", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(255), nullable=False),
        sa.Column("details", LongText, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_action")),
        sa.ForeignKeyConstraint(["token_id"], ["token.id"], name=op.f("fk_action_token_id")),
        **TABLE_OPTIONS,
    )
    op.create_index(op.f("ix_action_token_id"), "action", ["token_id"])
