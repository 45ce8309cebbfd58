"""Searches found by index, and trials that were broken off.

Revision: 0027
"""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_job_search", "job", ["session_id", "steps", "round", "stopped"], unique=False
    )
    op.add_column(
        "trial", sa.Column("ended_early", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
