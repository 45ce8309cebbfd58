"""Reported times: shown when they are asked for, counted by no other command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from builders import DRIVERS, DatabaseBuilder, tuned_network
from command_lines import Ended

from tuna import api
from tuna.cli.main import commands
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.results.core_tables import config
from tuna.results.reported import SOURCES, ReportedTime, record
from tuna.results.result_rows import ResultFilter

TypeIn = Callable[..., Ended]
#: Lines of every command that reads results.
READ = """
golden build 1 --session-id 1 --overwrite
query --limit 1000 --json
query --n-best 3 --csv
query --explain
results --session-id 1 --json
report --session-id 1 --json
report --session-id 1 -o report.html
compare --session-id 1 --session-id 2 --json
status --json
coverage resnet50 --arch znver5 --json
golden report 1 --json
golden list --json
golden explain 1 {key}
export --session-id 1 --form json -d out
export --session-id 1 --form csv -d out
export --golden 1 --arch znver5 --library tvm --form json -d out
session list --json
session show 1
session archive 1 out/session.tuna
model list
db-diff out/a.jsonl out/a.jsonl
check-db out
simulate --session-id 1 --json
""".strip().splitlines()
#: Commands that read no stored time, or read it as one above does: `tune`, `load-jobs`, `run` and
#: `serve` take known results from `api.best`, `api.query` and searches.
OTHERS = {
    *("quickstart", "init-session", "import", "capture", "configs", "update-solvers", "solvers"),
    *("applicability", "load-jobs", "run", "enqueue", "worker", "rpc-client", "gateway", "serve"),
    *("token", "key", "workers", "benchmark-model", "tune", "tune-rpc", "reproduce", "metrics"),
    *("retry", "cancel", "import-db", "merge", "doctor", "db", "cache", "predictor"),
}


@pytest.fixture(autouse=True)
def network(home: Path) -> None:
    """Two sessions with a layer that both have."""
    with writing(open_database()) as connection:
        build = DatabaseBuilder(connection)
        tuned_network(build, trials=3)
        other = build.session(reason="another")
        build.winner(other, build.config(DRIVERS[0]), build.solver("TvmConvDirectNCHW"), 2.0)
    (home.parent / "out").mkdir()
    (home.parent / "out" / "a.jsonl").write_text('{"format":"tuna-results","version":1}\n')


def report_all() -> int:
    """A tiny time of every stored layer from every source."""
    with writing(open_database()) as connection:
        layers = connection.execute(sa.select(config.c.key, config.c.driver)).all()
        rows = [
            ReportedTime(source, text or key, "9", 1e-5, "me", "x", "znver5", {"v": "1"}, key)
            for key, text in layers
            for source in SOURCES
        ]
        return record(connection, rows).new


def seen(type_in: TypeIn, folder: Path) -> dict[str, str]:
    """What all lines print and write, without moments and the numbers of golden entries."""
    with reading(open_database()) as connection:
        key = connection.execute(sa.select(config.c.key).order_by(config.c.id)).scalars().first()
    found = {}
    for line in READ:
        ended = type_in("tuna", *line.format(key=key).split())
        assert "Traceback" not in ended.err
        found[line] = f"{ended.code} {ended.out} {ended.err}"
    layers = [row.config_key for row in api.query(ResultFilter(), with_commands=False)]
    found["best"] = repr(api.best(layers))
    for path in sorted(folder.glob("out/*.jsonl")) + sorted(folder.glob("out/*.csv")):
        found[path.name] = path.read_text()
    found["html"] = (folder / "report.html").read_text()
    moment = re.compile(r"explain 1 \d+|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?")
    return {name: moment.sub("NOW", text) for name, text in found.items()}


def test_no_command_counts_a_reported_time(type_in: TypeIn, tmp_path: Path) -> None:
    assert {line.split()[0] for line in READ} | OTHERS == {*commands()}, "say which a new one is"
    type_in("tuna", *READ[0].split())
    before = seen(type_in, tmp_path)
    assert not [text for text in before.values() if text.startswith(("2 ", "3 "))]
    assert report_all() > 10
    after = seen(type_in, tmp_path)
    assert after == before


def test_only_its_own_forms_are_exported_and_only_when_allowed(type_in: TypeIn) -> None:
    report_all()
    for words in (
        ("--form", "tunableop"), ("--form", "tunableop", "--session-id", 1),
        ("--form", "json", "--allow-reported"), ("--form", "find", "--allow-reported"),
        ("--form", "tunableop", "--allow-reported", "--session-id", 1),
    ):  # fmt: skip
        assert type_in("tuna", "export", *words).code == 2, words
    assert type_in("tuna", "export", "--form", "tunableop", "--allow-reported").code == 0


def test_a_query_marks_reported_times_and_shows_them_by_layer(type_in: TypeIn) -> None:
    number = report_all()
    shown = type_in("tuna", "query", "--reported")
    assert shown.out.count("reported") == number + 1
    with reading(open_database()) as connection:
        key, driver = connection.execute(sa.select(config.c.key, config.c.driver)).first() or ()
    rows = json.loads(type_in("tuna", "query", "--reported", "--layer", driver, "--json").out)
    assert {row["config_key"] for row in rows} == {key}
    assert {row["source"] for row in rows} == {*SOURCES}
    assert type_in("tuna", "query", "--reported", "--csv").out.startswith("source,subject,")
    assert type_in("tuna", "query", "--reported", "--limit", 1, "--csv").out.count("\n") == 2
    assert not type_in("tuna", "query", "--reported", "--arch", "gfx942", "--csv").out
    assert type_in("tuna", "query", "--reported", "--session-id", 1).code == 2
