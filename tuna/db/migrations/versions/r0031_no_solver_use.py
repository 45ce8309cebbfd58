"""Layers of a session that no solver takes, with the reason.

Revision: 0031
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models.base import TABLE_OPTIONS

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "no_solver",
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(255), nullable=False),
        sa.Column("loaded", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("session_id", "config_id", name=op.f("pk_no_solver")),
        sa.ForeignKeyConstraint(
            ["session_id"], ["session.id"], name=op.f("fk_no_solver_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["config_id"], ["config.id"], name=op.f("fk_no_solver_config_id"), ondelete="CASCADE"
        ),
        **TABLE_OPTIONS,
    )
    op.create_index(op.f("ix_no_solver_config_id"), "no_solver", ["config_id"])
