"""Times of the parts of a run, such as a model's functions.

Revision: 0036
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import LongText

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trial", sa.Column("parts", LongText, nullable=True))
