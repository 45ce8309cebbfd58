"""Membership: join tokens, workers, the artifact signing key.

Revision: 0003
"""

import secrets

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS as MYSQL
from tuna.db.types import LongText, UtcDateTime

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "installation", sa.Column("secret", sa.String(length=64), nullable=False, server_default="")
    )
    installation = sa.table("installation", sa.column("secret"))
    op.get_bind().execute(sa.update(installation).values(secret=secrets.token_hex(32)))
    op.create_table(
        "token",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.Column("used_at", UtcDateTime(), nullable=True),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token")),
        **MYSQL,
    )
    op.create_table(
        "worker",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("token_id", sa.String(length=16), nullable=False),
        sa.Column("password", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("device", sa.String(length=255), nullable=False),
        sa.Column("environment", LongText, nullable=False),
        sa.Column("toolchain", LongText, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("joined_at", UtcDateTime(), nullable=False),
        sa.Column("seen_at", UtcDateTime(), nullable=False),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(["token_id"], ["token.id"], name=op.f("fk_worker_token_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker")),
        sa.UniqueConstraint("name", name=op.f("uq_worker_name")),
        **MYSQL,
    )
    op.create_index(op.f("ix_worker_token_id"), "worker", ["token_id"], unique=False)
