"""The tables that results are read from are those of the models, and need no models to be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from tuna.db.models import Base
from tuna.results import core_tables
from tuna.results.selectable import RELEASES, SESSIONS, TRIALS, Results

TABLES = [one for one in vars(core_tables).values() if isinstance(one, sa.TableClause)]
#: Types whose values are other ones in the database.
CONVERTED = ("BOOLEAN", "JSON", "DATETIME", "BLOB")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_has_columns_of_its_model(table: sa.TableClause) -> None:
    model = Base.metadata.tables[table.name]
    for column in table.c:
        declared = str(model.c[column.name].type)
        converted = declared in CONVERTED
        assert converted == (str(column.type) in CONVERTED), column.name
        assert not converted or str(column.type) == declared


@pytest.mark.parametrize(
    "results", [SESSIONS, RELEASES, TRIALS], ids=["sessions", "golden", "trials"]
)
def test_each_column_can_be_read_alone(results: Results, sqlite_engine: sa.Engine) -> None:
    names = [*results.columns, *(name for join in results.joins.values() for name in join.columns)]
    with sqlite_engine.connect() as connection:
        for name in names:
            assert connection.execute(results.select(name)).all() == []


def test_a_column_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        SESSIONS.select("speed")


def test_both_provenances_answer_the_same_questions() -> None:
    def names(results: Results) -> set[str]:
        return set(results.columns).union(*(join.columns for join in results.joins.values()))

    only_sessions = {"imported", "measured_by", "job_state", "attempt_id"}
    assert names(SESSIONS) - names(RELEASES) == only_sessions
    assert names(RELEASES) - names(SESSIONS) == {
        "golden_id",
        "present_simulated",
        "present_params",
    }


def test_a_query_starts_without_the_models(home: Path) -> None:
    """Importing and configuring them took a quarter of the time of a short query."""
    text = (
        "import sys; from click.testing import CliRunner; from tuna.cli.main import tuna\n"
        "for words in (['query', '--limit', '1'], ['query', '--arch', 'none']):\n"
        "    CliRunner().invoke(tuna, words)\n"
        "    print('tuna.results.result_query' in sys.modules, 'sqlalchemy.orm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True False"] * 2
