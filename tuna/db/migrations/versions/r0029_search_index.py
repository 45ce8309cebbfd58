"""Rounds of searches counted in an index alone.

Revision: 0029
"""

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_job_search", table_name="job")
    op.create_index(
        "ix_job_search", "job", ["session_id", "steps", "round", "part", "stopped"], unique=False
    )
