"""Which finals a result's time is from.

Revision: 0013
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import BigId

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        # Alembic would copy the table to add a foreign key, and dropping the old one would take
        # along all that refers to it.
        op.execute(
            "ALTER TABLE find_db ADD COLUMN final_job_id INTEGER CONSTRAINT fk_find_db_final_job_id"
            " REFERENCES job (id)"
        )
    else:
        op.add_column("find_db", sa.Column("final_job_id", BigId, nullable=True))
        op.create_foreign_key(
            op.f("fk_find_db_final_job_id"), "find_db", "job", ["final_job_id"], ["id"]
        )
    op.create_index(op.f("ix_find_db_final_job_id"), "find_db", ["final_job_id"], unique=False)
