"""Caches that programs share: entries, what packs hold, and tokens of a space.

Revision: 0041
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import BigId, UtcDateTime

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("token", sa.Column("space", sa.String(63), nullable=False, server_default=""))
    op.add_column(
        "token", sa.Column("space_bytes", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.create_table(
        "cache_entry",
        sa.Column("id", BigId, nullable=False),
        sa.Column("space", sa.String(63), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("file", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("token_id", sa.String(16), nullable=False),
        sa.Column("refused", sa.Integer(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cache_entry")),
        sa.UniqueConstraint("space", "key", "file", name=op.f("uq_cache_entry_space_key_file")),
        sa.ForeignKeyConstraint(["token_id"], ["token.id"], name=op.f("fk_cache_entry_token_id")),
        **TABLE_OPTIONS,
    )
    op.create_index(op.f("ix_cache_entry_digest"), "cache_entry", ["digest"])
    op.create_index(op.f("ix_cache_entry_token_id"), "cache_entry", ["token_id"])
    op.create_index(op.f("ix_cache_entry_space_used_at"), "cache_entry", ["space", "used_at"])
    op.create_table(
        "cache_hold",
        sa.Column("space", sa.String(63), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("pack", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("space", "key", "pack", name=op.f("pk_cache_hold")),
        **TABLE_OPTIONS,
    )
