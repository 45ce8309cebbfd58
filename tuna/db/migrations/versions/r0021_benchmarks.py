"""Times of whole models on a board or this machine.

Revision: 0021
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import Double, LongText, UtcDateTime

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "benchmark",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run", sa.String(36), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("model_id", sa.Integer(), nullable=True),
        sa.Column("label", sa.String(255), nullable=False),
        sa.Column("artifact", sa.String(64), nullable=False),
        sa.Column("function", sa.String(128), nullable=False),
        sa.Column("tracker", sa.String(255), nullable=False),
        sa.Column("device", sa.String(255), nullable=False),
        sa.Column("extents", sa.JSON(), nullable=False),
        sa.Column("inputs", LongText, nullable=False),
        sa.Column("time_ms", Double, nullable=False),
        sa.Column("low_ms", Double, nullable=False),
        sa.Column("high_ms", Double, nullable=False),
        sa.Column("repeats", sa.Integer(), nullable=False),
        sa.Column("noisy", sa.Boolean(), nullable=False),
        sa.Column("error", Double, nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["model.id"], name=op.f("fk_benchmark_model_id"), ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_benchmark")),
        sa.UniqueConstraint("run", "number", name=op.f("uq_benchmark_run_number")),
        **TABLE_OPTIONS,
    )
    op.create_index(op.f("ix_benchmark_model_id"), "benchmark", ["model_id"], unique=False)
