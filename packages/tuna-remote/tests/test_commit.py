"""The table that sessions commit to: the n best of each layer, and never a worse one for a better
one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa
from builders import DatabaseBuilder
from hypothesis import given
from hypothesis import strategies as st

from tuna.db.models import EnvironmentRow, FindDb
from tuna.errors import BadInput, NotFound
from tuna.exports.json_lines import JsonExporter
from tuna_remote.commit import Commit, commit

DRIVER = "./bin/MIOpenDriver gemm -m 32 -n 32 -k 32"
Timed = tuple[str, str, float, bool]  # solver, params, time in ms, noisy


def committed(path: Path, results: Sequence[Timed], n_best: int, driver: str = DRIVER) -> Commit:
    """Commit a session, in a database of its own, with these results of a layer."""
    from builders import memory

    engine = memory()
    with engine.begin() as connection:
        build = DatabaseBuilder(connection)
        session, config = build.session(), build.config(driver)
        for solver, params, time_ms, noisy in results:
            row = {"session_id": session, "config_id": config, "solver_id": build.solver(solver)}
            facts = {
                "time_ms": time_ms,
                "workspace_bytes": 0,
                "params": params,
                "noisy": noisy,
                "simulated": False,
            }
            connection.execute(sa.insert(FindDb).values(**row, **facts))
        report = commit(connection, session, path, n_best)
    engine.dispose()
    return report


def table(path: Path) -> list[tuple[str, str, float | None, bool]]:
    return [(one.solver, one.params, one.time_ms, one.noisy) for one in JsonExporter().read(path)]


def test_the_n_best_of_a_layer_stay_and_ties_go_by_key(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "table"
    found = committed(
        path, [("C", "1", 2.0, False), ("A", "2", 2.0, False), ("D", "0", 1.0, False)], 2
    )
    assert table(path) == [("D", "0", 1.0, False), ("A", "2", 2.0, False)]
    assert (found.results, found.added, found.layers) == (2, 2, 1)


def test_a_commit_never_replaces_a_better_result(tmp_path: Path) -> None:
    path = tmp_path / "table"
    committed(path, [("A", "1", 1.0, False), ("B", "1", 3.0, True)], 3)
    found = committed(
        path, [("A", "1", 2.0, False), ("B", "1", 4.0, False), ("C", "1", 9.0, False)], 3
    )
    assert table(path) == [("A", "1", 1.0, False), ("B", "1", 4.0, False), ("C", "1", 9.0, False)]
    assert found.added == 1
    before = path.read_bytes()
    assert committed(path, [("A", "1", 1.5, False), ("D", "1", 10.0, False)], 3).added == 0
    assert path.read_bytes() == before


def test_other_layers_stay(tmp_path: Path) -> None:
    path = tmp_path / "table"
    committed(path, [("A", "1", 1.0, False)], 1)
    committed(path, [("B", "1", 0.5, False)], 1, DRIVER.replace("-k 32", "-k 64"))
    assert sorted(table(path)) == [("A", "1", 1.0, False), ("B", "1", 0.5, False)]


@given(st.data())
def test_the_order_of_commits_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    timed = st.tuples(
        st.sampled_from("ABC"), st.just("1"), st.sampled_from([1.0, 2.0, 3.0]), st.just(False)
    )
    sessions = data.draw(
        st.lists(
            st.lists(timed, min_size=1, max_size=3, unique_by=lambda one: one[0]),
            min_size=1,
            max_size=3,
        )
    )
    n_best = data.draw(st.integers(1, 3))
    tables = set()
    for order in (sessions, sessions[::-1]):
        path = tmp_path_factory.mktemp("commit") / "table"
        for results in order:
            committed(path, random.sample(results, len(results)), n_best)
        tables.add(tuple(table(path)))
    best: dict[str, float] = {}
    for solver, _, time_ms, _ in itertools.chain(*sessions):
        best[solver] = min(time_ms, best.get(solver, time_ms))
    expected = sorted(best.items(), key=lambda one: (one[1], one[0]))[:n_best]
    assert tables == {tuple((solver, "1", time_ms, False) for solver, time_ms in expected)}


def test_what_cannot_be_committed(tmp_path: Path, sqlite_engine: sa.Engine) -> None:
    path = tmp_path / "table"
    with sqlite_engine.begin() as connection:
        session = DatabaseBuilder(connection).session()
        with pytest.raises(NotFound, match="no result to commit"):
            commit(connection, session, path, 1)
        connection.execute(sa.update(EnvironmentRow).values(flags={"emulator": "qemu"}))
        with pytest.raises(BadInput, match="qemu emulates"):
            commit(connection, session, path, 1)
    path.write_text("something else\n")
    with pytest.raises(BadInput, match="table:1"):
        committed(path, [("A", "1", 1.0, False)], 1)
    assert path.read_text() == "something else\n"
    path.unlink()
    committed(path, [("A", "1", 1.0, False)], 1)
    path.write_text(path.read_text().replace("--b_w 32", "--b_w 64"))
    before = path.read_bytes()
    with pytest.raises(BadInput, match="under the key of another layer"):
        committed(path, [("A", "1", 2.0, False)], 1)
    assert path.read_bytes() == before
