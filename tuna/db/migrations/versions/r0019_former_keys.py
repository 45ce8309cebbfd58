"""Former keys of artifacts; a new secret, since members knew the one that signed until now.

Revision: 0019
"""

import secrets

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS
from tuna.db.types import UtcDateTime

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "former_key",
        sa.Column("public", sa.String(64), nullable=False),
        sa.Column("superseded_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("public", name=op.f("pk_former_key")),
        **TABLE_OPTIONS,
    )
    installation = sa.table("installation", sa.column("secret"))
    op.get_bind().execute(sa.update(installation).values(secret=secrets.token_hex(32)))
