"""What commands print and leave behind."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from builders import START, DatabaseBuilder
from jobs_builder import make_jobs
from pydantic_settings import TomlConfigSettingsSource
from settings_changes import change_setting

from tuna.api import checks as doctor
from tuna.cli import work
from tuna.cli.main import commands, load_command
from tuna.db import models
from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna.db.overview import Overview
from tuna.libraries.registry import names
from tuna.settings import Settings
from tuna.vocabulary import IN_FLIGHT, State

Type = Callable[..., object]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", commands())
def test_each_command_has_the_help_that_the_map_shows(name: str) -> None:
    assert load_command(name).help
    assert commands()[name][1].endswith(".")


def test_status_counts_as_in_flight_what_the_pipeline_does() -> None:
    jobs = {state.value: 1 for state in State}
    assert Overview(1, "noop", "", "", "", jobs, ()).in_flight == len(IN_FLIGHT)


def test_the_same_session_is_found_again(type_in: Type) -> None:
    assert "session 1 (new)" in type_in("go_fish", "noop", "--init_session", "-l", "why").out
    assert "session 1 (already there)" in type_in("tuna", "init-session", "noop", "-l", "why").out
    assert "session 2 (new)" in type_in("tuna", "init-session", "noop", "-l", "else").out


def test_configs_prints_an_object_per_layer_under_miopens_names(
    type_in: Type, layers: Path
) -> None:
    type_in("tuna", "import", layers, "-t", "a")
    ended = type_in("tuna", "configs", "--tag", "a", "--json")
    first, second = (json.loads(line) for line in ended.out.splitlines())
    assert (first["in_channels"], first["fil_h"], first["pad_w"], first["data_type"]) == (
        8,
        3,
        1,
        "FP32",
    )
    assert (second["out_channels"], second["in_layout"], second["direction"]) == (16, "NCHW", "F")


def test_a_quote_in_every_text_option_is_only_text(type_in: Type, layers: Path) -> None:
    nasty = "x' or '1'='1"
    type_in("tuna", "init-session", "noop", "-l", nasty)
    type_in("tuna", "import", layers, "-t", nasty)
    type_in("tuna", "update-solvers", "noop")
    type_in("tuna", "applicability", "--session-id", 1, "-t", nasty)
    assert (
        type_in("tuna", "load-jobs", "--session-id", 1, "-t", nasty, "-l", nasty).out
        == "New jobs added: 20\n"
    )
    assert (
        type_in("tuna", "load-jobs", "--session-id", 1, "-t", "small' or '1'='1", "-l", "y").code
        == 3
    )
    assert json.loads(type_in("tuna", "status", "--json").out)[0]["reason"] == nasty


def test_printed_commands_that_repeat_attempts_work_when_pasted(
    type_in: Type, tmp_path: Path
) -> None:
    engine = open_database()
    make_jobs(engine, 1, options={"trials": 1, "fail": "it's; touch X"}, solvers=["Noop1", "Noop2"])
    with writing(engine) as connection:
        good, bad = connection.execute(sa.select(models.Job).order_by(models.Job.id)).all()
        build = DatabaseBuilder(connection, clock=START)
        build.step(bad.id, "build", 1, 1, ok=False, cause="build_error")
        for job, state, cause in ((bad, "errored", "build_error"), (good, "evaluated", None)):
            change = sa.update(models.Job).where(models.Job.id == job.id)
            connection.execute(change.values(state=state, cause=cause, step="measure"))
        build.trial(good.id, 0, 2.0, params="p")
        build.step(good.id, "measure", 1, 1, device="gpu0")
        build.winner(1, good.config_id, good.solver_id, 2.0, good.id, params="p")
    engine.dispose()
    shown = type_in("tuna", "status", "--session-id", 1).out
    found = [
        line.partition("reproduce: ")[2] for line in shown.splitlines() if "reproduce: " in line
    ]
    found += [
        failure["reproduce"]
        for failure in json.loads(type_in("tuna", "status", "--json").out)[0]["failures"]
    ]
    found += [row["command"] for row in json.loads(type_in("tuna", "query", "--json").out)]
    report = type_in("tuna", "report", "--session-id", 1, "--json").out
    found += [json.loads(text) for text in re.findall(r'"reproduce": ("(?:[^"\\]|\\.)+")', report)]
    assert len(found) == 5
    for line in found:
        assert ";" not in shlex.shlex(line, posix=True, punctuation_chars=True)
        ended = type_in(*shlex.split(line))
        assert (ended.code, "ok" in ended.out) == (0, True), line


@pytest.mark.service
def test_a_library_that_is_not_here_is_absent_and_no_fault(
    type_in: Type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    change_setting(monkeypatch, "TUNA_ROCM_PATH", str(tmp_path / "nowhere"))
    found = {
        finding["what"]: finding for finding in json.loads(type_in("tuna", "doctor", "--json").out)
    }
    assert (found["library miopen"]["ok"], found["library miopen"]["absent"]) == (True, True)
    assert not found["library noop"]["absent"]
    ended = type_in("go_fish", "--status")
    assert ended.code == 0
    assert re.search(r"^ ?absent +library miopen +not usable here: ", ended.out, re.MULTILINE)


@pytest.mark.service
def test_an_extra_that_is_not_installed_is_a_row_with_the_line_to_type(
    type_in: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "find_spec", lambda package: None if package == "onnx" else object()
    )
    found = {
        finding["what"]: finding for finding in json.loads(type_in("tuna", "doctor", "--json").out)
    }
    assert found["extra onnx"]["absent"]
    assert found["extra onnx"]["hint"] == "pip install 'tuna-autotuner[onnx]'"
    assert not found["extra rpc"]["absent"]
    ended = type_in("tuna", "doctor")
    assert ended.code == 0
    assert re.search(
        r"^ ?absent +extra onnx +not installed, for ONNX models  ->  pip install", ended.out, re.M
    )
    extras = TomlConfigSettingsSource(Settings, toml_file=ROOT / "pyproject.toml").toml_data
    named = {*doctor.EXTRAS, *names()} | {"dev", "docs"}
    assert set(extras["project"]["optional-dependencies"]) <= named, "each is a row, or a library's"


def test_no_new_jobs_come_with_the_reason(loaded: Type) -> None:
    again = loaded("tuna", "load-jobs", "--session-id", 1, "-t", "small")
    assert again.out == "New jobs added: 0\n"
    assert "each of the 20 combinations of layer and solver has its job already" in again.err


def test_jobs_are_canceled_and_retried(loaded: Type) -> None:
    assert loaded("tuna", "retry", "--session-id", 1).out == "session 1: no job is concerned\n"
    assert (
        loaded("tuna", "cancel", "--session-id", 1, "--job", 1).out
        == "session 1: 1 job canceled (1 were new)\n"
    )
    assert loaded("tuna", "cancel", "--session-id", 1, "--tag", "small").out.startswith(
        "session 1: 19 jobs canceled"
    )
    assert loaded("tuna", "cancel", "--session-id", 1).out == "session 1: no job is concerned\n"
    assert json.loads(loaded("tuna", "status", "--json").out)[0]["jobs"] == {"canceled": 20}
    for words, code in (
        (("retry", "--session-id", 9), 3),
        (("cancel", "--session-id", 1, "--job", 99), 3),
        (("cancel", "--session-id", 1, "--tag", "nobody"), 3),
        (("retry", "--session-id", 1, "--cause", "bad_luck"), 2),
    ):
        ended = loaded("tuna", *words)
        assert ended.code == code
        assert "Traceback" not in ended.err


def test_opening_the_database_again_drops_none_of_its_locks(loaded: Type, home: Path) -> None:
    from tuna.api import open_database

    engine = open_database()
    with engine.connect() as connection:
        open_database().dispose()
        command = [sys.executable, "-m", "tuna", "cancel", "--session-id", "1"]
        subprocess.run(command, check=True, capture_output=True)
        assert (home / "tuna.sqlite-wal").exists(), "another process took the log for its own"
        assert connection.exec_driver_sql("SELECT DISTINCT state FROM job").scalars().all() == [
            "canceled"
        ]
    assert (home / "tuna.sqlite").stat().st_mode & 0o777 == 0o600


@pytest.mark.service
def test_the_doctor_says_that_auto_no_longer_decides_whether_builds_stop(
    type_in: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_setting(monkeypatch, "TUNA_QUIET", "auto")
    findings = json.loads(type_in("tuna", "doctor", "--json").out)
    (text,) = (finding["text"] for finding in findings if finding["what"] == "quiet")
    assert text.startswith("builds go on while devices are measured: TUNA_QUIET=auto is read as no")


@pytest.mark.service
def test_the_doctor_says_a_bad_setting_once(type_in: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting fails the check of the cores and each library that measures on them."""

    change_setting(monkeypatch, "TUNA_EVAL_CPUS", "4000")
    ended = type_in("tuna", "doctor")
    assert ended.code == 1
    assert ended.out.count("4000") == 1, ended.out


@pytest.mark.service
def test_the_doctor_writes_to_the_artifact_store_each_time(
    type_in: Type, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of an earlier check, which can still be read, proves nothing about writing."""
    from tuna.artifacts.files import StoreUnavailable
    from tuna.artifacts.store import Artifacts

    assert type_in("tuna", "doctor").code == 0

    def refuse(self: Artifacts, digest: str, data: bytes) -> None:
        raise StoreUnavailable("read-only")

    monkeypatch.setattr(Artifacts, "_write", refuse)
    found = {
        finding["what"]: finding for finding in json.loads(type_in("tuna", "doctor", "--json").out)
    }
    assert not found["artifacts"]["ok"]


def test_a_run_says_that_its_builds_stop_while_it_measures(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for quiet in ("yes", "no"):
        change_setting(monkeypatch, "TUNA_QUIET", quiet)
        said.append("Builds stop while devices are measured: TUNA_QUIET=yes." in work._notice())
    assert said == [True, False]
