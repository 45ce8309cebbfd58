"""A setting that is another for a test."""

from __future__ import annotations

import pytest

from tuna.settings import get_settings


def change_setting(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """Set a variable until the end of the test, and read the settings anew."""
    monkeypatch.setenv(variable, value)
    get_settings.cache_clear()
