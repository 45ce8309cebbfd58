"""MIOpen: batch norm, models and frameworks, problem keys, imported databases, several kernels per
result, golden.

Revision: 0002
"""

import sqlalchemy as sa
from alembic import op

from tuna.configs import ConvConfig, parse_line
from tuna.db.models import TABLE_OPTIONS as MYSQL
from tuna.db.types import BigId, LongText, UtcDateTime
from tuna.libraries.miopen.problem import text_of

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("config", sa.Column("problem_key", sa.String(length=255), nullable=True))
    op.create_index(op.f("ix_config_problem_key"), "config", ["problem_key"], unique=False)
    _fill_problem_keys()
    op.add_column(
        "config_tag",
        sa.Column("recurrent", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    op.add_column("solver", sa.Column("number", sa.Integer(), nullable=True))
    op.create_table(
        "framework",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_framework")),
        sa.UniqueConstraint("name", "version", name=op.f("uq_framework_name_version")),
        **MYSQL,
    )
    op.create_table(
        "golden",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("library", sa.String(length=64), nullable=False, quote=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("promoted_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_golden")),
        sa.UniqueConstraint("library", "version", name=op.f("uq_golden_library_version")),
        **MYSQL,
    )
    op.create_table(
        "model",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("version", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model")),
        sa.UniqueConstraint("name", "version", name=op.f("uq_model_name_version")),
        **MYSQL,
    )
    op.create_table(
        "batch_norm_config",
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("spatial_dim", sa.Integer(), nullable=False),
        sa.Column("batchsize", sa.Integer(), nullable=False),
        sa.Column("in_channels", sa.Integer(), nullable=False),
        sa.Column("in_d", sa.Integer(), nullable=False),
        sa.Column("in_h", sa.Integer(), nullable=False),
        sa.Column("in_w", sa.Integer(), nullable=False),
        sa.Column("mode", sa.Integer(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("save", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("beta", sa.Double(), nullable=False),
        sa.Column("direction", sa.String(length=1), nullable=False),
        sa.Column("layout", sa.String(length=8), nullable=False),
        sa.Column("data_type", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["config_id"],
            ["config.id"],
            name=op.f("fk_batch_norm_config_config_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("config_id", name=op.f("pk_batch_norm_config")),
        **MYSQL,
    )
    op.create_table(
        "model_config",
        sa.Column("model_id", sa.Integer(), nullable=False),
        sa.Column("framework_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("gpu_count", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["config_id"], ["config.id"], name=op.f("fk_model_config_config_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["framework_id"], ["framework.id"], name=op.f("fk_model_config_framework_id")
        ),
        sa.ForeignKeyConstraint(
            ["model_id"], ["model.id"], name=op.f("fk_model_config_model_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(
            "model_id", "framework_id", "config_id", "gpu_count", name=op.f("pk_model_config")
        ),
        **MYSQL,
    )
    op.create_index(op.f("ix_model_config_config_id"), "model_config", ["config_id"], unique=False)
    op.create_index(
        op.f("ix_model_config_framework_id"), "model_config", ["framework_id"], unique=False
    )

    op.create_table(
        "golden_entry",
        sa.Column("id", BigId, nullable=False),
        sa.Column("golden_id", sa.Integer(), nullable=False),
        sa.Column("arch", sa.String(length=128), nullable=False),
        sa.Column("num_cu", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("solver_id", sa.Integer(), nullable=False),
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("time_ms", sa.Double(), nullable=False),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=False),
        sa.Column("params", LongText, nullable=False),
        sa.Column("algorithm", sa.String(length=64), nullable=False),
        sa.Column("problem_key", sa.String(length=255), nullable=True),
        sa.Column("workload", sa.String(length=64), nullable=True),
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("device", sa.String(length=255), nullable=False),
        sa.Column("source", sa.String(length=255), nullable=True),
        sa.Column("measured_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(
            ["config_id"], ["config.id"], name=op.f("fk_golden_entry_config_id")
        ),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["environment.id"], name=op.f("fk_golden_entry_environment_id")
        ),
        sa.ForeignKeyConstraint(
            ["golden_id"], ["golden.id"], name=op.f("fk_golden_entry_golden_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["session_id"], ["session.id"], name=op.f("fk_golden_entry_session_id")
        ),
        sa.ForeignKeyConstraint(
            ["solver_id"], ["solver.id"], name=op.f("fk_golden_entry_solver_id")
        ),
        sa.ForeignKeyConstraint(
            ["workload"], ["kernel.digest"], name=op.f("fk_golden_entry_workload")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_golden_entry")),
        sa.UniqueConstraint(
            "golden_id",
            "arch",
            "num_cu",
            "config_id",
            "solver_id",
            name=op.f("uq_golden_entry_golden_id_arch_num_cu_config_id_solver_id"),
        ),
        **MYSQL,
    )
    op.create_index(op.f("ix_golden_entry_config_id"), "golden_entry", ["config_id"], unique=False)
    op.create_index(
        op.f("ix_golden_entry_environment_id"), "golden_entry", ["environment_id"], unique=False
    )
    op.create_index(
        op.f("ix_golden_entry_session_id"), "golden_entry", ["session_id"], unique=False
    )
    op.create_index(op.f("ix_golden_entry_solver_id"), "golden_entry", ["solver_id"], unique=False)
    op.create_index(op.f("ix_golden_entry_workload"), "golden_entry", ["workload"], unique=False)

    op.create_table(
        "golden_kernel",
        sa.Column("golden_entry_id", BigId, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=1024), nullable=False),
        sa.Column("args", LongText, nullable=False),
        sa.ForeignKeyConstraint(
            ["golden_entry_id"],
            ["golden_entry.id"],
            name=op.f("fk_golden_kernel_golden_entry_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["kernel"], ["kernel.digest"], name=op.f("fk_golden_kernel_kernel")
        ),
        sa.PrimaryKeyConstraint("golden_entry_id", "number", name=op.f("pk_golden_kernel")),
        **MYSQL,
    )
    op.create_index(op.f("ix_golden_kernel_kernel"), "golden_kernel", ["kernel"], unique=False)

    op.create_table(
        "find_db_kernel",
        sa.Column("find_db_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=1024), nullable=False),
        sa.Column("args", LongText, nullable=False),
        sa.ForeignKeyConstraint(
            ["find_db_id"],
            ["find_db.id"],
            name=op.f("fk_find_db_kernel_find_db_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["kernel"], ["kernel.digest"], name=op.f("fk_find_db_kernel_kernel")
        ),
        sa.PrimaryKeyConstraint("find_db_id", "number", name=op.f("pk_find_db_kernel")),
        **MYSQL,
    )
    op.create_index(op.f("ix_find_db_kernel_kernel"), "find_db_kernel", ["kernel"], unique=False)
    _move_kernels()
    with op.batch_alter_table("find_db") as table:
        table.add_column(
            sa.Column("algorithm", sa.String(length=64), nullable=False, server_default="")
        )
        table.add_column(sa.Column("problem_key", sa.String(length=255), nullable=True))
        table.add_column(sa.Column("source", sa.String(length=255), nullable=True))
        table.alter_column("job_id", existing_type=BigId, nullable=True)
        table.alter_column("time_ms", existing_type=sa.Double(), nullable=True)
        table.alter_column("trial_number", existing_type=sa.Integer(), nullable=True)
        table.drop_constraint(op.f("fk_find_db_kernel"), type_="foreignkey")
        table.drop_index(op.f("ix_find_db_kernel"))
        table.drop_column("kernel")


def _move_kernels() -> None:
    """Store the kernel of each result in the table `kernel`, before the column is dropped."""
    connection = op.get_bind()
    if "kernel" in (column["name"] for column in sa.inspect(connection).get_columns("find_db")):
        op.execute("DELETE FROM find_db_kernel")  # of an upgrade that was cut off
        op.execute(
            "INSERT INTO find_db_kernel (find_db_id, number, kernel, name, args) "
            "SELECT id, 0, kernel, '', '' FROM find_db WHERE kernel IS NOT NULL"
        )


def _fill_problem_keys() -> None:
    """Store MIOpen's problem key of every convolution that has one."""
    config = sa.table(
        "config", *(sa.column(name) for name in ("id", "kind", "driver", "problem_key"))
    )
    connection = op.get_bind()
    rows = connection.execute(
        sa.select(config.c.id, config.c.driver).where(config.c.kind == ConvConfig.kind)
    ).all()
    keys = [{"of": row.id, "text": text_of(parse_line(row.driver)[0])} for row in rows]
    update = (
        sa.update(config)
        .where(config.c.id == sa.bindparam("of"))
        .values(problem_key=sa.bindparam("text"))
    )
    if keys:
        connection.execute(update, keys)
