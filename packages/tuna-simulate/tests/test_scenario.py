"""Scenario files: TOML and JSON say the same, and a mistake is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from tuna.errors import BadInput
from tuna_simulate.scenario import Scenario, read_scenario

STAGE = {"step": "build", "queue": "cpu", "seconds": 1.0}


def document(**jobs: Any) -> dict[str, Any]:
    return {"sessions": [{"jobs": [{"steps": [STAGE], **jobs}]}], "pools": [{"queue": "cpu"}]}


def test_toml_and_json_are_read_alike(tmp_path: Path) -> None:
    given = read_scenario(ROOT / "examples" / "two_jobs.toml")
    path = tmp_path / "same.json"
    path.write_text(given.model_dump_json())
    assert read_scenario(path) == given
    assert [session.copies for session in given.sessions] == [2]


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"sessions": [], "pools": [{"queue": "cpu"}]}, "sessions"),
        (document(rounds=0), "sessions.0.jobs.0.rounds"),
        (document(steps=[{**STAGE, "seconds": -1}]), "sessions.0.jobs.0.steps.0.seconds"),
        (document(steps=[{**STAGE, "seconds": []}]), "sessions.0.jobs.0.steps.0.seconds"),
        (document(steps=[{**STAGE, "second": 1}]), "second"),
        (document(steps=[STAGE, STAGE]), "distinct names"),
        (
            document(steps=[{**STAGE, "queue": "device"}]),
            "no pool that stays serves the queue 'device'",
        ),
        (document() | {"pools": [{"queue": "cpu", "leaves_s": 5}]}, "no pool that stays"),
        (document(count=10_000_000, rounds=10), "stages are more than"),
        ([1], "dictionary"),
    ],
)
def test_a_mistake_is_named_with_its_place(wrong: Any, where: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(BadInput, match=where.replace(".", r"\.")):
        read_scenario(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.toml", b"x = ["), ("a.json", b"{"), ("a.json", b"\xff"), ("a", b"[" * 99999)],
)
def test_what_is_neither_toml_nor_json_is_refused(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=r"neither TOML|not UTF-8"):
        read_scenario(tmp_path / name)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(BadInput, match=f"{path} cannot be read: "):
            read_scenario(path)


def test_the_page_shows_every_field() -> None:
    page = (ROOT / "docs" / "scheduling.md").read_text()
    kinds = [Scenario]
    for kind in kinds:  # grows
        for name, field in kind.model_fields.items():
            assert f"`{name}`" in page, f"{kind.__name__}.{name}"
            kinds += [
                inner
                for inner in getattr(field.annotation, "__args__", ())
                if hasattr(inner, "model_fields")
            ]
    assert {kind.__name__ for kind in kinds} >= {"Stage", "Jobs", "SimulatedSession", "Pool"}
