"""`tuna query`: which rows, in which order, with what is known of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from builders import DRIVERS, START, DatabaseBuilder, memory

from tuna.configs import ConvConfig, TaskConfig, parse_line
from tuna.db import models, networks
from tuna.db.engine import reading, writing
from tuna.errors import BadInput, NotFound
from tuna.results import result_query
from tuna.results.result_query import query
from tuna.results.result_rows import ResultFilter
from tuna.vocabulary import BASELINE

CONV, POINTWISE, GEMM = (parse_line(DRIVERS[place])[0] for place in (1, 2, 5))
TASK = TaskConfig(
    core=ConvConfig(1, 8, 56, 56, 8, 3, 3, 1, 1), layouts="native", epilogue=("bias", "relu")
)
LATER = START + timedelta(days=30)


def scene(connection: sa.Connection) -> DatabaseBuilder:
    """Two sessions of one environment and one of another, with trials, an import and a golden
    version."""
    build = DatabaseBuilder(connection)
    first = build.session(reason="first")
    environment = connection.execute(sa.select(models.Session.environment_id)).scalar_one()
    values = {"environment_id": environment, "reason": "second", "created_at": START}
    second = build.insert(models.Session, **values)
    other = build.session("miopen", "gfx90a", 104, "imported", device="MI250")
    direct, winograd = build.solver("Direct"), build.solver("Winograd", algorithm="Winograd")
    assembly = build.solver("ConvAsm", library="miopen")
    untuned = build.solver("Untuned", algorithm=BASELINE)
    conv, pointwise, gemm, task = (
        build.config(layer, tag="net") for layer in (CONV, POINTWISE, GEMM, TASK)
    )
    for session, times in ((first, (3.0, 2.0)), (second, (2.5, 2.0))):
        job = build.job(session, conv, direct)
        for number, time_ms in enumerate(times):
            facts = {
                "low_ms": 0.9 * time_ms,
                "high_ms": 1.1 * time_ms,
                "max_error": 1e-7,
                "clock": "wall",
            }
            build.trial(job, number, time_ms, params=f"{session}{number}", **facts)
        build.trial(job, 7, None, cause="run_error")
        build.step(job, "compile", 1, 1)
        build.step(job, "eval", 1, 1, f"cpu{session}@host", worker="w")
        build.winner(
            session, conv, direct, 2.0, job=job, trial_number=1, params=f"{session}1", clock="wall"
        )
    build.winner(first, conv, winograd, 1.5, noisy=True)
    build.winner(first, conv, untuned, 9.0, simulated=True)
    build.winner(first, task, direct, 0.5)
    build.winner(second, gemm, direct, 0.25, updated_at=LATER)
    imported = {
        "job_id": None,
        "source": "gfx90a68.HIP.fdb.txt (sha256 12ab)",
        "trial_number": None,
    }
    for layer, time_ms in ((conv, 0.1), (pointwise, None)):
        row = {
            "workspace_bytes": 0,
            "params": "p",
            "algorithm": "",
            "updated_at": START,
            **imported,
        }
        build.insert(
            models.FindDb,
            session_id=other,
            config_id=layer,
            solver_id=assembly,
            time_ms=time_ms,
            **row,
        )
    golden = build.insert(
        models.Golden, library="tvm", version=3, state="promoted", created_at=START
    )
    entry = {
        "golden_id": golden,
        "arch": "znver5",
        "num_cu": 2,
        "session_id": first,
        "environment_id": environment,
    }
    entry |= {
        "workspace_bytes": 0,
        "params": "11",
        "algorithm": "",
        "worker": "w",
        "device": "cpu1@host",
    }
    build.insert(
        models.GoldenEntry,
        config_id=conv,
        solver_id=direct,
        time_ms=2.0,
        measured_at=START,
        source=None,
        **entry,
    )
    device = {"environment_id": environment, "updated_at": START}
    for name in ("cpu1@host", "cpu2@host"):
        build.insert(models.DeviceRow, name=name, **device)
    networks.add_model(connection, networks.Named("net", "1"))
    networks.add_framework(connection, networks.Named("onnx", "17"))
    networks.set_weights(connection, 1, 1, 1, {conv: 3, task: 1})
    return build


@pytest.fixture(scope="module")
def connection() -> sa.Connection:
    """The scene in memory."""
    found = memory().connect()
    scene(found)
    return found


def seen(connection: sa.Connection, **wanted: Any) -> list[tuple[str, float | None, str]]:
    """Solver, time and source of each row."""
    return [
        (row.solver, row.time_ms, row.source) for row in query(connection, ResultFilter(**wanted))
    ]


ALL = [
    ("ConvAsm", 0.1, "import"),
    ("Winograd", 1.5, "session"),
    ("Direct", 2.0, "session"),
    ("Direct", 2.0, "golden"),
    ("Direct", 2.0, "session"),
    ("Untuned", 9.0, "session"),
    ("ConvAsm", None, "import"),
    ("Direct", 0.25, "session"),
    ("Direct", 0.5, "session"),
]


def test_rows_come_by_layer_then_time_on_both_databases(engine: sa.Engine) -> None:
    with writing(engine) as connection:
        scene(connection)
    with reading(engine) as connection:
        assert seen(connection) == ALL
        assert seen(connection, shape=("in_h=56",), dtype="fp32", op="conv") == [*ALL[:7], ALL[8]]
        assert [
            row.params
            for row in query(connection, ResultFilter(n_best=2, solver="Direct", model="net"))
        ] == [
            # of equal times that with the lesser params; of the task no trial is stored
            *("11", "21"),
        ]
        assert seen(connection, since=LATER) == [ALL[7]]
        assert seen(connection, device="cpu2@host", arch="znver5") == [ALL[4]]


def test_the_order_does_not_depend_on_how_layers_are_looked_for(
    connection: sa.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = {"op": "convolution", "arch": "znver5"}
    before = seen(connection, **narrow)
    assert before == [*ALL[1:6], ALL[8]]
    monkeypatch.setattr(result_query, "_FEW", 1)
    assert seen(connection, **narrow) == before
    assert seen(connection) == ALL


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"model": "net"}, [*ALL[:6], ALL[8]]),
        ({"model": "net@1", "solver": "Winograd"}, [ALL[1]]),
        ({"tag": "net"}, ALL),
        ({"op": "gemm"}, [ALL[7]]),
        ({"op": "task"}, [ALL[8]]),
        ({"shape": ("1x1",)}, [ALL[6], ALL[7]]),
        ({"shape": ("fil_h=1", "out_channels=256")}, [ALL[6]]),
        ({"shape": ("trans_a=false",)}, [ALL[7]]),
        ({"shape": ("k=1",)}, []),
        ({"layer": CONV.label}, ALL[:6]),
        ({"layer": CONV.text(), "library": "miopen"}, [ALL[0]]),
        ({"layer": GEMM.key[:8]}, [ALL[7]]),
        ({"layer": "nothing"}, []),
        ({"dtype": "FP16"}, []),
        ({"device": "mi2"}, [ALL[0], ALL[6]]),
        ({"session_id": 2}, [ALL[2], ALL[7]]),
        ({"session_id": 2, "solver": "Winograd"}, []),
        ({"since": LATER + timedelta(seconds=1)}, []),
    ],
)
def test_a_condition_leaves_what_meets_it(
    connection: sa.Connection, wanted: dict[str, Any], expected: list[tuple[str, float | None, str]]
) -> None:
    assert seen(connection, **wanted) == expected


def test_an_environment_is_named_by_how_its_key_begins(connection: sa.Connection) -> None:
    key = query(connection, ResultFilter(library="miopen"))[0].environment
    assert seen(connection, environment=key[:6]) == [ALL[0], ALL[6]]


def test_the_n_best_are_the_fastest_of_layer_solver_and_environment(
    connection: sa.Connection,
) -> None:
    def times(n_best: int, **wanted: Any) -> list[tuple[float | None, int, int | None]]:
        rows = query(connection, ResultFilter(n_best=n_best, layer=CONV.key, **wanted))
        return [(row.time_ms, row.session_id, row.trial_number) for row in rows]

    assert times(1) == [(0.1, 3, None), (2.0, 1, 1)]
    assert times(3, arch="znver5") == [(2.0, 1, 1), (2.0, 2, 1), (2.5, 2, 0)]
    assert times(9, session_id=1) == [(2.0, 1, 1), (3.0, 1, 0)]
    assert times(9, device="cpu2@host") == [(2.0, 2, 1), (2.5, 2, 0)]
    assert times(9, since=LATER) == []


def test_a_row_says_where_it_comes_from_and_how_it_is_repeated(connection: sa.Connection) -> None:
    imported, marked, measured, golden, *_ = query(connection, ResultFilter(layer=CONV.key))
    assert measured.command.startswith("tuna reproduce --library tvm --step eval --solver Direct")
    assert "--index 1 " in measured.command
    assert (measured.worker, measured.device, measured.spread) == (
        "w",
        "cpu1@host",
        pytest.approx(0.1),
    )
    assert (measured.max_error, measured.clock, measured.marks) == (1e-7, "wall", "")
    assert (golden.golden, golden.command) == (3, "tuna golden explain 3 1 --library tvm")
    assert golden.low_ms == measured.low_ms
    assert imported.imported_from == "gfx90a68.HIP.fdb.txt (sha256 12ab)"
    assert (
        imported.command == f"tuna query --session-id 3 --solver ConvAsm --layer {CONV.key} --json"
    )
    assert (imported.device, imported.job_id) == ("MI250", None)
    assert marked.marks == "noisy"
    assert query(connection, ResultFilter(solver="Untuned"))[0].marks == "simulated, baseline"


def test_an_answer_is_cut_at_its_limit_and_says_so(connection: sa.Connection) -> None:
    for limit in (1, 6, 8):
        found = query(connection, ResultFilter(limit=limit))
        assert (len(found), found.more) == (limit, True)
        assert [row.time_ms for row in found] == [time for _, time, _ in ALL[:limit]]
    assert not query(connection, ResultFilter(limit=9)).more


@pytest.mark.parametrize(
    ("wanted", "error", "sentence"),
    [
        ({"model": "alex"}, NotFound, "Unknown model 'alex'"),
        ({"tag": "x"}, NotFound, "tag 'x'"),
        ({"op": "softmax"}, NotFound, "kind of layer 'softmax'"),
        ({"dtype": "fp3"}, BadInput, "Unknown data type 'fp3'"),
        ({"shape": ("height=3",)}, BadInput, "field 'height'"),
        ({"arch": "gfx1"}, NotFound, "architecture 'gfx1'"),
        ({"device": "TPU"}, NotFound, "device 'TPU'"),
        ({"environment": "%"}, NotFound, "environment '%'"),
        ({"solver": "S"}, NotFound, "Unknown solver 'S'"),
        ({"session_id": 9}, NotFound, "Unknown session 9"),
        ({"limit": 0}, BadInput, "not 0"),
        ({"n_best": 0}, BadInput, "not 0"),
    ],
)
def test_a_name_that_there_is_not_is_an_error(
    connection: sa.Connection, wanted: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        query(connection, ResultFilter(**wanted))


@pytest.mark.parametrize("wanted", [{}, {"n_best": 2}, {"model": "net"}, {"solver": "Direct"}])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_pages_by_cursor_are_the_whole_answer(
    connection: sa.Connection, wanted: dict[str, Any], limit: int
) -> None:
    whole = query(connection, ResultFilter(**wanted)).rows
    pages, cursor = [], ""
    while not pages or cursor:
        page = query(connection, ResultFilter(limit=limit, **wanted), cursor=cursor)
        assert page.more == bool(page.cursor)
        pages += page.rows
        cursor = page.cursor
    assert tuple(pages) == whole


@pytest.mark.parametrize(
    "text", ["x", "e30", "W10", "WzEsMV0", "WyJ4Il0", "W1sxLDIsMyw0LDUsNiw3XSwxXQ", "å"]
)
def test_a_cursor_of_something_else_is_refused(connection: sa.Connection, text: str) -> None:
    with pytest.raises(BadInput, match="cursor is not one"):
        query(connection, ResultFilter(), cursor=text)
