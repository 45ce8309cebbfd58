"""The doctor names a Redis or Valkey with known holes."""

from __future__ import annotations

import pytest

from tuna.api.checks.servers import _holes
from tuna.services.redis_client import first_safe


@pytest.mark.parametrize(
    ("name", "version", "fixed"),
    [
        ("Redis", "6.0.16", "6.2.20"),
        ("Redis", "6.2.14", "6.2.20"),
        ("Redis", "6.2.20", ""),
        ("Redis", "7.0.15", "7.2.11"),
        ("Redis", "7.4.6", "7.4.9"),
        ("Redis", "7.4.9", ""),
        ("Redis", "8.2.2", "8.2.6"),
        ("Redis", "8.6.3", ""),
        ("Redis", "9.0.0", ""),
        ("Valkey", "7.2.4", "7.2.13"),
        ("Valkey", "8.1.4", "8.1.7"),
        ("Valkey", "8.1.7", ""),
        ("Valkey", "9.1.0", ""),
    ],
)
def test_a_version_with_known_holes_is_named(name: str, version: str, fixed: str) -> None:
    parts = tuple(map(int, version.split(".")))
    assert ".".join(map(str, first_safe(name, parts) or ())) == fixed
    info = (
        {"redis_version": "7.2.4", "valkey_version": version}
        if name == "Valkey"
        else {"redis_version": version}
    )
    found = _holes(info, embedded=False)
    assert found.text == f"{name} {version}, " + (
        f"vulnerabilities fixed in {fixed}" if fixed else "no known vulnerabilities"
    )
    assert found.ok, "it works"
    assert found.warning == bool(fixed)
    assert not fixed or f"use {name} {fixed} or newer" in found.hint
