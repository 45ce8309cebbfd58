"""The quality of a time: its interval and clock, whether the device was quiet, how its peak was
found.

Revision: 0009
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import Double

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("low_ms", "high_ms"):
        op.add_column("trial", sa.Column(name, Double, nullable=True))
    for table in ("trial", "find_db", "golden_entry"):
        op.add_column(table, sa.Column("clock", sa.String(8), server_default="", nullable=False))
    for table in ("find_db", "golden_entry"):
        op.add_column(
            table, sa.Column("noisy", sa.Boolean(), server_default=sa.false(), nullable=False)
        )
    op.create_index(
        op.f("ix_find_db_noisy_session_id"), "find_db", ["noisy", "session_id"], unique=False
    )
    op.add_column("step_result", sa.Column("drift", Double, nullable=True))
    op.add_column(
        "device", sa.Column("peak_source", sa.String(8), server_default="", nullable=False)
    )
