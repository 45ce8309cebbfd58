"""Searches of the last schema without a table for them become rows of it, wherever the upgrade was
cut off."""

from __future__ import annotations

from datetime import datetime, timezone

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from databases import upgrade_in_pieces

from tuna.db import database, models
from tuna.db.models import Base, FindDb, Job, Search, WarmStartRow

DAY = "2026-01-02 03:04:05.000000"
LATER = "2026-01-02 03:05:00.000000"
STEPS = "search,build,measure"
#: Columns of `job` before, in the order of the rows below.
JOB = (
    "id, config_id, solver_id, steps, round, part, state, stopped, session_id, step, reason,"
    " options, attempt, failures, isolate, updated_at"
)
ROWS = (
    "environment VALUES (1, 'k', 'noop', '1', 'x86', 1, 't', 'd', '{}', '{}', NULL, '')",
    f"session (id, environment_id, reason, created_at, uuid) VALUES (1, 1, 'old', '{DAY}', 'u')",
    *(
        f"config (id, `key`, kind, json, driver, label, problem_key, created_at)"
        f" VALUES ({n}, 'k{n}', 'gemm', '{{}}', 'd', 'l', {key}, '{DAY}')"
        for n, key in ((1, "NULL"), (2, "'mine'"), (3, "NULL"))
    ),
    "solver VALUES (1, 'noop', 'A', 'gemm', 'GEMM', 1, 0, 1, NULL)",
    "solver VALUES (2, 'noop', 'B', 'gemm', 'GEMM', 1, 0, 1, NULL)",
    *(
        f"job ({JOB}) VALUES ({row}, 1, 'measure', 'r', '{{\"trials\": 3}}', 1, 0, 0, '{DAY}')"
        for row in (
            f"1, 1, 1, '{STEPS}', 0, 0, 'evaluated', 'all trials are done'",
            "2, 1, 1, 'build,measure', 0, 0, 'evaluated', 'target met by 1 ms in session 7'",
            f"3, 1, 2, '{STEPS}', 0, 0, 'evaluated', NULL",
            f"4, 1, 1, '{STEPS}', 0, 1, 'evaluated', NULL",
            f"5, 1, 1, '{STEPS}', 1, 0, 'evaluated', NULL",
            f"6, 1, 2, '{STEPS}', 1, 0, 'new', NULL",
            "7, 1, 1, 'finals', 0, 0, 'new', NULL",
        )
    ),
    *(
        "step_result (job_id, step, attempt, ok, output_tail, worker, device, started_at, busy_s)"
        f" VALUES ({job}, 'search', 1, 1, '', 'w', '', '{at}', 1)"
        for job, at in ((4, LATER), (1, DAY), (2, DAY))
    ),
    "kernel VALUES ('block', 'text', 4)",
    "search_sibling VALUES (3, 0, 'block', 'config', 0, 40, 'one')",
    "search_sibling VALUES (3, 1, 'block', 'device', 1, 50, 'another')",
    *(
        "find_db (session_id, config_id, solver_id, job_id, workspace_bytes, params, algorithm,"
        f" problem_key, updated_at) VALUES (1, {config}, 1, 1, 0, '', '', '{key}', '{DAY}')"
        for config, key in ((1, "told"), (2, "other"), (3, "mine"))
    ),
)


def test_searches_become_rows_and_their_rounds_refer_to_them(empty_engine: sa.Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(database.migrations_dir()))
    with empty_engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0032")
    with empty_engine.begin() as connection:
        for row in ROWS:
            connection.exec_driver_sql(f"INSERT INTO {row}")
    assert upgrade_in_pieces(empty_engine) >= 5
    with empty_engine.connect() as connection:
        columns = (Search.session_id, Search.config_id, Search.solver_id, Search.steps)
        facts = (Search.reason, Search.options, Search.begun, Search.stopped)
        first, second = connection.execute(
            sa.select(Search.id, *columns, *facts).order_by(Search.id)
        )
        begun = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
        shared = ("r", {"trials": 3})
        assert first[1:] == (1, 1, 1, STEPS, *shared, begun, "all trials are done")
        assert second[1:] == (1, 1, 2, STEPS, *shared, None, None)
        jobs = connection.execute(sa.select(Job.id, Job.search_id, Job.stopped).order_by(Job.id))
        met = "target met by 1 ms in session 7"
        assert [tuple(row) for row in jobs] == [
            (1, first.id, None),
            (2, None, met),
            (3, second.id, None),
            (4, first.id, None),
            (5, first.id, None),
            (6, second.id, None),
            (7, None, None),
        ]
        starts = sa.select(WarmStartRow.search_id, WarmStartRow.number, WarmStartRow.label)
        assert [tuple(row) for row in connection.execute(starts.order_by(WarmStartRow.number))] == [
            (second.id, 0, "one"),
            (second.id, 1, "another"),
        ]
        assert connection.execute(sa.select(sa.func.count()).select_from(FindDb)).scalar() == 3
        keys = sa.select(models.ConfigRow.problem_key).order_by(models.ConfigRow.id)
        assert connection.execute(keys).scalars().all() == ["told", "mine", None], (
            "a key that another layer has is not taken"
        )
        options = {"compare_type": connection.dialect.name == "sqlite"}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
