"""What is printed on narrow terminals: counts first, no word broken; and what Ctrl-C says."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console
from test_every_command import LINES, Line

from tuna.api.checks.findings import Finding
from tuna.cli import console as printing
from tuna.cli import show
from tuna.cli import status as view
from tuna.cli.console import ProgressView, table
from tuna.cli.main import tuna
from tuna.coordinator.session_run import Progress
from tuna.db.overview import Overview
from tuna.queue.heartbeat import WorkerStatus
from tuna.reports.status import LiveSession, LiveSnapshot
from tuna.workers.launch import LastingWorkers, RunStopped, local_workers

ROWS = [
    [
        "conv 64x56x56 -> 64, 3x3, fp32 NCHW",
        "TvmConvBlockedWinograd",
        "0.1234",
        "±1.2 %",
        "worker_lost",
    ],
    ["gemm 512x512x512 NN fp32", "TvmGemmTile", "12.3400", "±0.3 % noisy", ""],
]
COLUMNS = ("layer", "best solver", "ms", "spread", "failed attempts")


def shown(renderable: Any, width: int) -> str:
    """What a terminal of this width shows."""
    console = Console(
        width=width, height=24, file=io.StringIO(), force_terminal=True, color_system=None
    )
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return str(text)


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_word_of_a_table_is_broken(width: int) -> None:
    text = shown(table("", COLUMNS, ROWS, (2,), width), width)
    for word in " ".join((*COLUMNS[1:], *ROWS[0], *ROWS[1])).split():
        assert word in text, word


def test_a_table_in_a_pipe_keeps_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table(COLUMNS, [["x" * 200, *row[1:]] for row in ROWS])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 4
    assert lines[2].startswith(" " + "x" * 200)


def test_what_the_doctor_says_has_no_long_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = Finding("redis", True, "words " * 40, "what to do " * 30, warning=True)
    show.findings([long])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    path = f"/{'x' * 120}"
    show.findings([long, Finding("disk", True, f"{path}: free")])
    assert re.search(f"ok +disk +{path}:", capsys.readouterr().out), "a path is not broken"


def _progress(done: int, canceled: int = 0) -> Progress:
    states = {
        "evaluated": done,
        "compile_queued": 900 - done,
        "eval_queued": 100,
        "canceled": canceled,
    }
    return Progress(states, total=1000 + canceled, unfinished=1000 - done, errored=0)


def test_progress_begins_with_count_rate_and_eta_in_60_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = Console(width=60, file=io.StringIO(), force_terminal=True, color_system=None)
    progress = ProgressView("session 12")
    progress._console = console
    now = [100.0]
    monkeypatch.setattr(printing.time, "monotonic", lambda: now[0])
    with progress:
        for done in (0, 10, 20):
            progress.update(_progress(done))
            now[0] += 1.0
    last = re.split(r"[\r\n]", console.file.getvalue())  # type: ignore[attr-defined]
    lines = [
        line
        for line in (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in last)
        if line.strip()
    ]
    assert all(len(line) <= 60 for line in lines)
    assert lines[-1].startswith("20/1000 jobs, 10.00/s, ETA 0:01:38  session 12: "), lines[-1]


def test_the_last_line_of_a_log_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView("session 12") as progress:
        progress.update(_progress(0))
        for _ in range(3):
            progress.update(_progress(1000))
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_canceled_jobs_do_not_count_as_done() -> None:
    assert (_progress(5, canceled=400).finished, _progress(5, canceled=400).wanted) == (5, 1000)
    session = _session(1, {"evaluated": 5, "new": 5, "canceled": 90}, 5)
    assert "50 %" in shown(view.view(_snapshot(session), 100), 100)


def _session(number: int, jobs: dict[str, int], unfinished: int) -> LiveSession:
    overview = Overview(number, "tvm", f"reason {number}", "k", "znver3", jobs, ())
    return LiveSession(overview, unfinished, 1.5, 3600.0, None)


def _snapshot(*sessions: LiveSession, workers: int = 3) -> LiveSnapshot:
    worker = WorkerStatus(
        name="a", role="eval", host="host.example.org", pid=4711, device="AMD EPYC 9B45",
        environment="",
        toolchains=(), job_ids=(1, 2), started_at=0.0, seen_at=0.0,
    )  # fmt: skip
    at = datetime(2026, 3, 2, tzinfo=timezone.utc)
    return LiveSnapshot(
        at, sessions, tuple(replace(worker, pid=4711 + n) for n in range(workers)), 1.0
    )


@pytest.mark.parametrize("width", [60, 80, 100])
def test_many_sessions_leave_room_for_the_workers(width: int) -> None:
    jobs = {"compile_queued": 123, "eval_queued": 456, "evaluated": 789, "errored": 12}
    text = shown(
        view.view(_snapshot(*(_session(n, jobs, 579) for n in range(1, 9))), width, 24), width
    )
    lines = text.splitlines()
    assert any("workers: 3 eval" in line for line in lines[:20]), text
    assert "1:00:00" in text
    assert "compile_queued" in text or width < 70
    assert "of them not shown" in text or width < 70


def test_workers_on_hosts_with_long_names_are_a_table_at_80_columns() -> None:
    """It became a paragraph for each worker."""
    snapshot = _snapshot(_session(1, {"evaluated": 3}, 0))
    assert snapshot.workers is not None
    hosts = tuple(
        replace(worker, host=f"vm-{'0123456789' * 5}.internal.example")
        for worker in snapshot.workers
    )
    lines = shown(view.view(replace(snapshot, workers=hosts), 80, 24), 80).splitlines()
    assert any(line.split() == ["worker", "role", "current", "jobs", "done"] for line in lines), (
        lines
    )
    assert sum("vm-0123456789" in line and ":47" in line and "eval" in line for line in lines) == 3


@pytest.mark.parametrize(
    ("error", "why"),
    [(KeyboardInterrupt(), ""), (RunStopped("The time is over"), "The time is over")],
)
def test_a_run_that_ends_early_says_at_once_why_and_what_is_waited_for(
    error: BaseException, why: str, tmp_path: Path
) -> None:
    said: list[tuple[float, str]] = []

    def note(seconds: float, reason: str) -> None:
        said.append((seconds, reason))

    with pytest.raises(type(error)), local_workers(tmp_path, [], 30.0, note):
        raise error
    assert said == [(30.0, why)]
    with local_workers(tmp_path, [], 30.0, note):
        pass
    assert said == [(30.0, why)], "nothing is waited for where all is done"


def test_a_sentence_breaks_between_words_and_not_within_a_command() -> None:
    command = "`tuna results --session-id 1 --tag my-layers`"
    text = f"  all results, whichever solver they are of, and why others failed: {command}\nnext"
    lines = printing.wrapped(text, 40).split("\n")
    assert command in text
    assert [line.strip() for line in lines][-2:] == [command, "next"]
    assert all(line.startswith("  ") for line in lines[:-1])
    assert all(len(line) <= 40 for line in lines if command not in line)
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_the_text_with_question_marks(
    home: Path, encoding: str
) -> None:
    program = "from tuna.cli import main\nmain.guarded = lambda _: print('3 × 3 ≥ 1')\nmain.main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    wanted = "3 × 3 ≥ 1".encode(encoding, "replace").decode(encoding)
    assert (done.returncode, done.stdout.decode(encoding).strip()) == (0, wanted), done.stderr


def test_what_is_waited_for_is_on_the_line_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView("session 12") as progress:
        progress.update(_progress(10))
        progress.waiting("Redis (Timeout reading from socket)")
        progress.waiting("")
        progress.update(_progress(1000))
    begin, waits, end = capsys.readouterr().err.splitlines()
    assert waits.startswith(
        "session 12: 10/1000 jobs, waiting for: Redis (Timeout reading from socket) ("
    )
    assert "waiting" not in begin + end


def test_status_is_a_table_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each session is a row, not a paragraph."""
    monkeypatch.setattr(show, "table_width", lambda: 80)
    jobs = {"evaluated": 700, "eval_queued": 20, "errored": 3}
    show.sessions([Overview(1, "tvm", "quickstart of an evening", "k", "znver4", jobs, ())])
    lines = capsys.readouterr().out.splitlines()
    assert any("session" in line and "by state" in line for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("line", LINES, ids=str)
def test_help_breaks_at_80_columns_between_words(line: Line) -> None:
    """`load-jobs` was broken at its hyphen, and the causes of failures filled a line of 132."""
    context = click.Context(line.command, info_name=str(line), terminal_width=78)
    for text in line.command.get_help(context).splitlines():
        assert len(text) <= 80, text
        assert not re.search(r"\w-$", text), text


def test_lists_of_commands_break_at_80_columns_between_words_and_end_in_none() -> None:
    """`tuna session --help` cut six of its sentences off."""
    groups = {line.words[:-1] for line in LINES if line.program == "tuna" and line.words}
    for words in sorted(groups):
        group: click.Command | None = tuna
        for word in words:
            assert isinstance(group, click.Group)
            group = group.get_command(click.Context(group), word)
        assert group is not None
        text = group.get_help(click.Context(group, info_name="tuna", terminal_width=78))
        assert not re.search(r"\w-$", text, re.MULTILINE), words
        assert "..." not in text.split("Commands:")[1], words


def test_a_list_leaves_columns_out_and_says_where_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """M6: sessions and tokens were paragraphs at 80 columns, and no worker an empty table."""
    monkeypatch.setattr(printing, "table_width", lambda: 40)
    columns = [
        printing.Column[str]("name", str),
        printing.Column[str]("digest", lambda _: "0" * 32, 2),
        printing.Column[str]("size", lambda _: "9", 1, right=True),
    ]
    printing.print_list(columns, ["one", "two"], "Nothing yet.")
    head, _, one, two = filter(str.strip, capsys.readouterr().out.splitlines())
    assert [head.split(), one.split(), two.split()] == [
        ["name", "size"],
        ["one", "9"],
        ["two", "9"],
    ]
    printing.print_list(columns, [], "Nothing yet.")
    assert capsys.readouterr() == ("", "Nothing yet.\n")


@pytest.mark.parametrize(
    ("used", "said"), [(False, []), (True, [(30.0, "the first"), (30.0, "the second")])]
)
def test_lasting_workers_are_waited_for_only_if_they_had_something_to_do(
    used: bool, said: list[tuple[float, str]], tmp_path: Path
) -> None:
    heard: list[tuple[float, str]] = []
    with LastingWorkers() as lasting:
        lasting.start(tmp_path, [], 30.0, lambda *_: pytest.fail("a run has taken its place"))
        lasting.start(tmp_path, [], 30.0, lambda seconds, why: heard.append((seconds, why)))
        if used:
            lasting.ended(None, RunStopped("the first"), None)
            lasting.ended(None, RunStopped("the second"), None)
    assert heard == said[1:]
