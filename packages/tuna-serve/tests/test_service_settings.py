"""Settings of the service beside the core's: in variables and in the settings file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuna.errors import BadInput
from tuna.settings import OF_DISTRIBUTIONS, get_settings, ignored_settings, misspelt
from tuna_serve.settings import ServiceSettings, service_settings


@pytest.fixture
def file(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = home / "mine.toml"
    monkeypatch.setenv("TUNA_CONFIG", str(path))
    return path


def test_the_file_and_variables_set_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("max_attempts = 7\nspace_mib = 5\nsubmit_open = 3\n")
    monkeypatch.setenv("TUNA_SUBMIT_OPEN", "4")
    assert get_settings().max_attempts == 7
    found = service_settings()
    assert (found.space_mib, found.submit_open, found.request_mib) == (5, 4, 640)
    assert service_settings() is found


def test_settings_of_the_service_are_read_again_with_the_cores(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service_settings().space_mib == 10_240
    monkeypatch.setenv("TUNA_SPACE_MIB", "5")
    get_settings.cache_clear()
    assert service_settings().space_mib == 5


def test_what_is_neither_the_cores_nor_a_packages_is_refused(file: Path) -> None:
    file.write_text("space_mib = 5\nspace_mbi = 5\n")
    with pytest.raises(BadInput, match="space_mbi, which is no setting; did you mean space_mib"):
        get_settings()


def test_an_unusable_one_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNA_SPACE_MIB", "0")
    with pytest.raises(BadInput, match="The setting TUNA_SPACE_MIB is not usable"):
        service_settings()


def test_a_misspelt_variable_is_told_and_a_right_one_is_not(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNA_SPACE_MIB", "5")
    monkeypatch.setenv("TUNA_SUBMIT_OPNE", "5")
    assert misspelt() == {"TUNA_SUBMIT_OPNE": "TUNA_SUBMIT_OPEN"}


def test_the_core_knows_the_names_for_machines_without_the_service() -> None:
    assert set(OF_DISTRIBUTIONS["tuna-serve"]) == ServiceSettings.model_fields.keys()
    assert ignored_settings() == []
