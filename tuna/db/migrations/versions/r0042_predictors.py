"""Predictors that were trained from trials.

Revision: 0042
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import LongText, UtcDateTime

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "predictor",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("library", sa.String(64), nullable=False, quote=True),
        sa.Column("arch", sa.String(64), nullable=False),
        sa.Column("since", UtcDateTime(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("library_version", sa.String(255), nullable=False),
        sa.Column("seen", sa.String(64), nullable=False),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.Column("layers", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(64), nullable=False),
        sa.Column("tables", sa.String(64), nullable=False),
        sa.Column("evaluation", LongText, nullable=False),
        sa.Column("in_answers", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("in_searches", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_predictor")),
        sa.ForeignKeyConstraint(["model"], ["kernel.digest"], name=op.f("fk_predictor_model")),
        sa.ForeignKeyConstraint(["tables"], ["kernel.digest"], name=op.f("fk_predictor_tables")),
        **TABLE_OPTIONS,
    )
    for name in ("model", "tables"):
        op.create_index(op.f(f"ix_predictor_{name}"), "predictor", [name])
