"""Times of the parts of a run, such as a model's functions.

Revision: 0037
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import LongText

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trial", sa.Column("parts", LongText, nullable=True))
