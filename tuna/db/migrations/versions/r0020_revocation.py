"""Rights that are still to be taken away from former members and spent tokens, and which rights a
member's Redis user was given.

Revision: 0020
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.types import UtcDateTime

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("token", "worker"):
        op.add_column(table, sa.Column("cleared_at", UtcDateTime(), nullable=True))
        op.create_index(op.f(f"ix_{table}_cleared_at"), table, ["cleared_at"])
    op.add_column("worker", sa.Column("rights", sa.String(16), server_default="", nullable=False))
    worker = sa.table("worker", *map(sa.column, ("state", "seen_at", "revoked_at")))
    former = sa.and_(worker.c.state.in_(["gone", "revoked"]), worker.c.revoked_at.is_(None))
    op.execute(sa.update(worker).where(former).values(revoked_at=worker.c.seen_at))
