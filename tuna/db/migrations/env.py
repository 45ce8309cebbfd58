"""Alembic's environment script: runs the revisions on the connection of
`tuna.db.database.upgrade`."""

from alembic import context
from alembic.ddl.mysql import MySQLImpl
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import ExecutableDDLElement

from tuna.db.models import Base

#: A table, column, index or foreign key is there already (1050, 1060, 1061, 1826), or has been
#: dropped already (1051, 1091).
_DONE = frozenset({1050, 1060, 1061, 1826, 1051, 1091})
#: MariaDB's error for a foreign key that is there already: "cannot create table", because of a
#: duplicate key.
_FOREIGN_KEY_DONE = (1005, "errno: 121")


class Repeatable(MySQLImpl):
    """Skips DDL that was done before the upgrade was cut off, since MySQL and MariaDB commit each
    such statement by itself.

    A revision that moves rows has to write them before it drops what they are read from.
    """

    __dialect__ = "mysql"

    def _exec(self, construct, *args, **options):
        try:
            return super()._exec(construct, *args, **options)
        except DBAPIError as error:
            if not isinstance(construct, ExecutableDDLElement) or not _is_done(
                *error.orig.args[:2]
            ):
                raise
            return None


def _is_done(code, text):
    return code in _DONE or (code == _FOREIGN_KEY_DONE[0] and _FOREIGN_KEY_DONE[1] in text)


connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
connection.commit()
