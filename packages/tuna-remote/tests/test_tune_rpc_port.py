"""`tuna tune-rpc` whose port is in use: one sentence, and nothing is written."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
from command_lines import Ended

from tuna.db.models import Session


def test_a_port_in_use_is_refused_before_anything_is_written(
    type_in: Callable[..., Ended], home: Path
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        layer = "MIOpenDriver gemm -m 32 -n 32 -k 32"
        ended = type_in(
            "tuna",
            "tune-rpc",
            "--rpc",
            f"{{target: llvm, port: {port}}}",
            "--workload",
            layer,
            "--log-run",
        )
    assert (ended.code, ended.out) == (2, "")
    assert f"Port {port} of 127.0.0.1 is in use." in ended.err
    assert "choose another one with `port` of --rpc" in ended.err
    assert list(home.parent.glob("*.trace")) + list(home.parent.glob("run-*.log")) == []
    with sa.create_engine(f"sqlite:///{home / 'tuna.sqlite'}").connect() as connection:
        assert connection.execute(sa.select(Session.id)).all() == []
