"""Configs of the fourth schema, which were read from their driver commands, get their JSON and stay
the same."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config as Alembic

from tuna.configs import Config, parse_line
from tuna.db import bulk, configs, database, models
from tuna.db.engine import reading, writing
from tuna.db.types import utc_now
from tuna.libraries.miopen.problem import text_of

LINES = (
    "MIOpenDriver conv -n 2 -c 4 -H 8 -W 8 -k 4 -y 3 -x 3 -F 2",
    "MIOpenDriver convfp16 -_ 3 -n 1 -c 4 -! 5 -H 8 -W 8 -k 4 -@ 3 -y 3 -x 3 -I NDHWC -F 4",
    "MIOpenDriver conv -n 1 -c 8 -k 8 -H 9 -W 9 -m trans -u 2 -v 2 -Y 1 -X 1 -F 1",
    "MIOpenDriver gemmint8 -m 2 -n 3 -k 4 -b 5 -u 1",
    "MIOpenDriver convint8 -n 4 -c 32 -H 28 -W 28 -k 32 -y 1 -x 1 -F 1",
    "MIOpenDriver bnormfp16 -n 2 -c 3 -H 5 -W 6 -m 1 --forw 0 -b 1 -s 1 -A 0.5",
)
LAYERS: list[Config] = [parse_line(line)[0] for line in LINES]


def _to_0004(engine: sa.Engine) -> None:
    """A database as revision 0004 left it, with each of the layers, tagged and with a job."""
    alembic = Alembic()
    alembic.set_main_option("script_location", str(database.migrations_dir()))
    with engine.connect() as connection:
        alembic.attributes["connection"] = connection
        command.upgrade(alembic, "0004")
    day = "2026-01-02 03:04:05.000000"
    with engine.begin() as connection:
        tables = sa.MetaData()
        tables.reflect(connection)
        assert "json" not in tables.tables["config"].c
        row = sa.insert(tables.tables["config"])
        for number, layer in enumerate(LAYERS, 1):
            # as it was until revision 0012
            key = (text_of(layer) or "").replace("INT8", "INT8INT8INT32")
            values = {
                "id": 3 * number,
                "key": layer.key,
                "kind": layer.kind,
                "driver": layer.driver(),
            }
            values["problem_key"] = key or None
            connection.execute(row, values | {"label": layer.label, "created_at": utc_now()})
            connection.execute(
                sa.insert(tables.tables["config_tag"]),
                {"tag": "t", "config_id": 3 * number, "recurrent": 0},
            )
        for text in (
            "environment VALUES (1, 'k', 'noop', '1', 'x86', 1, 't', 'd', '{}', '{}')",
            f"session VALUES (1, 1, 'old', '{day}')",
            "solver VALUES (1, 'noop', 'S', 'gemm', 'GEMM', 1, 0, 1, NULL)",
        ):
            connection.exec_driver_sql(f"INSERT INTO {text}")
        job = {
            "session_id": 1,
            "config_id": 3,
            "solver_id": 1,
            "steps": "build",
            "step": "build",
            "state": "new",
        }
        job |= {
            "reason": "r",
            "options": "{}",
            "attempt": 0,
            "failures": 0,
            "isolate": 0,
            "updated_at": utc_now(),
        }
        connection.execute(sa.insert(tables.tables["job"]), job)


@pytest.mark.parametrize("batch", [2, 5000])
def test_every_config_gets_its_json(
    empty_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    _to_0004(empty_engine)
    monkeypatch.setattr(bulk, "IN_LIST", batch)
    database.upgrade(empty_engine)
    with reading(empty_engine) as connection:
        rows = connection.execute(sa.select(models.ConfigRow).order_by(models.ConfigRow.id)).all()
        assert [row.id for row in rows] == [3 * number for number in range(1, len(LAYERS) + 1)]
        for row, layer in zip(rows, LAYERS, strict=True):
            assert (row.key, row.driver, row.label, row.body) == (
                layer.key,
                layer.driver(),
                layer.label,
                None,
            )
            assert json.loads(row.json) == layer.to_json()
            assert row.problem_key == text_of(layer)
        assert list(configs.tagged(connection, "t")) == LAYERS
        assert connection.execute(sa.select(models.Job.config_id)).scalar_one() == 3, (
            "what refers to a config is kept"
        )
    with writing(empty_engine) as connection:
        assert configs.store(connection, LAYERS, "t") == configs.Stored(0, 0), (
            "they are the same configs as before"
        )
