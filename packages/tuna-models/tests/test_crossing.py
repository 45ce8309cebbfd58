"""What crosses TVM's RPC, as this version of TVM has it: why `tuna/libraries/tvm/built_models.py`
makes shapes and tuples on the board. A test that fails after an upgrade says that it may do
less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import rpc_servers
import tvm
import tvm_ffi
from tvm import rpc

pytestmark = pytest.mark.keeps_processes  # the server

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """A session with TVM's own server on loopback."""
    with rpc_servers.server() as server:
        opened = rpc.connect("127.0.0.1", server.port)
        yield opened  # which the last test ends


def test_objects_are_refused_before_they_are_sent_and_handles_of_the_board_cross(
    session: Any,
) -> None:
    call = session.get_function
    for value, said in (
        (tvm_ffi.Shape((3, 5)), "Cannot pass argument 0, type ffi.Shape"),
        ((1, 2), "Cannot pass argument 0, type ffi.Array"),
        (X, "Can not pass in local device"),
        (tvm.runtime.tensor(X), "Can not pass in local device"),
    ):
        with pytest.raises(Exception, match=said):
            call("testing.echo")(value)
    shape = call("ffi.Shape")(3, 5)
    again = call("testing.echo")(shape)
    assert [call("rpc.testing.GetShapeElem")(again, number) for number in range(2)] == [3, 5]
    assert call("ffi.ArraySize")(call("ffi.Array")(1, 2.5, shape)) == 3


def test_a_tensor_in_an_array_is_a_bare_pointer_and_ends_the_session(session: Any) -> None:
    """It may be freed while it is there; `built_models` never makes one."""
    tensor = tvm.runtime.tensor(X, session.cpu(0))
    array = session.get_function("ffi.Array")(tensor, tensor)
    with pytest.raises(Exception, match=r"args\.size\(\) == 3"):
        session.get_function("ffi.ArrayGetItem")(array, 0)
