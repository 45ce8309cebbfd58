"""Times that other programs reported are no longer kept: their table goes.

Revision: 0044
"""

import logging

import sqlalchemy as sa
from alembic import op

from tuna.common.messages import counted

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None

_log = logging.getLogger("tuna.db.migrations")


def upgrade() -> None:
    connection = op.get_bind()
    if not sa.inspect(connection).has_table("reported"):
        return  # MariaDB dropped it before an upgrade was cut off
    query = sa.select(sa.func.count()).select_from(sa.table("reported"))
    if times := connection.execute(query).scalar_one():
        _log.warning(
            "Dropped: %s that other programs reported, which Tuna neither measured nor used; the"
            " files that they came from have them",
            counted(times, "time"),
        )
    op.drop_table("reported")
