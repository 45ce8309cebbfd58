"""INT8 convolutions under the key that MIOpen gives them: its fin names one data type, not those of
all three tensors.

Revision: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_BEFORE, _AFTER = "-INT8INT8INT32-", "-INT8-"


def upgrade() -> None:
    config = sa.table("config", sa.column("kind", sa.String), sa.column("problem_key", sa.String))
    op.execute(
        config.update()
        .where(config.c.kind == "convolution", config.c.problem_key.contains(_BEFORE))
        .values(problem_key=sa.func.replace(config.c.problem_key, _BEFORE, _AFTER))
    )
