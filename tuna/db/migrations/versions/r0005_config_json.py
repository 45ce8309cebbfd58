"""The fields of a config as JSON, from which it is read; and the body of a config that has one.

Revision: 0005
"""

import sqlalchemy as sa
from alembic import op

from tuna.configs import parse_line
from tuna.db import bulk

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "config", sa.Column("json", sa.String(length=4096), nullable=False, server_default="")
    )
    if op.get_bind().dialect.name == "sqlite":
        # Alembic would copy the table to add a foreign key, and dropping the old one would take
        # along all that refers to it.
        op.execute(
            "ALTER TABLE config ADD COLUMN body VARCHAR(64) CONSTRAINT fk_config_body REFERENCES"
            " kernel (digest)"
        )
    else:
        op.add_column("config", sa.Column("body", sa.String(length=64), nullable=True))
        op.create_foreign_key(op.f("fk_config_body"), "config", "kernel", ["body"], ["digest"])
    op.create_index(op.f("ix_config_body"), "config", ["body"], unique=False)
    _fill_json()


def _fill_json() -> None:
    """The JSON of every config, from its driver command: until now each had one."""
    config = sa.table("config", *(sa.column(name) for name in ("id", "driver", "json")))
    update = (
        sa.update(config).where(config.c.id == sa.bindparam("of")).values(json=sa.bindparam("text"))
    )
    connection, last = op.get_bind(), 0
    while True:
        some = (
            sa.select(config.c.id, config.c.driver)
            .where(config.c.id > last)
            .order_by(config.c.id)
            .limit(bulk.IN_LIST)
        )
        rows = connection.execute(some).all()
        if not rows:
            return
        texts = [{"of": row.id, "text": parse_line(row.driver)[0].json_text()} for row in rows]
        connection.execute(update, texts)
        last = rows[-1].id
