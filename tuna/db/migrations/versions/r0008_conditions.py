"""Conditions of measurement that a session chose, and the key of its machine without them.

Revision: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("environment", sa.Column("conditions", sa.JSON(), nullable=True))
    op.add_column(
        "environment", sa.Column("machine_key", sa.String(16), server_default="", nullable=False)
    )
    environment = sa.table("environment", sa.column("key"), sa.column("machine_key"))
    op.execute(sa.update(environment).values(machine_key=environment.c.key))
    op.create_index(
        op.f("ix_environment_machine_key"), "environment", ["machine_key"], unique=False
    )
