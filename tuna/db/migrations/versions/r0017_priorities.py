"""Priorities of sessions.

Revision: 0017
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "session", sa.Column("priority", sa.Integer(), server_default="0", nullable=False)
    )
