"""A database of the first schema, with results in it, becomes one of today's and keeps them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from databases import upgrade_in_pieces

from tuna.configs import parse_line
from tuna.db import database, models

DRIVER = parse_line("MIOpenDriver conv -n 2 -c 4 -H 8 -W 8 -k 4 -y 3 -x 3 -F 2")[0].driver()


def _to(engine: sa.Engine, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(database.migrations_dir()))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def test_results_survive(empty_engine: sa.Engine) -> None:
    _to(empty_engine, "0001")
    day = "2026-01-02 03:04:05.000000"
    rows = [
        "environment VALUES (1, 'k', 'tvm', '1', 'x86', 1, 't', 'd', '{}', '{}')",
        f"session VALUES (1, 1, 'old', '{day}')",
        f"config VALUES (1, 'key', 'convolution', '{DRIVER}', 'label', '{day}')",
        "config_tag VALUES ('t', 1)",
        "solver VALUES (1, 'tvm', 'S', 'convolution', 'Direct', 1, 0, 1)",
        (
            "job VALUES (1, 1, 1, 1, 'compile,eval', 'eval', 'evaluated', 'r', '{}', 2, 0, 0,"
            f" NULL, NULL, NULL, NULL, '{day}')"
        ),
        "trial (id, job_id, number, output_tail, times_ms) VALUES (1, 1, 3, '', '[]')",
        "kernel VALUES ('digest', 'code', 4)",
        f"find_db VALUES (1, 1, 1, 1, 1, 0.25, 7, 'params', 3, 'digest', NULL, '{day}')",
    ]
    with empty_engine.begin() as connection:
        for row in rows:
            connection.exec_driver_sql(f"INSERT INTO {row}")
    upgrade_in_pieces(empty_engine, most=60)  # to beyond 0002, which moves rows
    with empty_engine.connect() as connection:
        (found,) = connection.execute(sa.select(models.FindDb)).all()
        assert (found.time_ms, found.workspace_bytes, found.params, found.trial_number) == (
            0.25,
            7,
            "params",
            3,
        )
        assert (found.algorithm, found.source) == ("", None)
        assert connection.execute(
            sa.select(models.TrialRow.job_id, models.Job.round).join(models.Job)
        ).all() == [(1, 0)]
        (kernel,) = connection.execute(sa.select(models.FindDbKernel)).all()
        assert (kernel.find_db_id, kernel.kernel, kernel.name) == (1, "digest", "")
        assert (
            connection.execute(sa.select(models.ConfigRow.problem_key)).scalar_one()
            == "4-6-6-3x3-4-8-8-2-0x0-1x1-1x1-0-NCHW-FP32-B"
        )
        assert connection.execute(sa.select(models.ConfigTag.recurrent)).scalar_one() == 0


def test_an_installation_gets_a_secret_of_its_own_and_keeps_its_namespace(
    empty_engine: sa.Engine,
) -> None:
    _to(empty_engine, "0002")
    with empty_engine.connect() as connection:
        namespace = connection.exec_driver_sql("SELECT namespace FROM installation").scalar_one()
    _to(empty_engine, "0018")
    with empty_engine.connect() as connection:
        shared = connection.exec_driver_sql("SELECT secret FROM installation").scalar_one()
    database.upgrade(empty_engine)
    with empty_engine.connect() as connection:
        (found,) = connection.execute(sa.select(models.Installation)).all()
        assert found.namespace == namespace
        assert len(bytes.fromhex(found.secret)) == 32
        assert found.secret != shared, "members of earlier releases got it"
        assert connection.execute(sa.select(models.TokenRow)).all() == []
        assert connection.execute(sa.select(models.WorkerRow)).all() == []
