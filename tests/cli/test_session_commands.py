"""`tuna session`: list, show, archive, restore, delete."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from settings_changes import change_setting

TypeIn = Callable[..., Any]


def test_a_session_is_listed_archived_deleted_and_restored(
    loaded: TypeIn, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = json.loads(loaded("tuna", "session", "list", "--json").out)
    assert [(one["id"], one["state"], one["jobs"]) for one in listed] == [
        (1, "waiting", {"new": 20})
    ]
    assert "noop" in loaded("tuna", "session", "list").out
    shown = loaded("tuna", "session", "show", 1).out
    assert "20 (20 new)" in shown
    assert listed[0]["uuid"] in shown
    shown = json.loads(loaded("tuna", "session", "show", 1, "--json").out)
    assert shown.pop("outlook")["unfinished"] == 20
    assert shown.pop("warm_starts") == []
    assert shown == listed[0]

    file = tmp_path / "session.tuna"
    ended = loaded("tuna", "session", "archive", 1, file)
    assert (ended.code, file.exists()) == (0, True)
    assert ended.out.startswith("session 1 (noop: test), 20 jobs")
    ended = loaded("tuna", "session", "restore", file)
    assert (ended.code, "here already" in ended.err) == (2, True)

    ended = loaded("tuna", "session", "delete", 1)
    assert (ended.code, "--yes" in ended.err) == (2, True), "there is no terminal to ask on"
    ended = loaded("tuna", "session", "delete", 1, "--yes")
    assert ended.out == "session 1 (noop: test) deleted: 20 jobs, 0 results, 0 artifacts\n"
    assert json.loads(loaded("tuna", "session", "list", "--json").out) == []
    assert loaded("tuna", "session", "show", 1).code == 3
    assert loaded("tuna", "configs", "-t", "small").code == 0, "layers stay"

    ended = loaded("tuna", "session", "restore", file)
    assert ended.out == "session 1 (noop: test) restored: 20 jobs\n"
    change_setting(monkeypatch, "TUNA_HOME", str(tmp_path / "elsewhere"))
    assert loaded("tuna", "session", "restore", file, "--reason", "from home").code == 0
    (there,) = json.loads(loaded("tuna", "session", "list", "--json").out)
    assert (there["reason"], there["uuid"], there["jobs"]) == (
        "from home",
        listed[0]["uuid"],
        {"new": 20},
    )


def test_what_searches_learned_from_is_shown(loaded: TypeIn, home: Path) -> None:
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        connection.execute("INSERT INTO kernel VALUES ('d', x'00', 1)")
        connection.execute(
            "INSERT INTO search (id, session_id, config_id, solver_id, steps, reason, options)"
            " SELECT id, session_id, config_id, solver_id, steps, '', '{}' FROM job WHERE id < 8"
        )
        for search in range(1, 8):
            for number, origin in enumerate(("session", "config", "device")):
                row = (
                    search,
                    number,
                    "d",
                    origin,
                    origin == "session",
                    40,
                    f"layer {number} in session 9",
                )
                named = "search_id, number, digest, origin, noisy, trials, label"
                connection.execute(
                    f"INSERT INTO warm_start ({named}) VALUES (?, ?, ?, ?, ?, ?, ?)", row
                )
    lines = [
        line
        for line in loaded("tuna", "session", "show", 1).out.splitlines()
        if line.startswith("warm start")
    ]
    said = (
        "7 searches learned from others: 7 of the same layer in other sessions, 7 of other"
        " layers, 7 in other"
    )
    assert said in lines[0]
    assert "layer 0 in session 9 (noisy); layer 1 in session 9; 1 more" in lines[1]
    assert (len(lines), "2 more" in lines[-1]) == (7, True)
    found = json.loads(loaded("tuna", "session", "show", 1, "--json").out)["warm_starts"]
    first = {"origin": "session", "noisy": True, "trials": 40, "label": "layer 0 in session 9"}
    assert (len(found), found[0]["siblings"][0]) == (7, first)


def test_a_deadline_is_set_shown_and_removed(loaded: TypeIn, home: Path) -> None:
    assert loaded("tuna", "session", "set", 1, "--deadline", "2020-01-31T18:00+00:00").code == 0
    assert "cannot be kept" in loaded("tuna", "session", "show", 1).out, (
        "it is over, and 20 jobs are left"
    )
    assert "cannot be kept" in loaded("tuna", "status").out
    (status,) = json.loads(loaded("tuna", "status", "--json").out)
    assert status["outlook"]["deadline"] == "2020-01-31T18:00:00+00:00"
    assert status["outlook"]["can_be_kept"] is False
    assert loaded("tuna", "session", "set", 1, "--deadline", "2999-01-31T18:00").code == 0
    assert (
        "can"
        not in loaded("tuna", "session", "show", 1).out.partition("deadline")[2].splitlines()[0]
    ), "not known"
    assert (
        loaded("tuna", "session", "set", 1, "--deadline", "none").out == "session 1: no deadline\n"
    )
    assert "deadline" not in loaded("tuna", "session", "show", 1).out
    for words in ((), ("--deadline", "soon"), ("--deadline", "0001-01-01T00:00+23:00")):
        ended = loaded("tuna", "session", "set", 1, *words)
        assert (ended.code, "Traceback" in ended.err) == (2, False)
    assert loaded("tuna", "session", "set", 9, "--deadline", "none").code == 3


def test_a_new_session_takes_options_and_wrong_ones_change_nothing(
    loaded: TypeIn, home: Path
) -> None:
    made = ("tuna", "init-session", "noop", "-l", "urgent", "--priority", 9)
    assert loaded(*made).code == 0
    shown = json.loads(loaded("tuna", "session", "show", 2, "--json").out)["options"]
    assert shown["priority"] == 9
    assert loaded("tuna", "session", "show", 2).out.count("priority     9\n") == 1
    assert "priority 9" in loaded("tuna", "status").out
    for wrong in (("--priority", 10), ("--priority", "high"), ("--deadline", "soon")):
        ended = loaded("tuna", "session", "set", 2, "--priority", 3, *wrong)
        assert (ended.code, "Traceback" in ended.err) == (2, False)
    shown = json.loads(loaded("tuna", "session", "show", 2, "--json").out)["options"]
    assert shown["priority"] == 9
    assert loaded("tuna", "session", "set", 2, "--priority", "none").code == 0
    assert "priority" not in loaded("tuna", "session", "show", 2).out


def test_jobs_that_run_are_canceled_first_or_are_in_the_way(loaded: TypeIn, home: Path) -> None:
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        connection.execute("UPDATE job SET state = 'compiling', chunk = 'c' WHERE id = 1")
    for words in ((), ("--yes",)):
        ended = loaded("tuna", "session", "delete", 1, *words)
        assert (ended.code, "1 job with workers" in ended.err) == (2, True)
    ended = loaded("tuna", "session", "delete", 1, "--cancel", "--yes")
    assert (ended.code, "deleted: 20 jobs" in ended.out) == (0, True), ended


def test_an_unknown_session_and_a_foreign_file_are_refused(loaded: TypeIn, tmp_path: Path) -> None:
    for words in (("show", 7), ("archive", 7, tmp_path / "file"), ("delete", 7, "--yes")):
        ended = loaded("tuna", "session", *words)
        assert (ended.code, "Unknown session 7." in ended.err) == (3, True)
    assert not (tmp_path / "file").exists()
    (tmp_path / "other").write_text("layers")
    ended = loaded("tuna", "session", "restore", tmp_path / "other")
    assert (ended.code, "is not an archive of a session" in ended.err) == (2, True)
