"""The number of processes of a member, as it said when it joined.

Revision: 0018
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "worker", sa.Column("processes", sa.Integer(), server_default="1", nullable=False)
    )
