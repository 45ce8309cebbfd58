"""Results in a notebook: the best of each layer, a table, a data frame."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders import DRIVERS, DatabaseBuilder

from tuna import api
from tuna.configs import ConvConfig
from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna.errors import LibraryMissing
from tuna.vocabulary import BASELINE


@pytest.fixture
def session_id(home: Path) -> int:
    """A session of two layers with a tag, one with a baseline that seems the fastest, one with a
    baseline alone."""
    with writing(open_database()) as connection:
        build = DatabaseBuilder(connection)
        session, untuned = build.session(), build.solver("Untuned", algorithm=BASELINE)
        for layer, times in ((DRIVERS[1], {"A": 2.0, "B": 3.0}), (DRIVERS[2], {})):
            config = build.config(layer, tag="mine")
            build.winner(session, config, untuned, 1.0)
            for name, time_ms in times.items():
                build.winner(session, config, build.solver(name), time_ms)
        build.winner(session, build.config(ConvConfig(1, 8, 6, 6, 8, 1, 1)), build.solver("A"), 1.0)
    return session


def test_the_best_of_each_layer_is_no_baseline_unless_there_is_no_other(session_id: int) -> None:
    best = api.winners(session_id, "mine")
    assert [(row.solver, row.time_ms) for row in best] == [("A", 2.0), ("Untuned", 1.0)]
    rows = api.query(api.ResultFilter(session_id=session_id, tag="mine"))
    assert len(rows) == 4, "only the layers of the tag"


def test_rows_are_a_table_in_a_notebook_and_a_data_frame_with_pandas(
    session_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = api.winners(session_id, "mine")
    html = best._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<tr>") == 3
    evil = replace(best[0], layer="<script>")
    found = replace(best, rows=(evil,), more=True)
    assert "<script>" not in found._repr_html_()
    title, row, note = str(found).splitlines()
    assert (title.split()[:3], row.split()[0]) == (["layer", "solver", "ms"], "<script>")
    assert "there are more" in note
    assert "there are more" in found._repr_html_()
    if find_spec("pandas"):
        frame = found.frame()
        assert list(frame["layer"]) == ["<script>"]
        assert str(frame["measured_at"].dt.tz) == "UTC"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LibraryMissing, match="pandas"):
        found.frame()
