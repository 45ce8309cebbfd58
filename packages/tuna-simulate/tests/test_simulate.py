"""`tuna simulate` on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import DatabaseBuilder, tuned_network
from command_lines import Ended

from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna.errors import BadInput, NotFound
from tuna_simulate import api, cli
from tuna_simulate.policies import POLICIES
from tuna_simulate.scenario import read_scenario

SCENARIO = """
[[pools]]
queue = "cpu"
[[sessions]]
name = "late"
deadline_s = 2
[[sessions.jobs]]
count = 4
steps = [{ step = "build", queue = "cpu", seconds = 1.0, cv = 0.5 }]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    return path


def test_policies_are_compared_in_a_table(type_in: Callable[..., Ended], file: Path) -> None:
    shown = type_in("tuna", "simulate", str(file), "--policy", "all")
    assert shown.code == 0
    assert [name for name in POLICIES if name not in shown.out] == []
    assert "missed deadlines: fair: late" in shown.out


def test_a_policy_is_one_line_at_80_columns(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was three lines, with the names of the queues and their shares below each other."""
    monkeypatch.setattr(cli, "table_width", lambda: 80)
    file.write_text(
        SCENARIO.replace("seconds = 1.0", "seconds = 30_000")
        .replace("deadline_s = 2", "")
        .replace("}]", '}, { step = "measure", queue = "eval", seconds = 9 }]')
        .replace("[[sessions]]", '[[pools]]\nqueue = "eval"\n[[sessions]]')
    )
    scenario = read_scenario(file)
    cli._show([api.simulate(scenario, name) for name in POLICIES])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in POLICIES:
        (row,) = (line for line in lines if f" {name} " in line)
        assert row.split()[-2:] == ["100%", "0%"], row


def test_json_has_the_figures_and_is_the_same_for_the_same_seed(
    type_in: Callable[..., Ended], file: Path
) -> None:
    words = ("tuna", "simulate", str(file), "--policy", "fifo", "--json", "--seed")
    first, again, other = (type_in(*words, seed).out for seed in ("1", "1", "2"))
    assert first == again != other
    (one,) = json.loads(first)
    assert (one["policy"], one["seed"], one["jobs"], one["sessions"][0]["deadline_met"]) == (
        "fifo",
        1,
        4,
        False,
    )
    assert one["makespan_s"] >= one["lower_bound_s"] > 0


def test_recorded_sessions_are_simulated_and_written_as_a_scenario(
    home: object, type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    with writing(open_database()) as connection:
        tuned_network(DatabaseBuilder(connection), trials=3)
    out = tmp_path / "recorded.json"
    words = ("--json", "--policy", "shortest")
    found = type_in(
        "tuna", "simulate", "--session-id", "1", "--devices", "2", "-o", str(out), *words
    )
    assert found.code == 0, found.err
    assert json.loads(type_in("tuna", "simulate", str(out), *words).out) == json.loads(found.out)
    assert type_in("tuna", "simulate", "--session-id", "9").code == NotFound.exit_code
    queues = [pool["queue"] for pool in json.loads(out.read_text())["pools"]]
    assert any(queue.startswith("eval.tvm-znver5x2-") for queue in queues), (
        "it was the environment's key alone"
    )
    table = type_in("tuna", "simulate", "--session-id", "1").out
    assert re.search(r" eval +\n", table), table
    assert re.search(r" busy +\n(.+\n)+ fair .* \d+% *\n", table), table


def test_a_file_and_sessions_exclude_each_other(type_in: Callable[..., Ended], file: Path) -> None:
    for words in ((), (str(file), "--session-id", "1"), (str(file), "--devices", "3")):
        ended = type_in("tuna", "simulate", *words)
        assert (ended.code, ended.err.count("Error: ")) == (BadInput.exit_code, 1), words
