"""Which artifacts of the store jobs need that have not ended.

Revision: 0014
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import BigId

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job_artifact",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("job_id", BigId, autoincrement=False, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_job_artifact_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("digest", "job_id", name=op.f("pk_job_artifact")),
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mysql_collate="utf8mb4_bin",
    )
    op.create_index(op.f("ix_job_artifact_job_id"), "job_artifact", ["job_id"], unique=False)
    # Jobs that end with a CPU step are `compiled`, too; most have that step alone.
    op.execute(
        "INSERT INTO job_artifact (digest, job_id) SELECT DISTINCT trial.artifact, job.id FROM job "
        "JOIN trial ON trial.job_id = job.id WHERE trial.artifact IS NOT NULL AND ("
        "job.state IN ('searching', 'compile_queued', 'compiling', 'eval_queued', 'evaluating') "
        "OR (job.state = 'compiled' AND job.step <> job.steps))"
    )
