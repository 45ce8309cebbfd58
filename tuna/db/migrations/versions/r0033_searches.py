"""Searches as rows of their own, to which their rounds and warm starts refer; MIOpen's keys in
`config` alone.

Revision: 0033
"""

import sqlalchemy as sa
from alembic import op

from tuna.db.models.base import TABLE_OPTIONS
from tuna.db.types import BigId, UtcDateTime

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

_KEY = ("session_id", "config_id", "solver_id", "steps")


def upgrade() -> None:
    _create_search()
    _refer_to_search()
    _fill_search()
    _move_warm_starts()
    _drop_problem_key()


def _create_search() -> None:
    op.create_table(
        "search",
        sa.Column("id", BigId, nullable=False),
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("config_id", sa.Integer(), nullable=False),
        sa.Column("solver_id", sa.Integer(), nullable=False),
        sa.Column("steps", sa.String(255), nullable=False),
        sa.Column("reason", sa.String(255), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("begun", UtcDateTime(), nullable=True),
        sa.Column("stopped", sa.String(255), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_search")),
        sa.ForeignKeyConstraint(
            ["session_id"], ["session.id"], name=op.f("fk_search_session_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["config_id"], ["config.id"], name=op.f("fk_search_config_id")),
        sa.ForeignKeyConstraint(["solver_id"], ["solver.id"], name=op.f("fk_search_solver_id")),
        sa.UniqueConstraint(*_KEY, name=op.f(f"uq_search_{'_'.join(_KEY)}")),
        **TABLE_OPTIONS,
    )
    for name in ("config_id", "solver_id"):
        op.create_index(op.f(f"ix_search_{name}"), "search", [name])


def _refer_to_search() -> None:
    # SQLite copies the table, as in 0024.
    with op.batch_alter_table("job") as job:
        job.add_column(sa.Column("search_id", BigId, nullable=True))
        job.create_index(op.f("ix_job_search_id_round"), ["search_id", "round"])
        steps = ("session_id", "steps", "stopped")
        job.create_index(op.f(f"ix_job_{'_'.join(steps)}"), steps)
        job.create_foreign_key(
            op.f("fk_job_search_id"), "search", ["search_id"], ["id"], ondelete="CASCADE"
        )
        job.drop_index("ix_job_search")


def _fill_search() -> None:
    """Make a search of the jobs that are its rounds; each statement finds nothing to do the second
    time."""
    columns = (*_KEY, "reason", "options", "stopped")
    search = sa.table("search", *map(sa.column, ("id", "begun", *columns)))
    job = sa.table("job", *map(sa.column, ("id", "round", "search_id", *columns)))
    earlier = job.alias("earlier")
    attempt = sa.table("step_result", sa.column("job_id"), sa.column("started_at"))
    # Steps that begin with `search`, as a range: "-" follows ",".
    rounds = (job.c.steps >= "search,", job.c.steps < "search-", job.c.search_id.is_(None))

    def same(one: sa.FromClause) -> sa.ColumnElement[bool]:
        return sa.and_(*(one.c[name] == job.c[name] for name in _KEY))

    is_first = ~sa.exists().where(same(earlier), earlier.c.id < job.c.id)
    is_new = ~sa.exists().where(same(search))
    first = sa.select(*(job.c[name] for name in columns)).where(*rounds, is_first, is_new)
    op.execute(sa.insert(search).from_select(columns, first.order_by(job.c.id)))
    of_job = sa.select(search.c.id).where(same(search)).scalar_subquery()
    op.execute(sa.update(job).where(*rounds).values(search_id=of_job, stopped=None))
    begun = (
        sa.select(sa.func.min(attempt.c.started_at))
        .join(job, job.c.id == attempt.c.job_id)
        .where(job.c.search_id == search.c.id, job.c.round == 0)
        .scalar_subquery()
    )
    op.execute(sa.update(search).where(search.c.begun.is_(None)).values(begun=begun))


def _move_warm_starts() -> None:
    op.create_table(
        "warm_start",
        sa.Column("search_id", BigId, nullable=False, autoincrement=False),
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("noisy", sa.Boolean(), nullable=False),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.Column("label", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("search_id", "number", name=op.f("pk_warm_start")),
        sa.ForeignKeyConstraint(
            ["search_id"],
            ["search.id"],
            name=op.f("fk_warm_start_search_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["digest"], ["kernel.digest"], name=op.f("fk_warm_start_digest")),
        **TABLE_OPTIONS,
    )
    op.create_index(op.f("ix_warm_start_digest"), "warm_start", ["digest"])
    if "search_sibling" not in sa.inspect(op.get_bind()).get_table_names():
        return  # it was moved before the upgrade was cut off
    columns = ("number", "digest", "origin", "noisy", "trials", "label")
    before = sa.table("search_sibling", sa.column("job_id"), *map(sa.column, columns))
    after = sa.table("warm_start", sa.column("search_id"), *map(sa.column, columns))
    job = sa.table("job", sa.column("id"), sa.column("search_id"))
    moved = sa.and_(after.c.search_id == job.c.search_id, after.c.number == before.c.number)
    rows = (
        sa.select(job.c.search_id, *(before.c[name] for name in columns))
        .join(job, job.c.id == before.c.job_id)
        .where(~sa.exists().where(moved))
    )
    op.execute(sa.insert(after).from_select(["search_id", *columns], rows))
    op.drop_table("search_sibling")


def _drop_problem_key() -> None:
    """Older versions stored the keys that workers reported with results; a layer of which Tuna
    computes none keeps the one it had."""
    bind = op.get_bind()
    if "problem_key" not in {one["name"] for one in sa.inspect(bind).get_columns("find_db")}:
        return  # it was dropped before the upgrade was cut off
    find_db = sa.table("find_db", sa.column("config_id"), sa.column("problem_key"))
    config = sa.table("config", sa.column("id"), sa.column("problem_key"))
    other = config.alias("other")
    reported = (
        sa.select(find_db.c.config_id, sa.func.min(find_db.c.problem_key))
        .join(config, config.c.id == find_db.c.config_id)
        .where(find_db.c.problem_key.is_not(None), config.c.problem_key.is_(None))
        .where(~sa.exists().where(other.c.problem_key == find_db.c.problem_key))
        .group_by(find_db.c.config_id)
    )
    for config_id, key in bind.execute(reported).all():
        bind.execute(sa.update(config).where(config.c.id == config_id).values(problem_key=key))
    with op.batch_alter_table("find_db") as table:
        table.drop_column("problem_key")
