"""What crosses TVM's RPC, case by case, as this version of TVM has it, and what `remote` makes of
it.

A test of the first part that fails after an upgrade of TVM says that
`tuna_models/benchmarks/remote_values.py` may do more, or must do less.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import relax_models
import rpc_servers
import tvm
import tvm_ffi
from tvm import relax, rpc

from tuna.errors import BadInput
from tuna_models.benchmarks.remote_values import RemoteValues

pytestmark = pytest.mark.keeps_processes  # the server

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[], Any]]:
    """The server of now: the one before, or a new one where that has ended with its last
    session."""
    started: list[Any] = []
    with contextlib.ExitStack() as stack:

        def current() -> Any:
            if not started or not rpc_servers.answers(started[-1].port):
                started.append(stack.enter_context(rpc_servers.server()))
            return started[-1]

        yield current


@pytest.fixture
def server(servers: Callable[[], Any]) -> Any:
    """TVM's own server on loopback."""
    return servers()


@pytest.fixture
def session(server: Any) -> Iterator[Any]:
    """A server has one at a time, and what failed may still refer to it."""
    found = rpc.connect("127.0.0.1", server.port)
    yield found
    found.get_function("CloseRPCConnection")()


@pytest.fixture
def values(session: Any) -> RemoteValues:
    return RemoteValues(session, session.cpu(0))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Any]], Path]:
    """The compiled library of a model, made once."""
    folder, made = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def find(model: Callable[[], Any]) -> Path:
        name = model.__name__
        made[name] = made.get(name) or relax_models.build(model(), folder / f"{name}.so")
        return made[name]

    return find


def machine(session: Any, path: Path) -> Any:
    session.upload(str(path))
    return relax.VirtualMachine(session.load_module(path.name), session.cpu(0))


def called(machine: Any, *args: Any) -> Any:
    machine.set_input("main", *args)
    machine.invoke_stateful("main")
    return machine.get_outputs("main")


def alive(session: Any) -> bool:
    try:
        return bool(session.get_function("testing.echo")(7) == 7)
    except Exception:
        return False


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -(1 << 63), (1 << 63) - 1, 2.5, float("inf"), "",
     "hé", "x" * 70_000, b"", b"\0ab", tvm_ffi.dtype("float32")],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_values_cross_both_ways(session: Any, value: Any) -> None:
    found = session.get_function("testing.echo")(value)
    assert (found, type(found) in (type(value), tvm_ffi.core.String)) == (value, True)


def test_a_text_is_cut_at_its_nul(session: Any) -> None:
    assert session.get_function("testing.echo")("a\0b") == "a"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1 << 63, "Cannot pass argument 0, type ffi.BigInt"),
        (tvm_ffi.Shape((3, 5)), "Cannot pass argument 0, type ffi.Shape"),
        ([1, 2], "Cannot pass argument 0, type ffi.Array"),
        ((1, 2), "Cannot pass argument 0, type ffi.Array"),
        ({"a": 1}, "Cannot pass argument 0, type ffi.Map"),
        (tvm.target.Target("llvm"), "Cannot pass argument 0, type target.Target"),
        (object(), "Cannot pass argument 0, type ffi.OpaquePyObject"),
        (lambda value: value, "Cannot pass type ffi.Function as an argument"),
        (X, "Can not pass in local device"),
        (tvm.runtime.tensor(X), "Can not pass in local device"),
        (tvm.cpu(0), "Can not pass in local device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_before_they_are_sent_and_the_session_goes_on(
    session: Any, value: Any, said: str
) -> None:
    with pytest.raises(Exception, match=said):
        session.get_function("testing.echo")(value)
    assert alive(session)


def test_a_device_of_the_session_becomes_the_boards_own(session: Any) -> None:
    assert str(session.get_function("testing.echo")(session.cpu(0))) == str(tvm.cpu(0))


def test_a_tensor_on_the_board_is_a_handle_whose_data_is_copied_on_request(session: Any) -> None:
    tensor = tvm.runtime.tensor(X, session.cpu(0))
    session.get_function("testing.nop")(tensor)
    assert np.array_equal(tensor.numpy(), X)


def test_a_module_crosses_as_a_handle(session: Any, library: Callable[..., Path]) -> None:
    session.upload(str(library(relax_models.static)))
    module = session.load_module("static.so")
    assert module.kind == "rpc"
    assert session.get_function("ffi.ModuleGetKind")(module) in ("relax.VMExecutable", "library")


def test_a_function_of_the_board_does_not_cross_as_an_argument(session: Any) -> None:
    echo = session.get_function("testing.echo")
    with pytest.raises(Exception, match="Cannot pass type"):
        echo(echo)
    assert alive(session)


def test_objects_made_on_the_board_are_handles_that_can_be_given_back(session: Any) -> None:
    call = session.get_function
    shape = call("ffi.Shape")(3, 5)
    assert type(shape).__name__ == "RPCObjectRef"
    again = call("testing.echo")(shape)
    assert [call("rpc.testing.GetShapeElem")(again, number) for number in range(2)] == [3, 5]
    array = call("ffi.Array")(1, 2.5, "x", None, b"ab", shape)
    assert call("ffi.ArraySize")(array) == 6
    assert [call("ffi.ArrayGetItem")(array, number) for number in range(5)] == [
        1,
        2.5,
        "x",
        None,
        b"ab",
    ]
    pairs = call("ffi.Map")("a", 1, "b", array)
    assert call("ffi.MapSize")(pairs) == 2
    assert call("ffi.ArraySize")(call("ffi.MapGetItem")(pairs, "b")) == 6


def test_a_tensor_in_an_array_is_a_bare_pointer_and_ends_the_session(session: Any) -> None:
    """It may be freed while it is there; `remote` never makes one."""
    tensor = tvm.runtime.tensor(X, session.cpu(0))
    array = session.get_function("ffi.Array")(tensor, tensor)
    with pytest.raises(Exception, match=r"args\.size\(\) == 3"):
        session.get_function("ffi.ArrayGetItem")(array, 0)
    assert not alive(session)


def test_a_function_that_returns_what_it_got_ends_the_session_if_that_is_a_tensor(
    session: Any,
) -> None:
    with pytest.raises(Exception, match=r"args\.size\(\) == 3"):
        session.get_function("testing.echo")(tvm.runtime.tensor(X, session.cpu(0)))
    assert not alive(session)


def test_a_tuple_returned_by_a_model_is_read_through_the_stateful_calls(
    session: Any, library: Callable[..., Path]
) -> None:
    given = tvm.runtime.tensor(X, session.cpu(0))
    vm = machine(session, library(relax_models.tuple_result))
    more, (twice, again) = called(vm, given)
    assert [
        np.array_equal(found.numpy(), right)
        for found, right in ((more, X + 1), (twice, 2 * X), (again, X + 1))
    ]
    assert type(vm["main"](given)).__name__ == "RPCObjectRef"


def test_a_plain_array_of_tensors_fails_the_type_check_of_a_tuple_parameter(
    session: Any, library: Callable[..., Path]
) -> None:
    device = session.cpu(0)
    vm = machine(session, library(relax_models.tuple_parameter))
    tensors = [tvm.runtime.tensor(X, device) for _ in range(3)]
    with pytest.raises(Exception, match="param=p"):
        called(vm, tensors[0], session.get_function("ffi.Array")(*tensors[1:]))


def test_the_tensor_cache_makes_a_tuple_parameter(
    session: Any, library: Callable[..., Path]
) -> None:
    for number, array in enumerate((X, X + 1)):
        tensor = tvm.runtime.tensor(array, session.cpu(0))
        session.get_function("vm.builtin.tensor_cache.update")(f"p_{number}", tensor, True)
    params = session.get_function("vm.builtin.param_array_from_cache")("p", 2)
    vm = machine(session, library(relax_models.tuple_parameter))
    assert np.array_equal(
        called(vm, tvm.runtime.tensor(X, session.cpu(0)), params).numpy(), X * (2 * X + 1)
    )


def test_disco_is_not_in_the_wheel() -> None:
    """docs/boards.md says so."""
    assert tvm.runtime.disco is None


def test_a_value_crosses_as_it_is_or_as_an_object_of_the_board(
    session: Any, values: RemoteValues
) -> None:
    call = session.get_function
    plain = (
        None,
        True,
        3,
        2.5,
        "x",
        b"ab",
        np.float32(0.5),
        np.int64(4),
        np.dtype("float32"),
        bytearray(b"c"),
    )
    sent = values.send(*plain)
    assert [call("testing.echo")(one) for one in sent] == [
        None,
        True,
        3,
        2.5,
        "x",
        b"ab",
        0.5,
        4,
        "float32",
        b"c",
    ]
    shape, empty, mixed, nested = values.send(
        tvm_ffi.Shape((3, 5)),
        (),
        [1, "x", tvm_ffi.Shape((7,))],
        {"a": 1, "b": {2: [X, X + 1]}, "c": {"w": X}},
    )
    assert call("rpc.testing.GetShapeElem")(shape, 1) == 5
    assert call("ffi.ArraySize")(empty) == 0
    assert call("rpc.testing.GetShapeElem")(call("ffi.ArrayGetItem")(mixed, 2), 0) == 7
    arrays = call("ffi.MapGetItem")(call("ffi.MapGetItem")(nested, "b"), 2)
    assert np.array_equal(call("ffi.ArrayGetItem")(arrays, 1).numpy(), X + 1)
    assert np.array_equal(
        call("ffi.MapGetItem")(call("ffi.MapGetItem")(nested, "c"), "w").numpy(), X
    )


def test_arrays_arrive_whatever_their_order_in_memory(values: RemoteValues) -> None:
    backwards = X[:, ::-1]
    arrays = (
        X.T,
        backwards,
        np.float32(1) * np.array(2.0, np.float32),
        np.zeros((0, 3)),
        tvm.runtime.tensor(X),
    )
    for sent, given in zip(values.send(*arrays), arrays, strict=True):
        right = given if isinstance(given, np.ndarray | np.generic) else given.numpy()
        assert np.array_equal(sent.numpy() if hasattr(sent, "numpy") else sent, right)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            (1, 2, {"x": [object()]}),
            r'args\[2\]\["x"\]\[0\] cannot be sent to a board: it is of type object',
        ),
        (({1: lambda: 1},), r"args\[0\]\[1\] cannot .* of type function"),
        ((3, 1 << 63), r"args\[1\] cannot .* more than 64 bits"),
        (("a\0b",), r"args\[0\] cannot .* cut this text at its NUL"),
        ((2j,), r"args\[0\] cannot .* of type complex"),
        (({1, 2},), r"args\[0\] cannot .* of type set"),
        (({None: 1},), r"args\[0\]\[None\] cannot .* its key is of type NoneType"),
        (([X, 1],), r"args\[0\] cannot .* a tuple of arrays alone, or one without any"),
        (({"a": X, "b": 1},), r"args\[0\] cannot .* a dict of arrays alone"),
        (({1: X},), r"args\[0\]\[1\] cannot .* key of an array is not a text"),
        ((np.array([object()]),), r"args\[0\] cannot .* an array of object"),
        ((np.zeros(2, np.complex64),), r"args\[0\] cannot .* an array of complex64"),
        ((np.dtype(object),), r"args\[0\] cannot .* a type of Python objects"),
        ((tvm.cpu(0),), r"args\[0\] cannot .* of type Device"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_cannot_cross_is_named_before_anything_is_sent(
    session: Any, values: RemoteValues, args: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        values.send(*args)
    assert alive(session)
    assert values.held_bytes == 0


def test_a_list_in_itself_is_refused(values: RemoteValues) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(BadInput, match="nested more than 16 deep"):
        values.send(endless)


def test_two_gigabytes_are_refused_before_they_are_sent(session: Any) -> None:
    """The array is of zeros that no memory holds; copying it would take it all."""
    values = RemoteValues(session, session.cpu(0), memory_bytes=1 << 30)
    large = np.broadcast_to(np.zeros(1, np.float32), (1 << 29,))
    for args, place in (
        ((1, large), r"args\[1\]"),
        (([X, large],), r"args\[0\]"),
        (({"w": large},), r"args\[0\]"),
    ):
        with pytest.raises(
            BadInput, match=rf"{place} needs .* GB on the board, which has 1\.07 GB left"
        ):
            values.send(*args)
    assert alive(session)


def test_what_is_held_counts_until_it_is_released(session: Any) -> None:
    values = RemoteValues(session, session.cpu(0), memory_bytes=1000)
    array = np.zeros(100, np.float32)
    values.send(array, array)
    assert values.free_bytes == 200
    with pytest.raises(BadInput, match=r"args\[0\] needs 0\.000 MB .* 0\.000 MB left"):
        values.send(array)
    values.release()
    values.send(array)


def test_a_board_says_how_much_memory_it_has(values: RemoteValues) -> None:
    assert (values.free_bytes or 0) > 1 << 28


def test_handles_are_kept_while_other_values_come_and_go(
    session: Any, values: RemoteValues
) -> None:
    call = session.get_function
    numbers = [
        values.send([np.full(1000, number, np.float32)], tvm_ffi.Shape((number, 1)))
        for number in range(100)
    ]
    gc.collect()
    for number, (arrays, shape) in enumerate(numbers):
        assert call("ffi.ArrayGetItem")(arrays, 0).numpy()[-1] == number
        assert call("rpc.testing.GetShapeElem")(shape, 0) == number


@pytest.mark.parametrize("calls", [100, pytest.param(10_000, marks=pytest.mark.drill(only=True))])
def test_calls_with_objects_leak_nothing_on_either_side_and_free_nothing_early(
    server: Any, session: Any, values: RemoteValues, library: Callable[..., Path], calls: int
) -> None:
    """A call sends 200 kB in arrays and 900 entries in shapes and dicts; one of either that stayed
    would be seen."""
    vm = machine(session, library(relax_models.tuple_parameter))
    kept = RemoteValues(session, session.cpu(0))
    early = [
        kept.send([np.full(1000, number, np.float32)], tvm_ffi.Shape((number, 2)))
        for number in range(20)
    ]
    names = {f"key {number}": number for number in range(100)}
    board = psutil.Process(server.proc._proc.pid).children(recursive=True)[-1]
    sizes = []
    for number in range(calls):
        if number % (calls // 10) == 0:
            gc.collect()
            sizes.append((psutil.Process().memory_info().rss, board.memory_info().rss))
        large = np.full(25_000, number, np.float32)
        x, params, *_, array = values.send(
            X,
            (X + number, X),
            {"large": large},
            names,
            tvm_ffi.Shape(range(100)),
            [names, tvm_ffi.Shape(range(100))],
            large,
        )
        assert np.array_equal(called(vm, x, params).numpy(), X * (2 * X + number))
        assert array.numpy()[-1] == number
        del x, params, array, _
        values.release()
    assert values.held_bytes == 0
    for before, after in zip(sizes[1], sizes[-1], strict=True):
        assert after - before < max(12 << 20, calls * 2000), sizes
    call = session.get_function
    for number, (arrays, shape) in enumerate(early):
        assert call("ffi.ArrayGetItem")(arrays, 0).numpy()[-1] == number
        assert call("rpc.testing.GetShapeElem")(shape, 0) == number
