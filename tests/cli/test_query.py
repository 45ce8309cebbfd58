"""`tuna query` and `tuna coverage` on the command line."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from builders import DatabaseBuilder, tuned_network
from command_lines import Ended
from queries import execute

from tuna.cli import query as command
from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna.db.models import FindDb, StepResultRow
from tuna.errors import BadInput, NotFound


@pytest.fixture(autouse=True)
def network(home: object) -> None:
    """A session with winners."""
    with writing(open_database()) as connection:
        tuned_network(DatabaseBuilder(connection), trials=3)


def test_a_table_names_layer_solver_and_time_on_a_narrow_terminal_too(
    type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = type_in("tuna", "query", "--limit", "2")
    assert wide.code == 0
    for word in (
        "conv 1x3x224x224",
        "TvmConvDirectNCHW",
        "session 1",
        "znver5 cpu0@tuner-1",
        "2026-03-02",
    ):
        assert word in wide.out
    assert "there are more" in wide.err
    monkeypatch.setattr(command, "terminal_width", lambda: 60)
    narrow = type_in("tuna", "query", "--limit", "2").out
    assert narrow.split()[:3] == ["layer", "solver", "ms"]
    assert "session" not in narrow


def test_a_noisy_time_is_marked_at_80_columns_too(
    type_in: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The column that said so was left out, and more were counted than were marked."""
    with writing(open_database()) as connection:
        first = connection.execute(
            sa.select(FindDb.id).order_by(FindDb.time_ms).limit(1)
        ).scalar_one()
        connection.execute(sa.update(FindDb).where(FindDb.id == first).values(noisy=True))
    monkeypatch.setattr(command, "terminal_width", lambda: 80)
    shown = type_in("tuna", "results", "--session-id", "1").out
    assert "noisy" not in shown.splitlines()[1], "the column of marks does not fit"
    assert sum("~" in line for line in shown.splitlines()) == 2
    assert shown.splitlines()[-1] == "~ 1 time is noisy: the machine was busy while it was measured"


def test_json_csv_and_explain_say_the_same(type_in: Callable[..., Ended]) -> None:
    (row,) = json.loads(type_in("tuna", "query", "--op", "gemm", "--json").out)
    assert (row["solver"], row["source"], row["session_id"]) == ("TvmGemm", "session", 1)
    (cells,) = csv.DictReader(io.StringIO(type_in("tuna", "query", "--op", "gemm", "--csv").out))
    assert list(cells) == list(row)
    assert float(cells["time_ms"]) == row["time_ms"]
    assert (cells["noisy"], cells["golden"], cells["command"]) == ("false", "", row["command"])
    explained = type_in("tuna", "query", "--op", "gemm", "--explain").out
    assert row["command"] in explained
    assert row["config_key"] in explained


def test_the_command_of_a_row_finds_it_again(type_in: Callable[..., Ended]) -> None:
    # of a result without an attempt, such as an archive may bring
    execute(open_database(), sa.delete(StepResultRow))
    rows = json.loads(type_in("tuna", "query", "--json").out)
    words = rows[0]["command"].split()
    assert words[:2] == ["tuna", "query"]
    assert json.loads(type_in(*words).out) == rows[:1]


def test_times_are_dates_or_ages(type_in: Callable[..., Ended]) -> None:
    assert len(json.loads(type_in("tuna", "query", "--since", "2026-03-01", "--json").out)) == 13
    none = type_in("tuna", "query", "--since", "1h", "--session-id", "1")
    assert (none.code, none.out) == (0, "")
    assert "No result" in none.err
    for words in (
        ("--since", "yesterday"),
        ("--json", "--csv"),
        ("--limit", "0"),
        ("--session-id", "0"),
    ):
        assert type_in("tuna", "query", *words).code == BadInput.exit_code, words


def test_coverage_is_printed_by_class(type_in: Callable[..., Ended]) -> None:
    shown = type_in("tuna", "coverage", "resnet50", "--arch", "znver5")
    assert shown.code == 0
    assert "tag resnet50 on znver5" in shown.out
    assert "conv 1x512x14x14" in shown.out, "it has no result"
    found = json.loads(type_in("tuna", "coverage", "resnet50", "--arch", "znver5", "--json").out)
    assert found["layers_by_cover"] == {"exact": 5, "near": 0, "none": 1}
    assert type_in("tuna", "coverage", "resnet50", "--arch", "gfx90a").code == NotFound.exit_code


_HEAVY = ("tvm", "celery", "kombu", "alembic", "numpy", "redis", "fsspec", "cryptography", "jinja2")
_SHORT = """
import sys
from tuna.cli.main import guarded, tuna
codes = [guarded(tuna, line.split()) for line in sys.argv[2:]]
print(codes, [name for name in sys.argv[1].split() if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("commands", "unneeded"),
    [
        (
            ("status", "session list", "query --limit 1"),
            (*_HEAVY, "tuna.configs", "tuna.libraries.base"),
        ),
        (("results --session-id 1",), _HEAVY),
    ],
    ids=["no library", "params are the library's"],
)
def test_a_row_is_read_without_what_it_does_not_need(
    commands: tuple[str, ...], unneeded: tuple[str, ...]
) -> None:
    """They took a second of CPU, half of it to import libraries, Redis and the signatures of
    artifacts."""
    words = [sys.executable, "-c", _SHORT, " ".join(unneeded), *commands]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stderr.splitlines()[-1] == f"{[0] * len(commands)} []"
