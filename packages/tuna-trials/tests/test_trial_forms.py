"""All trials for other tuners' tools: T4 by its schema, as Kernel Tuner ships it, and Optuna by
Optuna."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders import DRIVERS, DatabaseBuilder
from exporter_samples import Ours
from places import ROOT

from tuna.configs import parse_line
from tuna.db import models
from tuna.errors import BadInput, LibraryMissing, NotFound
from tuna.exports import export, export_golden
from tuna.libraries.exporter import Entry
from tuna_trials import trial_forms
from tuna_trials.trial_forms import OptunaExporter, T4Exporter

LAYER = parse_line(DRIVERS[0])[0]
#: Copied from kernel_tuner/schema/T4/1.0.0 of Kernel Tuner 1.5.0 (Apache-2.0), which brings
#: pandas, scikit-learn and matplotlib.
T4_SCHEMA = ROOT / "tests" / "assets" / "t4" / "results-schema.json"


class Trials(Ours):
    """Each sample is one trial, with params that have no names."""

    good: str

    def params(self, text: str) -> str:
        """As an entry has them."""
        return text

    def expected(self) -> Sequence[Entry]:
        """By layer, job and number."""
        return [
            Entry(
                f"{one.config} job {one.job_id} trial 0",
                one.solver,
                (one.time_ms or 0.0, self.good, self.params(one.params)),
            )
            for one in (sample.record for sample in self.samples())
        ]


class TestT4(Trials):
    exporter = T4Exporter()
    good = "correct"


class TestOptuna(Trials):
    exporter = OptunaExporter()
    good = "COMPLETE"

    @pytest.fixture(autouse=True)
    def _needs_optuna(self) -> None:
        pytest.importorskip("optuna")

    def params(self, text: str) -> str:
        return json.dumps({"params": text})


@pytest.fixture
def session(build: DatabaseBuilder) -> int:
    """Trials of one layer and two solvers: good, slow, failed, and no candidate's; names of
    parameters."""
    made, layer = build.session(library="noop"), build.config(LAYER)
    job = build.job(made, layer, build.solver("A", library="noop"))
    for number, (m, time_ms) in enumerate(((16, 3.0), (32, 1.0), (64, 2.0))):
        tile = json.dumps({"m": m, "kind": "x", "stages": [1, m]})
        facts = {"build_s": 0.25, "max_error": 1e-7, "low_ms": time_ms * 0.9, "clock": "own"}
        build.trial(job, number, time_ms, params=tile, ended_early=number == 0, **facts)
    build.trial(job, 3, None, params='{"m": 128, "kind": "y"}', cause="build_timeout")
    build.trial(job, 4, None, params='{"m": 8}', cause="wrong_result", times_ms="[1.0]")
    build.trial(job, 5, None, params="{}", cause="device_lost")
    build.trial(job, 6, None, params=None, cause="build_error")
    build.trial(job, 7, 0.0, params='{"m": 1}')
    other = build.job(made, layer, build.solver("B<1>", library="noop"))
    build.trial(other, 0, 0.5, params="not JSON")
    same = build.job(made, layer, build.solver("B_1_", library="noop"))
    build.trial(same, 0, 0.75, params="not JSON")
    return made


SKIPPED = {
    "a machine's fault ended it": 1,
    "its attempt failed before there was a candidate": 1,
    "its time is not between 1 ns and a day": 1,
}


def test_t4_is_as_the_schema_says(build: DatabaseBuilder, session: int, tmp_path: Path) -> None:
    report = export(build.connection, session, "t4", tmp_path)
    assert (report.entries, report.configs, report.skipped) == (7, 1, SKIPPED)
    files = {file.stem[17:]: json.loads(file.read_text()) for file in report.path.iterdir()}
    assert sorted(files) == ["A", "B_1_", "B_1_-2"], "names that differ in < and _ stay apart"
    assert files["A"]["tuna"]["config"] == LAYER.driver()
    slow, best, _, late, wrong = files["A"]["results"]
    assert slow["measurements"][0] == {"name": "time", "value": 3.0, "unit": "ms"}
    assert best["configuration"] == {"m": 32, "kind": "x", "stages": [1, 32]}
    assert best["times"] == {"runtimes": [1.0, 1.02, 0.99], "compilation_time": 250.0}
    assert [one["invalidity"] for one in (best, late, wrong)] == [
        "correct",
        "timeout",
        "correctness",
    ]
    assert [one["correctness"] for one in (best, wrong)] == [1.0, 0.0]
    assert late["measurements"] == []
    assert files["B_1_"]["results"][0]["configuration"] == {"params": "not JSON"}

    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(json.loads(T4_SCHEMA.read_text()))
    for document in files.values():
        check.validate(document)
    del files["A"]["results"][0]["correctness"]
    assert not check.is_valid(files["A"]), "the schema refuses something"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"schema_version": "1.0.0", "tuna": {"config": 1}, "results": []}',
        '{"schema_version": "2.0.0"}',
    ],
)
def test_a_damaged_t4_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BadInput, match=r"x\.json is not Tuna.s T4 file"):
        list(T4Exporter().entries(tmp_path))


def test_optuna_reads_the_trials_by_name(
    build: DatabaseBuilder, session: int, tmp_path: Path
) -> None:
    optuna = pytest.importorskip("optuna")
    report = export(build.connection, session, "optuna", tmp_path)
    assert (report.entries, report.configs, report.skipped) == (7, 1, SKIPPED)
    backend = optuna.storages.journal.JournalFileBackend(str(report.path))
    storage = optuna.storages.JournalStorage(backend)
    names = optuna.get_all_study_names(storage)
    assert names == [f"{LAYER.label} {name} {LAYER.key[:12]}" for name in ("A", "B<1>", "B_1_")]
    study = optuna.load_study(study_name=names[0], storage=storage)
    assert study.user_attrs["config"] == LAYER.driver()
    assert (study.best_value, study.best_params) == (
        1.0,
        {"m": 32, "kind": "x", "stages": "[1, 32]"},
    )
    states = [trial.state.name for trial in study.trials]
    assert states == ["PRUNED", "COMPLETE", "COMPLETE", "FAIL", "FAIL"]
    assert study.trials[0].intermediate_values == {3: 3.0}
    assert (study.trials[3].value, study.trials[3].user_attrs["cause"]) == (None, "build_timeout")
    assert study.trials[1].user_attrs["max_error"] == 1e-7
    low_high = study.trials[4].distributions["m"]
    assert (low_high.low, low_high.high) == (8, 128)
    before = list(OptunaExporter().entries(report.path))
    study.optimize(lambda trial: trial.suggest_int("m", 8, 128), n_trials=1)
    assert len(study.trials) == 6, "a search goes on in the file"
    assert list(OptunaExporter().entries(report.path)) == before


def test_what_can_be_asked_of_optuna_is_of_one_study(
    build: DatabaseBuilder, session: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer and solver with more trials than fit has several studies; nothing is lost."""
    optuna = pytest.importorskip("optuna")
    monkeypatch.setattr(trial_forms, "STUDY_TRIALS", 2)
    path = export(build.connection, session, "optuna", tmp_path).path
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    found = optuna.get_all_study_summaries(storage)
    assert [(one.study_name[-6:], one.n_trials) for one in found[:3]] == [
        (LAYER.key[6:12], 2),
        ("part 2", 2),
        ("part 3", 1),
    ]


def test_a_parameter_with_many_texts_is_no_range_of_optunas() -> None:
    optuna = pytest.importorskip("optuna")
    named = [{"n": number / 2, "text": f"t{number}", "odd": math.nan} for number in range(300)]
    found = trial_forms._distributions(optuna.distributions, named)
    assert (found["n"].low, found["n"].high) == (0.0, 149.5)
    assert found["odd"].choices == ("NaN",)
    assert "text" not in found, "each trial would list them all"


def test_without_optuna_the_command_that_installs_it_is_said(
    build: DatabaseBuilder, session: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(LibraryMissing, match="Optuna is not installed") as caught:
        export(build.connection, session, "optuna", tmp_path)
    assert "[optuna]" in caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["t4", "optuna"])
def test_a_golden_version_and_what_was_imported_have_no_trials(
    build: DatabaseBuilder, tmp_path: Path, form: str
) -> None:
    if form == "optuna":
        pytest.importorskip("optuna")
    made = build.session()
    build.winner(made, build.config(LAYER), build.solver("A"), 0.5)
    with pytest.raises(NotFound, match="has no results for a"):
        export(build.connection, made, form, tmp_path)
    build.insert(models.Golden, library="tvm", version=1, state="draft", created_at=build.clock)
    with pytest.raises(BadInput, match="Golden version 1 of tvm for znver5 has no trials"):
        export_golden(build.connection, 1, form, tmp_path, library="tvm", arch="znver5")
