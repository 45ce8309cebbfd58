"""Who promoted a golden version, with what note.

Revision: 0038
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import LongText

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    by = sa.Column("promoted_by", sa.String(255), nullable=False, server_default="")
    op.add_column("golden", by)
    op.add_column("golden", sa.Column("note", LongText, nullable=True))
