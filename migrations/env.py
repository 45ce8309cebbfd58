"""Alembic's environment script: runs the revisions on the connection of `tuna.db.schema.upgrade`."""

from alembic import context

from tuna.db.models import Base

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
