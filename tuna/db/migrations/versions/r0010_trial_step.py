"""Which step a trial's outcome is from, which tells a failed build from a failed run.

Revision: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trial", sa.Column("step", sa.String(64), server_default="", nullable=False))
    # Of a job that failed, it is the step that the job is at; of the others it is not used.
    op.execute(
        "UPDATE trial SET step = (SELECT job.step FROM job WHERE job.id = trial.job_id) "
        "WHERE cause IS NOT NULL AND artifact IS NOT NULL"
    )
