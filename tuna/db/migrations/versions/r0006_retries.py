"""When a job that failed is tried again, by whom it is not, and how often that was not charged.

Revision: 0006
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import UtcDateTime

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("ready_at", UtcDateTime(), nullable=True))
    op.add_column("job", sa.Column("avoid", sa.String(255), nullable=True))
    op.add_column("job", sa.Column("uncharged", sa.Integer(), server_default="0", nullable=False))
