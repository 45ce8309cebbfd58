"""Times that other programs reported.

Revision: 0040
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import BigId, Double, LongText, UtcDateTime

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "reported",
        sa.Column("id", BigId, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("subject", LongText, nullable=False),
        sa.Column("config_key", sa.String(64), nullable=True),
        sa.Column("implementation", LongText, nullable=False),
        sa.Column("time_ms", Double, nullable=True),
        sa.Column("device", sa.String(128), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("who", sa.String(255), nullable=False),
        sa.Column("origin", sa.String(255), nullable=False),
        sa.Column("reported_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reported")),
        sa.UniqueConstraint("digest", name=op.f("uq_reported_digest")),
        **TABLE_OPTIONS,
    )
    op.create_index(op.f("ix_reported_config_key"), "reported", ["config_key"])
    op.create_index(op.f("ix_reported_source_id"), "reported", ["source", "id"])
