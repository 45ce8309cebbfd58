"""The round of a search from which on it learns from others.

Revision: 0036
"""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """A choice until now was that of all rounds."""
    op.add_column(
        "warm_start", sa.Column("round", sa.Integer(), nullable=False, server_default="0")
    )
