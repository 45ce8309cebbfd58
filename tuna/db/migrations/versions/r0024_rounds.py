"""Rounds of searches: rows of `job` that differ by their number.

Revision: 0024
"""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_BEFORE = ("session_id", "config_id", "solver_id", "steps")


def upgrade() -> None:
    # SQLite copies the table, for which `schema.upgrade` turned foreign keys off: dropping the old
    # one takes nothing along.
    with op.batch_alter_table("job") as job:
        job.add_column(sa.Column("round", sa.Integer(), server_default="0", nullable=False))
        job.add_column(sa.Column("stopped", sa.String(255), nullable=True))
        job.create_unique_constraint(op.f(f"uq_job_{'_'.join(_BEFORE)}_round"), [*_BEFORE, "round"])
        job.drop_constraint(op.f(f"uq_job_{'_'.join(_BEFORE)}"), type_="unique")
