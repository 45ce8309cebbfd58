"""`tuna tune` on a list of layers, and `tuna results`: one command in, the winners out."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from builders import DatabaseBuilder

from tuna.api import running
from tuna.cli import tuned
from tuna.coordinator.session_run import Progress
from tuna.db.engine import make_engine, writing
from tuna.db.models import ConfigRow, ConfigTag, Job
from tuna_models.cli import tune

TypeIn = Callable[..., Any]


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sessions that were run: here only noted."""
    ran: list[int] = []
    monkeypatch.setattr(tuned, "work_through", lambda number, **_: ran.append(number) or 0)
    return ran


def test_a_list_of_layers_is_prepared_and_run_and_again_resumed(
    type_in: TypeIn, layers: Path, worked: list[int]
) -> None:
    words = ("tuna", "tune", layers, "-t", "small", "--library", "noop", "--option", "trials=1")
    first = type_in(*words)
    assert first.code == 1, "no layer has a winner, as nothing was run"
    assert "2 accepted" in first.out
    assert "New jobs added: 20" in first.out
    again = type_in(*words)
    assert "session 1 (already there)" in again.out
    assert "New jobs added: 0" in again.out
    assert worked == [[1], [1]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-t", "a", "--library", "nop"), "did you mean noop?"),
        (("-t", "a", "--library", "noop", "--option", "trails=1"), "did you mean trials?"),
        (("-t", "a", "--library", "noop", "--condition", "x=y"), "no condition 'x'"),
        (("-t", "a", "--library", "noop", "-o", "/proc/foo"), "nothing can be written"),
        (("-t", " ", "--library", "noop"), "1 to 128 characters"),
        (("--library", "noop"), "--tag"),
        (
            ("-t", "a", "--library", "noop", "--batch", 8),
            "--batch is for models, and FILE is a list of layers",
        ),
        (("-t", "a", "--library", "noop", "--strict"), "no_such_flag"),
    ],
    ids=str,
)
def test_everything_is_checked_before_anything_is_stored(
    type_in: TypeIn, layers: Path, worked: list[int], words: tuple[object, ...], said: str
) -> None:
    layers.write_text(f"{layers.read_text()}MIOpenDriver conv --no_such_flag 1 -F 1\n")
    ended = type_in("tuna", "tune", layers, *words)
    assert ended.code in (2, 3)
    assert said in ended.err
    assert type_in("tuna", "configs", "-t", "a").code == 3
    assert json.loads(type_in("tuna", "status", "--json").out) == []
    assert worked == []


@pytest.mark.parametrize("name", ["net.onnx", "net.pt2", "NET.ONNX"])
def test_some_files_are_models(
    type_in: TypeIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(tune.tune, "callback", lambda **given: seen.update(given))
    ended = type_in(
        "tuna", "tune", tmp_path / name, "--batch", 8, "--no-winograd", "-o", tmp_path / "net.so"
    )
    assert ended.code == 0, ended
    assert (seen["file"], seen["batch"], seen["winograd"]) == (tmp_path / name, 8, False)
    assert (seen["output"], seen["candidates"]) == (tmp_path / "net.so", 4)
    ended = type_in("tuna", "tune", tmp_path / name, "-t", "x")
    assert ended.code == 2
    assert "--tag is for layers and kernels, and FILE is a model" in ended.err


@pytest.mark.parametrize("words", [("tune",), ("import", "-t", "x")])
def test_a_file_whose_name_ends_almost_as_that_of_a_model_is_not_taken_for_layers(
    type_in: TypeIn, tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = tmp_path / "model.onx"
    path.write_bytes(b"\x08\x08\x12\x07pytorch")
    ended = type_in("tuna", *words, path)
    assert ended.code == 2
    assert ended.err == (
        "Error: model.onx is not a list of layers, which is a text, and does not end as a model or"
        " a kernel does.\n  did you mean .onnx? endings: .onnx, .pt2, .py\n"
    )


NORM = "./bin/MIOpenDriver bnorm -n 8 -c 16 -H 14 -W 14 -F 1 -m 1"


def test_layers_without_a_solver_are_rows_with_the_reason(
    type_in: TypeIn, layers: Path, worked: list[int], tmp_path: Path
) -> None:
    """They vanished: "Layers tuned 2 of 2" where three were asked for, and exit code 0 in the
    end."""
    layers.write_text(f"{layers.read_text()}{NORM}\n")
    words = ("tuna", "tune", layers, "-t", "small", "--library", "noop", "--option", "trials=1")
    for new in (20, 0):
        ended = type_in(*words)
        assert ended.code == 1
        assert f"New jobs added: {new}" in ended.out
        assert "1 layer left out: no solver for batch norm" in ended.err
        (row,) = (line for line in ended.out.splitlines() if "bnorm 8x16x14x14" in line)
        assert "no solver for batch norm" in row
    (row,) = (
        line
        for line in type_in("tuna", "results", "--session-id", 1).out.splitlines()
        if "bnorm" in line
    )
    assert "no solver for batch norm" in row
    assert "1 layer without a solver" in type_in("tuna", "status").out
    figures = json.loads(type_in("tuna", "report", "--session-id", 1, "--json").out)
    assert [layer["no_winner"] for layer in figures["layers"]][2:] == ["no solver for batch norm"]
    page = tmp_path / "page.html"
    type_in("tuna", "report", "--session-id", 1, "-o", page)
    assert "no winner: no solver for batch norm" in page.read_text()
    type_in("tuna", "session", "archive", 1, tmp_path / "session.tuna")
    assert type_in("tuna", "session", "delete", 1, "--cancel", "--yes").code == 0
    restored = type_in("tuna", "session", "restore", tmp_path / "session.tuna")
    assert "no solver for batch norm" in type_in("tuna", "results", "--session-id", 1).out, restored


def test_layers_of_other_tags_are_none_of_the_session(
    type_in: TypeIn, layers: Path, worked: list[int]
) -> None:
    norm = layers.with_name("norm.txt")
    norm.write_text(f"{NORM}\n{layers.read_text()}")
    type_in("tuna", "import", norm, "-t", "other")
    type_in("tuna", "tune", layers, "-t", "small", "--library", "noop", "--option", "trials=1")
    type_in("tuna", "applicability", "--session-id", 1)
    assert "bnorm" not in type_in("tuna", "results", "--session-id", 1).out


def test_a_list_without_a_solver_for_any_layer_leaves_nothing(
    type_in: TypeIn, layers: Path, worked: list[int]
) -> None:
    """It said "run `tuna applicability`", which had run, named no layer, and left an empty
    session."""
    layers.write_text(f"{NORM}\n")
    ended = type_in("tuna", "tune", layers, "-t", "small", "--library", "noop")
    assert ended.code == 2
    assert ended.err.splitlines() == [
        "Error: noop has a solver for none of these layers.",
        "  bnorm 8x16x14x14 spatial NCHW fp32 F: no solver for batch norm",
    ]
    assert json.loads(type_in("tuna", "session", "list", "--json").out) == []
    assert type_in("tuna", "configs", "-t", "small").code == 3
    assert worked == []


def test_rejected_lines_are_named_in_their_order(type_in: TypeIn, layers: Path) -> None:
    """The error of an unsupported line came after those of all lines that are wrong."""
    wrong, unsupported = "MIOpenDriver conv --no_such_flag 1 -F 1", "./bin/MIOpenDriver pool -n 1"
    layers.write_text("\n".join((unsupported, wrong, unsupported, NORM, wrong, "")))
    ended = type_in("tuna", "import", layers, "-t", "small")
    places = [line.split(":")[1] for line in ended.err.splitlines() if line.startswith(str(layers))]
    assert places == ["1", "2", "5"], ended.err


def test_the_log_of_a_run_is_in_a_file_and_not_in_the_output(
    type_in: TypeIn, layers: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line such as `chunk returned [tuna.coordinator.drain]` was in the middle of the output."""

    def run_sessions(*_: object, **__: object) -> Progress:
        structlog.get_logger("tuna.coordinator.drain").warning(
            "chunk returned", reason="worker shutdown"
        )
        return Progress({}, 1, 0, 0, sessions={1: Progress({"evaluated": 1}, 1, 0, 0)})

    monkeypatch.setattr(running, "run_sessions", run_sessions)
    ended = type_in(
        "tuna", "tune", layers, "-t", "small", "--library", "noop", "--option", "trials=1"
    )
    assert "chunk returned" not in ended.out + ended.err
    (log,) = (home / "logs").glob("coordinator-*.log")
    assert "chunk returned" in log.read_text()
    assert str(log) in "".join(ended.err.split())


@pytest.fixture
def measured(home: Path) -> int:
    """A session with two layers, of two solvers and of one."""
    engine = make_engine(f"sqlite:///{home}/tuna.sqlite")
    with writing(engine) as connection:
        build = DatabaseBuilder(connection)
        session_id = build.session(library="tvm")
        for number, (driver, solver, time_ms) in enumerate(
            (("conv -n 1 -c 8 -H 8 -W 8 -k 8", "Slow", 2.0),
             ("conv -n 1 -c 8 -H 8 -W 8 -k 8", "Fast", 1.0),
             ("conv -n 2 -c 8 -H 8 -W 8 -k 8", "Slow", 3.0))
        ):  # fmt: skip
            config = build.config(f"./bin/MIOpenDriver {driver} -F 1")
            build.winner(session_id, config, build.solver(solver), time_ms, params=f"tile={number}")
    engine.dispose()
    return session_id


def test_results_are_the_winners_with_params(measured: int, type_in: TypeIn) -> None:
    table = type_in("tuna", "results", "--session-id", measured)
    assert table.code == 0
    assert "tile=1" in table.out
    assert "tile=0" not in table.out
    documents = json.loads(type_in("tuna", "results", "--session-id", measured, "--json").out)
    assert [(one["solver"], one["time_ms"], one["params"]) for one in documents] == [
        ("Fast", 1.0, "tile=1"), ("Slow", 3.0, "tile=2"),
    ]  # fmt: skip
    assert {"spread", "max_error", "environment", "command", "noisy", "simulated"} <= documents[
        0
    ].keys()
    rows = list(
        csv.DictReader(
            io.StringIO(type_in("tuna", "results", "--session-id", measured, "--csv").out)
        )
    )
    assert [row["params"] for row in rows] == ["tile=1", "tile=2"]
    assert type_in("tuna", "results", "--session-id", 99).code == 3


def test_a_session_without_results_says_so(loaded: TypeIn) -> None:
    ended = loaded("tuna", "results", "--session-id", 1)
    assert (ended.code, ended.out) == (0, "")
    assert "no results" in ended.err
    assert loaded("tuna", "results", "--session-id", 1, "--json").out == "[]\n"


def test_layers_that_needed_no_trial_are_named_with_the_known_result(
    loaded: TypeIn, home: Path
) -> None:
    """It said that there are no results."""
    engine = make_engine(f"sqlite:///{home}/tuna.sqlite")
    with writing(engine) as connection:
        configs = (
            connection.execute(sa.select(Job.config_id).distinct().order_by(Job.config_id))
            .scalars()
            .all()
        )
        met = sa.update(Job).where(Job.config_id == configs[0])
        connection.execute(met.values(state="evaluated", stopped="target met by 1 ms in session 7"))
        label = connection.execute(
            sa.select(ConfigRow.label).where(ConfigRow.id == configs[0])
        ).scalar_one()
        connection.execute(sa.insert(ConfigTag).values(tag="other", config_id=configs[1]))
    ended = loaded("tuna", "results", "--session-id", 1)
    assert (ended.out, ended.err) == (
        f"{label}: needed no trial, target met by 1 ms in session 7\n",
        "",
    )
    assert "no results" in loaded("tuna", "results", "--session-id", 1, "-t", "other").err
    with writing(engine) as connection:
        copies = [
            {"key": f"k{n}", "kind": "gemm", "driver": "gemm", "label": f"layer {n}", "json": "{}"}
            for n in range(30)
        ]
        connection.execute(sa.insert(ConfigRow), copies)
        job = (
            connection.execute(sa.select(Job.__table__).where(Job.stopped.is_not(None)).limit(1))
            .mappings()
            .one()
        )
        ids = (
            connection.execute(sa.select(ConfigRow.id).where(ConfigRow.key.startswith("k")))
            .scalars()
            .all()
        )
        connection.execute(
            sa.insert(Job),
            [{**job, "id": None, "config_id": n, "stopped": "target met by golden"} for n in ids],
        )
    engine.dispose()
    lines = loaded("tuna", "results", "--session-id", 1).out.splitlines()
    assert (len(lines), lines[-1]) == (21, "and 11 more layers: `tuna report --session-id 1`")


def test_help_says_what_an_option_means_for_layers_and_for_models(type_in: TypeIn) -> None:
    """It spoke of layers alone."""
    said = " ".join(type_in("tuna", "tune", "--help").out.split())
    for name, layers, models in (
        ("--output", "Layers: the folder to write databases", "the shared library to build"),
        ("--minutes", "Layers and kernels: a search ends by then", "all tasks end by then"),
    ):
        _, _, after = said.partition(f"{name} ")
        assert 0 <= after.find(layers) < after.find(f"Models: {models}"), name
    assert "Models: shape of an input" in said
    assert "Layers: what is tuned. (default: tvm)" in said
