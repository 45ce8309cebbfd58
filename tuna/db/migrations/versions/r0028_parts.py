"""Parts of rounds, which are measured on several devices at a time.

Revision: 0028
"""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_BEFORE = ("session_id", "config_id", "solver_id", "steps", "round")


def upgrade() -> None:
    # As in 0024: SQLite copies the table.
    with op.batch_alter_table("job") as job:
        job.add_column(sa.Column("part", sa.Integer(), server_default="0", nullable=False))
        job.create_unique_constraint(op.f(f"uq_job_{'_'.join(_BEFORE)}_part"), [*_BEFORE, "part"])
        job.drop_constraint(op.f(f"uq_job_{'_'.join(_BEFORE)}"), type_="unique")
