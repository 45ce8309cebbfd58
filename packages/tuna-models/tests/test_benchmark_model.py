"""`tuna benchmark-model`: models run and are timed on a board behind TVM RPC, and on this machine,
through the same calls."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import pytest
import relax_models
import rpc_servers
import tvm
from command_lines import Ended
from compiled import compile_to

from tuna.errors import BadInput, NotFound, ServiceError
from tuna.libraries.registry import get_library
from tuna.libraries.tvm.boards import Tracker
from tuna.sandbox.processes import Child
from tuna_models import api, arguments
from tuna_models.benchmarks import benchmark
from tuna_models.benchmarks.benchmark import BenchmarkDevice, BenchmarkInputs, BenchmarkProcess
from tuna_models.compiler import build
from tuna_models.reading import importer

KEY = "loopback"
X = "x=2,3:float32"


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    with rpc_servers.board(KEY) as found:
        yield found


@pytest.fixture(params=["board", "local"])
def where(request: pytest.FixtureRequest) -> list[str]:
    """The words that say where."""
    if request.param == "local":
        return ["--local"]
    return on(request.getfixturevalue("tracker"))


def given(*texts: str) -> BenchmarkInputs:
    return BenchmarkInputs([arguments.parse(text) for text in texts])


def on(tracker: Tracker, key: str = KEY) -> list[str]:
    return ["--tvm-tracker", str(tracker), "--device-key", key]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed does not matter here."""
    monkeypatch.setattr(benchmark, "_ROUND_S", 0.001)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The compiled library of a model, made once."""
    folder, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def find(model: Callable[..., Any], *args: Any) -> Path:
        name = "_".join([model.__name__, *map(str, args)])
        made[name] = made.get(name) or relax_models.build(model(*args), folder / f"{name}.so")
        return made[name]

    return find


Type = Callable[..., Ended]


@pytest.mark.parametrize(
    ("model", "words", "extents", "outputs"),
    [
        (relax_models.static, ["--input", X], [{}], [[[2, 3]]]),
        (relax_models.symbolic, ["--input", "x=n,3:float32", "--shape", "n=1,4,8"],
         [{"n": n} for n in (1, 4, 8)], []),
        (relax_models.shape_argument, ["--input", "shape=n,5:shape", "--shape", "n=2,7"],
         [{"n": 2}, {"n": 7}], []),
        (relax_models.tuple_parameter,
         ["--input", X, "--input", "p.0=2,3:float32", "--input", "p.1=2,3:float32"], [{}], []),
        (relax_models.tuple_result, ["--input", X], [{}], []),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)  # fmt: skip
def test_models_of_every_kind_are_timed(
    type_in: Type,
    library: Callable[..., Path],
    where: list[str],
    model: Any,
    words: list[str],
    extents: Any,
    outputs: Any,
) -> None:
    ended = type_in("tuna", "benchmark-model", library(model), *where, *words, "--json")
    assert ended.code == 0, ended
    rows = json.loads(ended.out)
    assert [row["extents"] for row in rows] == extents
    for row in rows:
        assert 0 < row["low_ms"] <= row["time_ms"] <= row["high_ms"]
        assert (row["error"], row["repeats"], row["ratio"]) == (0.0, benchmark.ROUNDS, 1.0)
    if "--local" not in where:
        assert {(row["device"], row["tracker"]) for row in rows} == {(KEY, where[1])}
    listed = json.loads(type_in("tuna", "model", "benchmarks", "--json").out)
    assert listed == rows


def test_the_outputs_of_each_kind_are_seen(library: Callable[..., Path], tracker: Tracker) -> None:
    place = BenchmarkDevice(tracker, KEY)
    (point,) = benchmark.measure(place, {"a": library(relax_models.tuple_result)}, given(X), [{}])
    assert point.outputs == [[2, 3]] * 3
    points = benchmark.measure(
        place,
        {"a": library(relax_models.shape_argument)},
        given("shape=n,5:shape"),
        [{"n": 2}, {"n": 7}],
    )
    assert [point.outputs for point in points] == [[[2, 5]], [[7, 5]]]


def test_models_with_other_answers_are_timed_and_told_apart(
    type_in: Type, library: Callable[..., Path], where: list[str]
) -> None:
    static, other = library(relax_models.static), library(relax_models.static, 1.5)
    ended = type_in("tuna", "benchmark-model", static, *where, "--input", X, "--against", other)
    assert ended.code == 1
    assert re.search(rf"{other.name}: output 0 differs by .* more than 0\.001", ended.err)
    first, second = api.list_benchmarks()
    assert (first.error, first.run, first.label, second.label) == (
        0.0,
        second.run,
        static.name,
        other.name,
    )
    assert second.error is not None
    assert 0.1 < second.error < 0.5


def test_answers_that_are_not_finite_are_no_result(
    type_in: Type, library: Callable[..., Path], where: list[str]
) -> None:
    static, other = library(relax_models.static), library(relax_models.static, float("inf"))
    ended = type_in("tuna", "benchmark-model", static, *where, "--input", X, "--against", other)
    assert (ended.code, "has infinities or NaN in other places" in ended.err) == (1, True)
    assert [row.error for row in api.list_benchmarks()] == [0.0, None]


def test_outputs_are_compared_by_the_rules_of_their_types(
    type_in: Type, library: Callable[..., Path]
) -> None:
    """1 of 2,000 is nearer than real values have to be."""

    def ended(model: Callable[..., Any], *args: Any) -> Ended:
        words = ["--local", "--input", X, "--against", library(model, *args)]
        return type_in("tuna", "benchmark-model", first, *words)

    first = library(relax_models.static, 2000.0)
    assert ended(relax_models.static, 2001.0).code == 0
    Path(f"{first}.json").write_text(json.dumps({"tolerance": 1e-4}))
    assert (said := ended(relax_models.static, 2001.0)).code == 1
    assert "more than 0.0001" in said.err
    first = library(relax_models.whole, 2000)
    assert (said := ended(relax_models.whole, 2001)).code == 1
    assert "output 0 has 6 wrong values of 6, the first at [0, 0]: 2001 in the place of 2000" in (
        said.err
    )
    assert (
        "is float32 of shape (2, 3), and should be int32" in ended(relax_models.static, 2000.0).err
    )


@pytest.mark.usefixtures("forked", "quick_timing")
def test_a_built_model_is_timed_in_turn_with_the_untuned_one(
    type_in: Type, tracker: Tracker, tmp_path: Path
) -> None:
    model, tuned, untuned = nets.residual(), tmp_path / "net.so", tmp_path / "untuned.so"
    onnx.save(model, tmp_path / "net.onnx")
    assert type_in("tuna", "model", "import", "net", tmp_path / "net.onnx").code == 0
    ended = type_in("tuna", "model", "build", "net", "-o", tuned, "--no-compare", "--no-rivals")
    assert ended.code == 0, ended
    (built,) = api.list_benchmarks("net")
    assert (built.label, built.time_ms > 0) == ("net.so", True)
    target = json.loads(get_library("tvm").environment().target)
    plain = build.plan(importer.to_relax(model, "net"), None, tvm.target.Target(target))
    compile_to(plain, target, untuned)
    ended = type_in("tuna", "benchmark-model", tuned, *on(tracker), "--against", untuned)
    assert ended.code == 0, ended  # the inputs are those of net.so.json
    *_, first, second = api.list_benchmarks("net")
    assert (first.label, second.label, second.model) == ("net.so", "untuned.so", "")
    assert first.model.startswith("net@")
    assert first.inputs == "x=1,3,16,16:float32"
    assert second.error is not None
    assert 0 < second.error < 1e-4
    assert second.ratio == second.time_ms / first.time_ms
    assert "net.so (net@" in type_in("tuna", "model", "benchmarks", "net").out


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        (relax_models.static, ["--input", "x=2,4:float32"],
         "does not take this input x: .* mismatch to specified constant"),
        (relax_models.static, ["--input", "x=2,3:float64"],
         "does not take this input x: .* float64"),
        (relax_models.static, ["--input", "x=2,3:shape"], "does not take this input x: "),
        (relax_models.static, ["--input", "y=2,3:float32"], "The model has no input y"),
        (relax_models.static, ["--input", X, "--function", "other"], "has no function other"),
        (relax_models.tuple_parameter, ["--input", X], "The input p is missing"),
        (relax_models.tuple_parameter, ["--input", X, "--input", X.replace("x", "p")],
         "does not take this input p: "),
        (
            relax_models.tuple_parameter,
            ["--input", X, "--input", "p.0=2,3:float32", "--input", "p.1=3:shape"],
            "p cannot be sent to a board: TVM can make a tuple of arrays alone",
        ),
        (
            relax_models.symbolic,
            ["--input", "x=n,3:float32", "--shape", "n=1,178956971", "--memory", "1024"],
            "The input x needs 2.15 GB on the board, which has 1.07 GB left",
        ),
    ],
    ids=lambda case: getattr(case, "__name__", case if isinstance(case, str) else " "),
)  # fmt: skip
def test_a_wrong_argument_is_named_and_nothing_is_stored(
    type_in: Type,
    library: Callable[..., Path],
    where: list[str],
    model: Any,
    words: list[str],
    said: str,
) -> None:
    ended = type_in("tuna", "benchmark-model", library(model), *where, *words)
    assert ended.code == BadInput.exit_code, ended
    assert len([line for line in ended.err.splitlines() if line.startswith("Error: ")]) == 1
    assert re.search(said, ended.err), ended.err
    assert api.list_benchmarks() == []


def test_points_that_were_measured_stay_when_a_later_one_fails(
    type_in: Type, library: Callable[..., Path]
) -> None:
    words = ("--local", "--input", "x=n,3:float32", "--shape", "n=2,4,2")
    ended = type_in("tuna", "benchmark-model", library(relax_models.static), *words)
    assert (ended.code, "does not take this input x" in ended.err) == (BadInput.exit_code, True)
    assert [row.extents for row in api.list_benchmarks()] == [{"n": 2}]


def test_the_board_is_free_again_after_an_error(
    type_in: Type, library: Callable[..., Path], tracker: Tracker
) -> None:
    static = library(relax_models.static)
    for shape, code in (
        ("2,4", BadInput.exit_code),
        ("2,3", 0),
        ("2,4", BadInput.exit_code),
        ("2,3", 0),
    ):
        assert (
            type_in(
                "tuna", "benchmark-model", static, *on(tracker), "--input", f"x={shape}:float32"
            ).code
            == code
        )


def test_what_is_no_library_of_a_model_is_refused(
    type_in: Type, library: Callable[..., Path], tmp_path: Path
) -> None:
    text, missing, cut = tmp_path / "model.onnx", tmp_path / "none.so", tmp_path / "cut.so"
    text.write_text("x")
    foreign = Path(np._core._multiarray_umath.__file__)
    cut.write_bytes(foreign.read_bytes()[:5000])
    for path, said in (
        (text, "is not a shared library"),
        (missing, "cannot be read"),
        (foreign, "cannot be loaded there"),
        (cut, "the child ended with SIG"),
    ):
        ended = type_in("tuna", "benchmark-model", path, "--local", "--input", X)
        assert (ended.code, said in ended.err) == (BadInput.exit_code, True), ended
    static = library(relax_models.static)
    assert (
        "same library"
        in type_in("tuna", "benchmark-model", static, "--local", "--against", static).err
    )


def test_where_it_runs_must_be_said(
    type_in: Type, library: Callable[..., Path], tracker: Tracker
) -> None:
    static = library(relax_models.static)
    for words in (
        [],
        ["--device-key", KEY],
        ["--tvm-tracker", str(tracker)],
        ["--local", *on(tracker)],
    ):
        ended = type_in("tuna", "benchmark-model", static, *words)
        assert (ended.code, "Name a board" in ended.err) == (BadInput.exit_code, True)
    ended = type_in("tuna", "benchmark-model", static, *on(tracker, "phone"), "--input", X)
    assert (ended.code, f"device keys: {KEY}" in ended.err) == (NotFound.exit_code, True)


def test_a_held_board_is_waited_for_and_no_longer(
    library: Callable[..., Path], tracker: Tracker
) -> None:
    place = BenchmarkDevice(tracker, KEY)
    with closing(BenchmarkProcess(place, [])) as holder:
        holder.open("main", 60)
        with pytest.raises(
            ServiceError, match="No board with the device key 'loopback' became free within 1 s"
        ):
            list(
                benchmark.measure(
                    BenchmarkDevice(tracker, KEY, wait_s=1),
                    {"a": library(relax_models.static)},
                    given(),
                    [{}],
                )
            )
    (point,) = benchmark.measure(place, {"a": library(relax_models.static)}, given(X), [{}])
    assert point.outputs == [[2, 3]]


def test_a_board_that_says_nothing_ends_at_the_deadline(
    library: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_START_S", 2.0)
    with rpc_servers.silent_board("mute") as tracker:
        started = time.monotonic()
        with pytest.raises(ServiceError, match=r"mute at .* did not answer within 3 s"):
            list(
                benchmark.measure(
                    BenchmarkDevice(tracker, "mute", wait_s=1),
                    {"a": library(relax_models.static)},
                    given(),
                    [{}],
                )
            )
        assert time.monotonic() - started < 60


def test_a_board_that_answers_rubbish_is_a_service_that_fails(library: Callable[..., Path]) -> None:
    for answer in (
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(64),
        struct.pack("<ii", 0xFF271, -1) + b"x" * 64,
    ):
        with rpc_servers.silent_board("mad", answer) as tracker:
            place = BenchmarkDevice(tracker, "mad", wait_s=5, limit_s=5)
            with pytest.raises(ServiceError, match="mad"):
                list(benchmark.measure(place, {"a": library(relax_models.static)}, given(X), [{}]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"open": {}}, {"load": {"parameters": "x"}},
        {"run": {"errors": {}, "faults": {}, "outputs": []}},
        {"check": {"more": 1}},
        {"run": {"errors": {"a": float("nan")}, "faults": {}, "outputs": []}},
        {"run": {"errors": {"a": 0.0}, "faults": {"b": "is wrong"}, "outputs": []}},
        {"time": {"times_ms": {"a": float("inf")}}},
        {"time": {"times_ms": {"a": 0.0}}}, {"time": {"times_ms": {"b": 1.0}}},
        {"time": {"times_ms": ["a"]}},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_model_or_board_makes_up_is_garbage(
    monkeypatch: pytest.MonkeyPatch, library: Callable[..., Path], wrong: dict[str, Any]
) -> None:
    """A model that is foreign code may write what its process answers."""
    answers = {
        "open": {"emulator": ""}, "load": {"parameters": ["x"]}, "check": {},
        "run": {"errors": {"a": 0.0}, "faults": {}, "outputs": [[2]]},
        "time": {"times_ms": {"a": 1.0}},
    }  # fmt: skip
    monkeypatch.setattr(
        Child, "call", lambda _self, request, _limit_s: {**answers, **wrong}[request["op"]]
    )
    models = {"a": library(relax_models.static)}
    with pytest.raises(ServiceError, match="this machine gave an answer that is not valid: "):
        list(benchmark.measure(BenchmarkDevice(), models, given(X), [{}]))


def test_times_of_an_emulated_board_are_marked_until_it_vanishes(
    type_in: Type, library: Callable[..., Path]
) -> None:
    static = library(relax_models.static)
    with rpc_servers.board("qemu", emulator="qemu-aarch64") as tracker:
        ended = type_in("tuna", "benchmark-model", static, *on(tracker, "qemu"), "--input", X)
        assert ended.code == 0, ended
        (row,) = api.list_benchmarks()
        assert row.where == f"qemu, emulated by qemu-aarch64 at {tracker}"
        with closing(BenchmarkProcess(BenchmarkDevice(tracker, "qemu"), [static])) as process:
            assert process.open("main", 60) == "qemu-aarch64"
            process.load("a", static)
            process.run({"x": ["float32", [2, 3], None, "x"]}, ["x"], 0, 1e-3)
            rpc_servers.kill("qemu")
            with pytest.raises(ServiceError, match="The board does not answer any more"):
                process.time({"a": 1})


def test_only_a_client_of_a_board_may_open_connections(tracker: Tracker) -> None:
    for place, network in ((BenchmarkDevice(), False), (BenchmarkDevice(tracker, KEY), True)):
        with closing(BenchmarkProcess(place, [])) as process:
            box = process._child.box
            assert box is not None
            assert box.network is network
