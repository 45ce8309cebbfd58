"""Commands that repeat attempts are made of the jobs when they are printed; they are stored no
more.

Revision: 0022
"""

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("step_result") as table:
        table.drop_column("reproduce")
