"""Requests of visitors of the service.

Revision: 0039
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import LongText, UtcDateTime

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "request",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("token_id", sa.String(16), nullable=False),
        sa.Column("client_key", sa.String(128), nullable=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("wanted", LongText, nullable=False),
        sa.Column("upload", sa.String(64), nullable=False),
        sa.Column("upload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("session_id", sa.Integer(), nullable=True),
        sa.Column("tag", sa.String(128), nullable=False, server_default=""),
        sa.Column("message", LongText, nullable=False),
        sa.Column("progress", LongText, nullable=False),
        sa.Column("files", LongText, nullable=False),
        sa.Column("files_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.Column("tuning_at", UtcDateTime(), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_request")),
        sa.UniqueConstraint("token_id", "client_key", name=op.f("uq_request_token_id_client_key")),
        sa.ForeignKeyConstraint(["token_id"], ["token.id"], name=op.f("fk_request_token_id")),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["session.id"],
            name=op.f("fk_request_session_id"),
            ondelete="SET NULL",
        ),
        **TABLE_OPTIONS,
    )
    for name in ("token_id", "session_id", "ended_at"):
        op.create_index(op.f(f"ix_request_{name}"), "request", [name])
