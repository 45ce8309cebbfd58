"""The earlier searches that a search learns from.

Revision: 0026
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models.base import TABLE_OPTIONS
from tuna.db.types import BigId

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "search_sibling",
        sa.Column("job_id", BigId, nullable=False, autoincrement=False),
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("noisy", sa.Boolean(), nullable=False),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.Column("label", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_search_sibling")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_search_sibling_job_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["digest"], ["kernel.digest"], name=op.f("fk_search_sibling_digest")
        ),
        **TABLE_OPTIONS,
    )
    op.create_index(op.f("ix_search_sibling_digest"), "search_sibling", ["digest"])
