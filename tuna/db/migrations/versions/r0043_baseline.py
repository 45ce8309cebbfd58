"""The schema of version 0.1.0 at commit e630f606, the oldest that is upgraded.

Nothing is upgraded to it: `tuna.db.database` makes a new database by the models.

Revision: 0043
"""

revision = "0043"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    raise NotImplementedError("no database is upgraded to the baseline")
