"""`tuna benchmark-model`: libraries run and are timed on a board behind TVM RPC, and on this
machine, through the same calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import relax_models
import rpc_servers
import tvm
from command_lines import Ended
from tvm import rpc

from tuna.configs.model import WholeModelConfig
from tuna.errors import BadInput, ServiceError
from tuna.libraries.kernels import KernelJob
from tuna.libraries.tvm import built_models
from tuna.libraries.tvm.built_models import BuiltModels, Runtime, here
from tuna.libraries.tvm.model_answers import Answers, Case, problem
from tuna_models import api

KEY = "loopback"
X = "x=2,3:float32"
ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
Type = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed does not matter here; children are forks of a process that has the module."""
    monkeypatch.setattr(built_models, "_TURN_S", 0.001)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The compiled library of a model, made once."""
    folder, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def find(model: Callable[..., Any], *args: Any) -> Path:
        name = "_".join([model.__name__, *map(str, args)])
        made[name] = made.get(name) or relax_models.build(model(*args), folder / f"{name}.so")
        return made[name]

    return find


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """A session with TVM's own server on loopback."""
    with rpc_servers.server() as server:
        opened = rpc.connect("127.0.0.1", server.port)
        yield opened
        opened.get_function("CloseRPCConnection")()


@pytest.fixture(scope="module")
def board(session: Any) -> Runtime:
    """The runtime of a board, which is sent each library once: it has the file mapped."""
    loaded = dict[Path, Any]()

    def load(path: Path) -> Any:
        if path not in loaded:
            session.upload(str(path))
            loaded[path] = session.load_module(path.name)
        return loaded[path]

    return Runtime(session, load)


@pytest.fixture(params=["board", "here"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    on_board: bool = request.param == "board"
    return request.getfixturevalue("board") if on_board else here()  # type: ignore[no-any-return]


def kernel(
    runtime: Runtime,
    folder: Path,
    libraries: Sequence[Path],
    arguments: Any,
    arrays: Sequence[Any],
    function: str = "main",
) -> BuiltModels:
    """One or two libraries with their arguments in place."""
    labels = dict(zip(("library", "against"), (path.stem for path in libraries), strict=False))
    path = folder / f"{len(list(folder.iterdir()))}.npz"
    call = {"function": function, "arguments": arguments, "labels": labels}
    Answers([Case(arrays, ())], call=call).write(path)
    files = {"program": str(libraries[-1]), "answers": str(path)}
    config = WholeModelConfig("net", "{}", *(digit * 64 for digit in "012"))
    job = KernelJob(config, "TvmModel", files=files)
    return BuiltModels(job, libraries[0], [*arrays, np.zeros(0)], runtime)


@pytest.mark.parametrize(
    ("model", "arguments", "arrays", "outputs"),
    [
        (relax_models.static, {"x": 0}, [ARRAY], [ARRAY + 1]),
        (relax_models.symbolic, {"x": 0}, [ARRAY[:1]], [2 * ARRAY[:1]]),
        (relax_models.shape_argument, {"shape": {"shape": 0}}, [np.array([2, 5])],
         [np.full((2, 5), 3.0, np.float32)]),
        (relax_models.tuple_parameter, {"x": 0, "p": {"tuple": [1, 2]}}, [ARRAY, ARRAY + 1, ARRAY],
         [ARRAY * (2 * ARRAY + 1)]),
        (relax_models.tuple_result, {"x": 0}, [ARRAY.T.copy().T],
         [ARRAY + 1, 2 * ARRAY, ARRAY + 1]),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)  # fmt: skip
def test_arguments_and_results_of_every_kind_cross(
    runtime: Runtime,
    tmp_path: Path,
    library: Callable[..., Path],
    model: Any,
    arguments: Any,
    arrays: Any,
    outputs: Any,
) -> None:
    made = kernel(runtime, tmp_path, [library(model)], arguments, arrays)
    made.run()
    (run,) = made.answer()
    assert all(map(np.array_equal, run.outputs, outputs))
    assert len(run.outputs) == len(outputs)
    assert all(ms > 0 for ms in made.times_ms(1, 3))
    assert made.parts_ms() == {}


def test_two_libraries_are_timed_in_turn(
    runtime: Runtime, tmp_path: Path, library: Callable[..., Path]
) -> None:
    both = [library(relax_models.static), library(relax_models.static, 1.5)]
    made = kernel(runtime, tmp_path, both, {"x": 0}, [ARRAY])
    assert [run.outputs[0][0, 0] for run in made.answer()] == [1.0, 1.5]
    made.times_ms(1, 2)
    made.times_ms(7, 6)
    assert len(made.parts_ms()) == 6
    assert min(made.parts_ms().values()) > 0


@pytest.mark.parametrize(
    ("model", "arguments", "arrays", "said"),
    [
        (relax_models.static, {"x": 0}, [np.zeros((2, 4), np.float32)],
         r"does not take this input x: match_cast error, shape\[1\] mismatch .*; it takes R"),
        (relax_models.static, {"x": 0}, [ARRAY.astype(float)],
         "does not take this input x: .* float64"),
        (relax_models.static, {"x": {"shape": 0}}, [np.array([2])], "not take this input x: "),
        (relax_models.static, {"y": 0}, [ARRAY], "The model has no input y: it takes x"),
        (relax_models.tuple_parameter, {"x": 0}, [ARRAY], "The input p is missing: name its shape"),
        (relax_models.tuple_parameter, {"x": 0, "p": 0}, [ARRAY], "does not take this input p: "),
        (relax_models.tuple_parameter, {"x": 0, "p": {"tuple": [0, {"shape": 1}]}},
         [ARRAY, np.array([2])],
         "p cannot be sent to a board: TVM can make a tuple of arrays alone"),
    ],
    ids=lambda case: getattr(case, "__name__", case if isinstance(case, str) else " "),
)  # fmt: skip
def test_a_wrong_argument_is_named_with_what_the_model_takes(
    library: Callable[..., Path], tmp_path: Path, model: Any, arguments: Any, arrays: Any, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        kernel(here(), tmp_path, [library(model)], arguments, arrays)


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        ((relax_models.static, 2000.0), (relax_models.static, 2001.0), ""),
        ((relax_models.static,), (relax_models.static, 1.5), r"differs by .* more than 0\.001"),
        ((relax_models.static,), (relax_models.static, float("inf")), "has infinities or NaN in"),
        ((relax_models.whole, 2000), (relax_models.whole, 2001),
         r"has 6 wrong values of 6, the first at \[0, 0\]: 2001 in the place of 2000"),
        ((relax_models.whole, 2000), (relax_models.static,), "is float32 of .* should be int32"),
        ((relax_models.static,), (relax_models.tuple_result,), "returns 3 outputs and should"),
    ],
)  # fmt: skip
def test_outputs_are_compared_by_the_rules_of_their_types(
    library: Callable[..., Path], tmp_path: Path, first: Any, other: Any, said: str
) -> None:
    """1 of 2,000 is nearer than real values have to be. Other answers are timed all the same."""
    made = kernel(here(), tmp_path, [library(*first), library(*other)], {"x": 0}, [ARRAY])
    answer = made.answer()
    compared = problem(str(tmp_path / "0.npz"))
    assert compared.error(answer) <= compared.tolerance
    assert (compared.error(answer) > 1e-3) == bool(said)
    report = compared.report(answer)
    assert re.search(f"the (output 0|model) {said}", report) if said else report == ""


def test_libraries_are_timed_here_and_their_times_listed(
    type_in: Type, library: Callable[..., Path]
) -> None:
    """The inputs and the tolerance are those of the facts beside the first."""
    static, other = library(relax_models.static, 1.0), library(relax_models.static, 1.5)
    facts = {"inputs": [{"name": "x", "shape": [2, 3], "dtype": "float32"}], "tolerance": 0.125}
    Path(f"{static}.json").write_text(json.dumps(facts))
    ended = type_in("tuna", "benchmark-model", static, "--local", "--against", other)
    assert ended.code == 1
    assert re.search(rf"{other.name}: output 0 differs by .* more than 0\.12", ended.err)
    first, second = api.list_benchmarks()
    assert (first.label, second.label) == (static.name, other.name)
    assert (first.error, first.run, first.inputs) == (0.0, second.run, X)
    assert second.error is not None
    assert 0.125 < second.error < 0.5
    assert second.ratio == second.time_ms / first.time_ms
    for row in (first, second):
        assert 0 < row.low_ms <= row.time_ms <= row.high_ms
        assert row.repeats >= 6
    ended = type_in("tuna", "benchmark-model", other, "--local", "--input", X, "--json")
    assert ended.code == 0, ended
    assert json.loads(type_in("tuna", "model", "benchmarks", "--json").out)[2:] == json.loads(
        ended.out
    )


def test_points_that_were_measured_stay_when_a_later_one_fails(
    type_in: Type, library: Callable[..., Path]
) -> None:
    words = ("--local", "--input", "x=n,3:float32", "--shape", "n=2,4,2")
    ended = type_in("tuna", "benchmark-model", library(relax_models.static), *words)
    assert (ended.code, "does not take this input x" in ended.err) == (BadInput.exit_code, True)
    assert [row.extents for row in api.list_benchmarks()] == [{"n": 2}]


def test_inputs_that_need_more_memory_than_there_is_are_not_made(
    library: Callable[..., Path],
) -> None:
    for extent, memory_mib, said in (
        (178956971, 1024, r"The inputs need 2\.15 GB, and may take on the board 1\.07 GB"),
        (1 << 40, None, "GB, and can have on this machine "),
    ):
        options = api.BenchmarkOptions(
            ["x=n,3:float32"], [f"n={extent}"[:12]], memory_mib=memory_mib
        )
        with pytest.raises(BadInput, match=said):
            api.benchmark_model(library(relax_models.symbolic), options=options)


def test_a_board_is_named_with_its_emulator_and_waited_for(
    type_in: Type, library: Callable[..., Path]
) -> None:
    static = library(relax_models.static)
    with rpc_servers.board("qemu", emulator="qemu-aarch64") as tracker:
        where = ["--tvm-tracker", str(tracker), "--device-key", "qemu"]
        ended = type_in("tuna", "benchmark-model", static, *where, "--input", "x=2,4:float32")
        assert (ended.code, "does not take this input x" in ended.err) == (2, True), ended
        ended = type_in("tuna", "benchmark-model", static, *where, "--input", X)
        assert ended.code == 0, ended  # it is free again after an error
        (row,) = api.list_benchmarks()
        assert row.where == f"qemu, emulated by qemu-aarch64 at {tracker}"
        place = tracker.request("qemu", 60)
        holder = rpc.connect(place.host, place.port, place.match_key)
        with pytest.raises(ServiceError, match="'qemu' became free within 1 s"):
            tracker.await_board("qemu", 1)
        holder.get_function("CloseRPCConnection")()


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
        (cut, "ended with SIG"),
    ):
        ended = type_in("tuna", "benchmark-model", path, "--local", "--input", X)
        assert (ended.code, said in ended.err) == (BadInput.exit_code, True), ended
    static = library(relax_models.static)
    with pytest.raises(BadInput, match="same library"):
        api.benchmark_model(static, against=static)
    with pytest.raises(BadInput, match="static has no function other"):
        kernel(here(), tmp_path, [static], {"x": 0}, [ARRAY], function="other")


def test_where_it_runs_must_be_said(type_in: Type, library: Callable[..., Path]) -> None:
    static = library(relax_models.static)
    board = ["--tvm-tracker", "127.0.0.1:1", "--device-key", KEY]
    for words in ([], board[:2], board[2:], ["--local", *board]):
        ended = type_in("tuna", "benchmark-model", static, *words)
        assert (ended.code, "Name a board" in ended.err) == (BadInput.exit_code, True)
    ended = type_in("tuna", "benchmark-model", static, *board, "--input", X)
    assert (ended.code, "cannot be reached" in ended.err) == (ServiceError.exit_code, True), ended


def test_disco_is_not_in_the_wheel() -> None:
    """docs/boards.md says so."""
    assert tvm.runtime.disco is None
