"""Flag for simulated results.

Revision: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "find_db", sa.Column("simulated", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
    op.create_index(
        op.f("ix_find_db_simulated_session_id"),
        "find_db",
        ["simulated", "session_id"],
        unique=False,
    )
