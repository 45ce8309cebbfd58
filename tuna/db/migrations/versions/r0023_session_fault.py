"""Why a session is set aside: the error of its library's own code.

Revision: 0023
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import LongText

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("session", sa.Column("fault", LongText, nullable=True))
