"""When a session should have ended.

Revision: 0025
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import UtcDateTime

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("deadline", UtcDateTime(), nullable=True))
