"""Initial schema.

Revision: 0001
"""

import uuid

import sqlalchemy as sa
from alembic import op

from tuna.db.models import TABLE_OPTIONS as MYSQL
from tuna.db.types import BigId, LongBlob, LongText, UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "config",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("driver", sa.String(length=2048), nullable=False),
        sa.Column("label", sa.String(length=255), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_config")),
        sa.UniqueConstraint("key", name=op.f("uq_config_key")),
        **MYSQL,
    )
    op.create_table(
        "environment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=16), nullable=False),
        sa.Column("library", sa.String(length=64), nullable=False, quote=True),
        sa.Column("library_version", sa.String(length=128), nullable=False),
        sa.Column("arch", sa.String(length=128), nullable=False),
        sa.Column("num_cu", sa.Integer(), nullable=False),
        sa.Column("toolchain", sa.String(length=128), nullable=False),
        sa.Column("device", sa.String(length=255), nullable=False),
        sa.Column("target", LongText, nullable=False),
        sa.Column("flags", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environment")),
        sa.UniqueConstraint("key", name=op.f("uq_environment_key")),
        **MYSQL,
    )
    installation = op.create_table(
        "installation",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("namespace", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_installation")),
        **MYSQL,
    )
    op.create_table(
        "kernel",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("blob", LongBlob, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_kernel")),
        **MYSQL,
    )
    op.create_table(
        "solver",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("library", sa.String(length=64), nullable=False, quote=True),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("kinds", sa.String(length=255), nullable=False),
        sa.Column("algorithm", sa.String(length=64), nullable=False),
        sa.Column("tunable", sa.Boolean(), nullable=False),
        sa.Column("dynamic", sa.Boolean(), nullable=False),
        sa.Column("valid", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_solver")),
        sa.UniqueConstraint("library", "name", name=op.f("uq_solver_library_name")),
        **MYSQL,
    )
    op.create_table(
        "config_tag",
        sa.Column("tag", sa.String(length=128), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["config_id"], ["config.id"], name=op.f("fk_config_tag_config_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tag", "config_id", name=op.f("pk_config_tag")),
        **MYSQL,
    )
    op.create_index(op.f("ix_config_tag_config_id"), "config_tag", ["config_id"], unique=False)
    op.create_table(
        "conv_config",
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("spatial_dim", sa.Integer(), nullable=False),
        sa.Column("batchsize", sa.Integer(), nullable=False),
        sa.Column("in_channels", sa.Integer(), nullable=False),
        sa.Column("in_d", sa.Integer(), nullable=False),
        sa.Column("in_h", sa.Integer(), nullable=False),
        sa.Column("in_w", sa.Integer(), nullable=False),
        sa.Column("out_channels", sa.Integer(), nullable=False),
        sa.Column("fil_d", sa.Integer(), nullable=False),
        sa.Column("fil_h", sa.Integer(), nullable=False),
        sa.Column("fil_w", sa.Integer(), nullable=False),
        sa.Column("pad_d", sa.Integer(), nullable=False),
        sa.Column("pad_h", sa.Integer(), nullable=False),
        sa.Column("pad_w", sa.Integer(), nullable=False),
        sa.Column("conv_stride_d", sa.Integer(), nullable=False),
        sa.Column("conv_stride_h", sa.Integer(), nullable=False),
        sa.Column("conv_stride_w", sa.Integer(), nullable=False),
        sa.Column("dilation_d", sa.Integer(), nullable=False),
        sa.Column("dilation_h", sa.Integer(), nullable=False),
        sa.Column("dilation_w", sa.Integer(), nullable=False),
        sa.Column("group_count", sa.Integer(), nullable=False),
        sa.Column("trans_output_pad_d", sa.Integer(), nullable=False),
        sa.Column("trans_output_pad_h", sa.Integer(), nullable=False),
        sa.Column("trans_output_pad_w", sa.Integer(), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("pad_mode", sa.String(length=16), nullable=False),
        sa.Column("direction", sa.String(length=1), nullable=False),
        sa.Column("in_layout", sa.String(length=8), nullable=False),
        sa.Column("fil_layout", sa.String(length=8), nullable=False),
        sa.Column("out_layout", sa.String(length=8), nullable=False),
        sa.Column("data_type", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["config_id"], ["config.id"], name=op.f("fk_conv_config_config_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("config_id", name=op.f("pk_conv_config")),
        **MYSQL,
    )
    op.create_table(
        "device",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("peak_gflops", sa.Double(), nullable=True),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["environment_id"],
            ["environment.id"],
            name=op.f("fk_device_environment_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_device")),
        sa.UniqueConstraint("environment_id", "name", name=op.f("uq_device_environment_id_name")),
        **MYSQL,
    )
    op.create_table(
        "gemm_config",
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("m", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("batch_count", sa.Integer(), nullable=False),
        sa.Column("trans_a", sa.Boolean(), nullable=False),
        sa.Column("trans_b", sa.Boolean(), nullable=False),
        sa.Column("data_type", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["config_id"], ["config.id"], name=op.f("fk_gemm_config_config_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("config_id", name=op.f("pk_gemm_config")),
        **MYSQL,
    )
    op.create_table(
        "session",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("reason", sa.String(length=255), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["environment_id"], ["environment.id"], name=op.f("fk_session_environment_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_session")),
        sa.UniqueConstraint(
            "environment_id", "reason", name=op.f("uq_session_environment_id_reason")
        ),
        **MYSQL,
    )
    op.create_table(
        "job",
        sa.Column("id", BigId, nullable=False),
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("solver_id", sa.Integer(), nullable=False),
        sa.Column("steps", sa.String(length=255), nullable=False),
        sa.Column("step", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=255), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("isolate", sa.Boolean(), nullable=False),
        sa.Column("chunk", sa.String(length=32), nullable=True),
        sa.Column("leased_at", UtcDateTime(), nullable=True),
        sa.Column("cause", sa.String(length=32), nullable=True),
        sa.Column("workload", sa.String(length=64), nullable=True),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name=op.f("fk_job_config_id")),
        sa.ForeignKeyConstraint(
            ["session_id"], ["session.id"], name=op.f("fk_job_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["solver_id"], ["solver.id"], name=op.f("fk_job_solver_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        sa.UniqueConstraint(
            "session_id",
            "config_id",
            "solver_id",
            "steps",
            name=op.f("uq_job_session_id_config_id_solver_id_steps"),
        ),
        **MYSQL,
    )
    op.create_index(op.f("ix_job_chunk"), "job", ["chunk"], unique=False)
    op.create_index("ix_job_claim", "job", ["session_id", "step", "state", "id"], unique=False)
    op.create_index(op.f("ix_job_config_id"), "job", ["config_id"], unique=False)
    op.create_index(op.f("ix_job_solver_id"), "job", ["solver_id"], unique=False)
    op.create_table(
        "solver_applicability",
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("solver_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["config_id"],
            ["config.id"],
            name=op.f("fk_solver_applicability_config_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["session.id"],
            name=op.f("fk_solver_applicability_session_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["solver_id"],
            ["solver.id"],
            name=op.f("fk_solver_applicability_solver_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint(
            "session_id", "config_id", "solver_id", name=op.f("pk_solver_applicability")
        ),
        **MYSQL,
    )
    op.create_index(
        op.f("ix_solver_applicability_config_id"),
        "solver_applicability",
        ["config_id"],
        unique=False,
    )
    op.create_index(
        op.f("ix_solver_applicability_solver_id"),
        "solver_applicability",
        ["solver_id"],
        unique=False,
    )
    op.create_table(
        "find_db",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("solver_id", sa.Integer(), nullable=False),
        sa.Column("job_id", BigId, nullable=False),
        sa.Column("time_ms", sa.Double(), nullable=False),
        sa.Column("workspace_bytes", sa.BigInteger(), nullable=False),
        sa.Column("params", LongText, nullable=False),
        sa.Column("trial_number", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=True),
        sa.Column("workload", sa.String(length=64), nullable=True),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name=op.f("fk_find_db_config_id")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_find_db_job_id")),
        sa.ForeignKeyConstraint(["kernel"], ["kernel.digest"], name=op.f("fk_find_db_kernel")),
        sa.ForeignKeyConstraint(
            ["session_id"], ["session.id"], name=op.f("fk_find_db_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["solver_id"], ["solver.id"], name=op.f("fk_find_db_solver_id")),
        sa.ForeignKeyConstraint(["workload"], ["kernel.digest"], name=op.f("fk_find_db_workload")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_find_db")),
        sa.UniqueConstraint(
            "session_id",
            "config_id",
            "solver_id",
            name=op.f("uq_find_db_session_id_config_id_solver_id"),
        ),
        **MYSQL,
    )
    op.create_index(op.f("ix_find_db_config_id"), "find_db", ["config_id"], unique=False)
    op.create_index(op.f("ix_find_db_job_id"), "find_db", ["job_id"], unique=False)
    op.create_index(op.f("ix_find_db_kernel"), "find_db", ["kernel"], unique=False)
    op.create_index(op.f("ix_find_db_solver_id"), "find_db", ["solver_id"], unique=False)
    op.create_index(op.f("ix_find_db_workload"), "find_db", ["workload"], unique=False)
    op.create_table(
        "step_result",
        sa.Column("id", BigId, nullable=False),
        sa.Column("job_id", BigId, nullable=False),
        sa.Column("step", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("ok", sa.Boolean(), nullable=False),
        sa.Column("cause", sa.String(length=32), nullable=True),
        sa.Column("output_tail", LongText, nullable=False),
        sa.Column("reproduce", LongText, nullable=False),
        sa.Column("worker", sa.String(length=255), nullable=False),
        sa.Column("device", sa.String(length=255), nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=True),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.Column("busy_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_step_result_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_step_result")),
        sa.UniqueConstraint(
            "job_id", "step", "attempt", name=op.f("uq_step_result_job_id_step_attempt")
        ),
        **MYSQL,
    )
    op.create_table(
        "trial",
        sa.Column("id", BigId, nullable=False),
        sa.Column("job_id", BigId, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("params", LongText, nullable=True),
        sa.Column("artifact", sa.String(length=64), nullable=True),
        sa.Column("cause", sa.String(length=32), nullable=True),
        sa.Column("output_tail", LongText, nullable=False),
        sa.Column("times_ms", LongText, nullable=False),
        sa.Column("time_ms", sa.Double(), nullable=True),
        sa.Column("max_error", sa.Double(), nullable=True),
        sa.Column("build_s", sa.Double(), nullable=True),
        sa.Column("measured_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["job.id"], name=op.f("fk_trial_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trial")),
        sa.UniqueConstraint("job_id", "number", name=op.f("uq_trial_job_id_number")),
        **MYSQL,
    )
    op.bulk_insert(installation, [{"id": 1, "namespace": uuid.uuid4().hex[:12]}])
