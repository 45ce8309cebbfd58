"""The files that took longest when they were recorded are begun first."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import durations
import pytest
from durations import Durations


def items(*nodeids: str) -> list[Any]:
    return [SimpleNamespace(nodeid=nodeid) for nodeid in nodeids]


def test_files_are_sorted_by_recorded_seconds_and_keep_the_order_of_their_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "record").write_text('{"b.py": 2.0, "c.py": 30.5}')
    monkeypatch.setattr(durations, "_RECORD", tmp_path / "record")
    order = items("a.py::2", "b.py::1", "c.py::2", "c.py::1", "a.py::1")
    Durations(record=False).pytest_collection_modifyitems(order)
    assert [item.nodeid for item in order] == [
        "c.py::2",
        "c.py::1",
        "b.py::1",
        "a.py::2",
        "a.py::1",
    ]


def test_a_run_renews_its_files_and_forgets_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("new.py", "short.py", "other.py"):
        (tmp_path / name).touch()
    (tmp_path / "record").write_text('{"gone.py": 9.0, "other.py": 5.0, "short.py": 7.0}')
    monkeypatch.setattr(durations, "_RECORD", tmp_path / "record")
    monkeypatch.setattr(durations, "_ROOT", tmp_path)
    here: Any = SimpleNamespace(config=SimpleNamespace())
    for record in (False, True):
        run = Durations(record)
        for nodeid, seconds in (("new.py::1", 1.25), ("new.py::2", 2.0), ("short.py::1", 0.1)):
            run.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=seconds))
        run.pytest_sessionfinish(here)
        written = json.loads((tmp_path / "record").read_text())
        assert ("gone.py" in written) is not record
    assert written == {"new.py": 3.2, "other.py": 5.0}
