"""Index for failed attempts by cause, so that successful ones are not read.

Revision: 0004
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        op.f("ix_step_result_cause_job_id"), "step_result", ["cause", "job_id"], unique=False
    )
