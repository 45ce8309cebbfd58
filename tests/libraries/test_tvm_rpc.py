"""What is asked of a TVM RPC tracker has a deadline, and what is wrong with it a sentence."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tuna.errors import BadInput, NotFound, ServiceError
from tuna.libraries.tvm.boards import BoardAddress, Tracker

MAGIC = struct.pack("<i", 0x2F271)


def message(document: object) -> bytes:
    text = json.dumps(document).encode()
    return struct.pack("<i", len(text)) + text


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], Tracker]]:
    """`serve(answer)`: a tracker that sends these bytes to a client, and then waits for it to
    leave."""
    listeners: list[socket.socket] = []

    def start(answer: bytes) -> Tracker:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def one_client() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(ConnectionResetError):
                client.sendall(answer)
                while client.recv(4096):
                    pass

        threading.Thread(target=one_client, daemon=True).start()
        return Tracker("127.0.0.1", listener.getsockname()[1])

    yield start
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize(
    "text",
    ["", "board", ":9190", "board:", "board:0", "board:65536", "board:x", f"board:{'9' * 5000}"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="HOST:PORT"):
        Tracker.parse(text)


def test_an_address_may_be_of_ipv6() -> None:
    assert str(Tracker.parse("[::1]:9190")) == "[::1]:9190"
    assert Tracker.parse("board:9190") == Tracker("board", 9190)


def test_boards_are_counted_by_key(serve: Callable[[bytes], Tracker]) -> None:
    entries = [{"key": f"server:{key}", "addr": ["127.0.0.1", 1]} for key in ("pi", "pi", "phone")]
    answer = MAGIC + message([0, {"queue_info": {}, "server_info": entries}])
    assert serve(answer).boards(5) == {"pi": 2, "phone": 1}
    with pytest.raises(NotFound, match="no board with the device key 'phones'") as missing:
        serve(answer).await_board("phones", 5)
    assert missing.value.hint.startswith("did you mean phone? device keys: phone, pi;")


def test_the_queue_of_a_key_is_counted(serve: Callable[[bytes], Tracker]) -> None:
    answer = MAGIC + message(
        [0, {"queue_info": {"pi": {"free": 2, "pending": 1}}, "server_info": []}]
    )
    assert serve(answer).queue("pi", 5) == (2, 1)
    assert serve(answer).queue("phone", 5) == (0, 0)
    for wrong in (1, {"pi": 1}, {"pi": {"free": "x", "pending": 0}}):
        with pytest.raises(ServiceError, match="does not answer as a TVM RPC tracker does"):
            serve(MAGIC + message([0, {"queue_info": wrong}])).queue("pi", 5)


def test_a_free_board_is_a_place(serve: Callable[[bytes], Tracker]) -> None:
    assert serve(MAGIC + message([0, ["10.0.0.7", 9091, "pi:0.5"]])).request(
        "pi", 5
    ) == BoardAddress("10.0.0.7", 9091, "pi:0.5")


def test_no_free_board_is_said_at_the_deadline(serve: Callable[[bytes], Tracker]) -> None:
    started = time.monotonic()
    with pytest.raises(ServiceError, match="No board with the device key 'pi' became free within"):
        serve(MAGIC).request("pi", 0.2)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "does not answer within 0.2 s"),
        (b"HTTP/1.1 400 Bad Request\r\n", "does not answer as a TVM RPC tracker does"),
        (MAGIC + struct.pack("<i", 1 << 30), "does not answer as a TVM RPC tracker does"),
        (MAGIC + struct.pack("<i", -5), "does not answer as a TVM RPC tracker does"),
        (MAGIC + message([0, {"server_info": [1]}]), "does not answer as a TVM RPC tracker does"),
        (MAGIC + message("x"), "does not answer as a TVM RPC tracker does|refused"),
        (MAGIC + struct.pack("<i", 3) + b"[0,", "does not answer as a TVM RPC tracker does"),
        (
            MAGIC + struct.pack("<i", 100_000) + b"[" * 100_000,
            "does not answer as a TVM RPC tracker does",
        ),
        (MAGIC + message([-1]), "refused the request"),
    ],
)
def test_what_is_no_tracker_is_refused(
    serve: Callable[[bytes], Tracker], answer: bytes, said: str
) -> None:
    with pytest.raises(ServiceError, match=said):
        serve(answer).boards(0.2)


def test_a_tracker_that_is_not_there_is_refused_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        tracker = Tracker("127.0.0.1", unused.getsockname()[1])
        with pytest.raises(ServiceError, match="cannot be reached: Connection refused") as refused:
            tracker.boards(5)
    assert "rpc_tracker" in refused.value.hint
