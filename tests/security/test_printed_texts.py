"""Texts from outside, such as a worker's name and a program's output, are inert where they are
printed."""

from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from builders import DatabaseBuilder, memory, tuned_network
from hostile_texts import ALL, FORGED, HOSTILE, MARKUP, SHELL, obeyed
from places import CORE, PACKAGES

from tuna import api
from tuna.cli import show, status
from tuna.cli.console import print_table, say
from tuna.cli.main import guarded, tuna
from tuna.common import logs
from tuna.common.messages import inert, last_line, one_line
from tuna.db import models
from tuna.db.overview import Failure, Overview
from tuna.errors import TunaError
from tuna.queue.messages import summary, title
from tuna.reports import html
from tuna.reports.queries import read_figures


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    assert obeyed(f"{inert(text)}{one_line(text)}{last_line(text)}") == []
    assert inert(f"before{text}\nafter").startswith("before")
    assert inert(f"before{text}\nafter").endswith("\nafter"), "what follows on the next line stays"


def test_sequences_vanish_with_what_they_say() -> None:
    assert inert("a\x1b[1;31mb\x1b[0mc\x1b]0;title\x07d\x1b]8;;http://x\x1b\\e") == "abcde"
    assert inert("Größe\t3 × 5\n→ ok") == "Größe\t3 × 5\n→ ok"


def test_one_line_stays_one_and_bounded() -> None:
    assert "\n" not in one_line(f"a{FORGED}")
    assert len(one_line("x" * 10_000_000)) == 2000
    assert one_line("x" * 2000) == "x" * 2000
    assert last_line("a\nb\n\n") == "b"
    assert last_line(" \x1b[0m\n") == "(no output)"


@pytest.mark.parametrize("err", [False, True])
def test_lines_and_tables(capsys: pytest.CaptureFixture[str], err: bool) -> None:
    say(ALL, err=err)
    print_table(("worker", "device"), [(ALL + FORGED, ALL), ("x", FORGED)], err=err)
    said = "".join(capsys.readouterr())
    assert obeyed(said) == []
    assert not re.search(r"^(Error|2026|forged)", said, re.MULTILINE)


def test_the_failures_of_a_session(capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure("run_error", 1, f"out\n{ALL}", 1, "build", f"tuna reproduce {ALL}{FORGED}")
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
    said = capsys.readouterr().out + "".join(status._failures(SimpleNamespace(overview=overview)))
    assert obeyed(said) == []
    assert not re.search(r"^(Error|2026|forged)", said, re.MULTILINE)


def test_workers(
    home: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ALL + FORGED
    facts = {
        "name": text,
        "role": text,
        "state": text,
        "device": text,
        "environment": text,
        "toolchains": [text],
    }
    one = SimpleNamespace(**facts, jobs=[1], per_minute=None, silent_s=1.0, aside=text)
    monkeypatch.setattr(api, "list_workers", lambda: [one])
    assert guarded(tuna, ["workers"]) == 0
    said = capsys.readouterr().out
    assert obeyed(said) == []
    assert not re.search(r"^(Error|2026|forged)", said, re.MULTILINE)


def test_errors(
    capsys: pytest.CaptureFixture[str], home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise TunaError(f"The worker ended. {ALL}", hint=ALL)

    monkeypatch.setattr(api, "list_workers", fail)
    assert guarded(tuna, ["workers"]) == 1
    assert obeyed(capsys.readouterr().err) == []


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs(capsys: pytest.CaptureFixture[str], form: str) -> None:
    logs.configure("INFO", form)
    structlog.get_logger("tuna").warning("library failed", worker=ALL, fault=f"{ALL}{FORGED}")
    said: Any = capsys.readouterr().err
    assert said
    assert obeyed(said) == []
    if form == "json":
        assert json.loads(said)["worker"] == ALL
    else:
        assert not re.search(r"^(Error|2026-01-01|forged)", said, re.MULTILINE)


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs_of_exceptions(capsys: pytest.CaptureFixture[str], form: str) -> None:
    logs.configure("INFO", form)
    # Celery's messages have an exception's text, and its traceback
    for name in ("tuna", "celery.worker"):
        try:
            raise ValueError(f"{ALL}{FORGED}")
        except ValueError:
            structlog.get_logger(name).exception("scrape failed", worker=[ALL])
            logging.getLogger(name).exception("Task %s raised: %s", ALL, FORGED)
    said = capsys.readouterr().err
    assert said.count("Traceback") == 4
    assert obeyed(said) == []
    assert not re.search(r"^(Error|2026-01-01|forged)", said, re.MULTILINE)


def test_what_flower_shows() -> None:
    """Names of queues, tasks and arguments: made of solvers, layers and libraries, which come from
    files and plug-ins."""
    text = ALL + FORGED + SHELL
    item = SimpleNamespace(session_id=1, solver=text, layer=SimpleNamespace(label=text * 1000))
    chunk: Any = SimpleNamespace(library=text, step=text, items=(item, item))
    shown = title(chunk) + summary(chunk)
    assert obeyed(shown) == []
    assert "\n" not in shown
    assert len(shown) < 1000


def test_the_page_of_a_report() -> None:
    """Opened in a browser, or printed by `cat`."""
    text = ALL + FORGED + SHELL + MARKUP
    with memory().connect() as connection:
        build = DatabaseBuilder(connection)
        page = _page(build, tuned_network(build), text)
    assert obeyed(page) == []
    assert page.count("<script>") == 1
    assert "{{ 7 * 7 }}" in page
    assert "touch /tmp/X" in page


def _page(build: DatabaseBuilder, session: int, text: str) -> str:
    """A report in which every text from outside is `text`."""
    for change in (
        sa.update(models.Session).values(reason=text),
        sa.update(models.EnvironmentRow).values(flags={text: text}, device=text),
        sa.update(models.ConfigRow).values(label=text),
        sa.update(models.SolverRow).where(models.SolverRow.id == 1).values(name=text),
        sa.update(models.StepResultRow).values(output_tail=text, worker=text),
        sa.update(models.StepResultRow)
        .where(models.StepResultRow.device != "")
        .values(device=text),
        sa.update(models.TrialRow).values(output_tail=text, params=text),
        sa.update(models.FindDb).values(params=text),
    ):
        build.connection.execute(change)
    return html.render(read_figures(build.connection, session))


def test_commands_print_by_these_functions_alone() -> None:
    found = [
        path.name
        for package in (CORE, *PACKAGES)
        for path in (package / "cli").rglob("*.py")
        if re.search(r"\bclick\.(s?)echo\(|(?<!\.)\bprint\(", path.read_text())
    ]
    assert sorted(found) == [
        "console.py",
        "main.py",
    ], "main.py: its own sentence on a misspelt setting"
