"""Results of a solver or a session in the order of their configs, found in an index alone.

Revision: 0043
"""

from alembic import op

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None

_OF_SOLVER = ("solver_id", "session_id", "config_id")
_OF_SESSION = ("session_id", "config_id")


def upgrade() -> None:
    for table, columns in (
        ("find_db", _OF_SOLVER),
        ("golden_entry", _OF_SOLVER),
        ("golden_entry", _OF_SESSION),
    ):
        # first the new one: MariaDB drops no index that a foreign key needs
        op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, columns)
        op.drop_index(op.f(f"ix_{table}_{columns[0]}"), table)
