"""What is said where a package beside the core is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from command_lines import Ended

from tuna import api
from tuna.cli import main, tune
from tuna.db.engine import reading
from tuna.errors import LibraryMissing, NotFound
from tuna.exports import trial_log
from tuna.plugins import Plugins
from tuna.results import best

TypeIn = Callable[..., Ended]


def test_each_command_of_our_packages_is_known_to_the_core() -> None:
    homes = {name: module.partition(".")[0] for name, (module, _) in main.commands().items()}
    ours = {name: home.replace("_", "-") for name, home in homes.items() if home != "tuna"}
    assert ours == main._DISTRIBUTIONS


@pytest.mark.parametrize("name", sorted(main._DISTRIBUTIONS))
def test_a_command_of_a_missing_package_says_what_to_install(
    name: str, type_in: TypeIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "commands", lambda: {})
    ended = type_in("tuna", name)
    assert ended.code == 2
    package = main._DISTRIBUTIONS[name]
    assert f"{name} needs the package {package}: pip install {package}" in ended.err


def test_a_prediction_without_predictors_says_what_to_install(
    sqlite_engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: Plugins[type[Any]] = Plugins("tuna.predictors.of_nobody", "predictor", type)
    monkeypatch.setattr(best, "PREDICTORS", none)
    with reading(sqlite_engine) as connection, pytest.raises(NotFound) as refusal:
        best.LayerIndex().predicted(connection, [], best.Scope())
    assert str(refusal.value) == "Predictions need the package tuna-predict."
    assert refusal.value.hint == "pip install tuna-predict"


def test_a_log_of_trials_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none: Plugins[type[Any]] = Plugins("tuna.trial_logs.of_nobody", "log of trials", type)
    monkeypatch.setattr(trial_log, "_WAYS", none)
    with pytest.raises(LibraryMissing) as refusal:
        trial_log.trial_log(str(tmp_path / "logs"), tmp_path)
    assert refusal.value.hint == "pip install tuna-trials"


def test_the_quickstart_without_the_vendor_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise NotFound(f"There is no library {name!r}.")

    monkeypatch.setattr(api, "get_library", missing)
    assert tune._vendor() is None
    assert "pip install tuna-onednn" in capsys.readouterr().out
