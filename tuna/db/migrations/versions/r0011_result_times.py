"""Results of a time are found by an index.

Revision: 0011
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(op.f("ix_find_db_updated_at"), "find_db", ["updated_at"], unique=False)
    op.create_index(
        op.f("ix_golden_entry_measured_at"), "golden_entry", ["measured_at"], unique=False
    )
