"""`tuna rpc-client`: what it says, whom it joins with which token, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from command_lines import Ended
from shared_data import shared_data

from tuna import api
from tuna.cli.main import guarded
from tuna.configs import GemmConfig
from tuna.db import access_tokens, joined_workers
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.libraries.candidates import DeviceGone
from tuna.libraries.registry import get_library
from tuna.libraries.tvm import TvmLibrary, toolchain, tvm_library
from tuna.queue.connection import release_services
from tuna.settings import get_settings
from tuna.workers.launch import worker_command
from tuna_remote import boards, joining
from tuna_remote.boards import BoardSession
from tuna_remote.cli.lorien import lorien
from tuna_remote.gateway.master_client import MasterClient, MeasuringPlace
from tuna_remote.gateway.tokens import Credentials, JoinToken

pytestmark = pytest.mark.usefixtures("forked")

#: As the seed prints them for a client on an instance, with {placeholders}; then for one with a
#: board.
LINES = """\
INFO RPCClient: Connecting to server {server}
INFO RPCClient: {server} connected
INFO RPCClient: Register token {token}
INFO RPCClient: LocalRunner
INFO RPCClient: Requesting a job for tuning
INFO RPCClient: Start tuning
INFO Tuner: Tuning workload {workload}
"""
BOARD_LINES = LINES.replace("LocalRunner", "RPCRunner: {tracker} - my-device-key")
GEMM = GemmConfig(m=32, n=32, k=32)
ARM = "llvm -mtriple=aarch64-linux-gnu"
#: What a board says of itself.
PI = {
    **{"cpu": "cortex-a72", "triple": "aarch64-linux-gnu", "threads": 4},
    **{"llvm": 20, "emulator": "", "model": "Pi"},
}


class OnePlace(MeasuringPlace):
    """A runner whose places are given."""

    given: tuple[Environment, ...] = ()

    def places(self) -> Iterator[tuple[Environment, dict[str, str]]]:
        return ((one, {"TUNA_TVM_TARGET": one.target}) for one in self.given)


def _place(*places: Environment) -> OnePlace:
    made = OnePlace({"kind": "llvm"})
    object.__setattr__(made, "given", places)
    return made


def _filled(number: int, **values: str) -> str:
    """The first lines."""
    return "".join(LINES.splitlines(keepends=True)[:number]).format(**values)


def seed() -> str:
    (path,) = shared_data("..", "seeds").glob("000*.txt")
    return path.read_text()


def test_the_lines_are_those_of_the_seed() -> None:
    printed = [
        block.split("\n\n")[0] + "\n"
        for block in re.split(r"(?=INFO RPCClient: Connecting)", seed())[1:]
    ]
    shapes = {
        r"(localhost|1\.2\.3\.4):18871": "{server}",
        r"[0-9a-f]{8}(-[0-9a-f]+){4}": "{token}",
        r"0\.0\.0\.0:9190": "{tracker}",
        r"\.\.\.skip\.\.\.": "{workload}",
    }
    for pattern, name in shapes.items():
        printed = [re.sub(pattern, name, block) for block in printed]
    assert printed == [LINES, BOARD_LINES]


def test_the_seeds_command_lines_are_taken_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = [
        shlex.split(line)[3:]
        for line in seed().splitlines()
        if line.startswith("python3 -m lorien rpc-client ")
    ]
    taken: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        joining, "rpc_client", lambda *, say, **words: taken.append(tuple(words.values())) or 0
    )
    assert [guarded(lorien, words, "lorien") for words in typed] == [0, 0]
    text = "llvm -device=arm_cpu -mtriple=aarch64-linux-gnu"
    assert taken == [
        ("1.2.3.4:18871", text, None, None, None),
        ("1.2.3.4:18871", text.replace("llvm", "lvm"), "my-device-key", 9190, None),
    ]
    assert str(MeasuringPlace.parse(*taken[1][1:4])) == "RPCRunner: 127.0.0.1:9190 - my-device-key"


@pytest.fixture()
def master(home: Path) -> Iterator[str]:
    """HOST:PORT of a master with a session of the library noop."""
    api.init_session("noop", "rpc")
    with joining.listening("127.0.0.1", 0) as url:
        yield url.removeprefix("https://")
    release_services(get_settings())


@pytest.mark.service
def test_a_client_says_the_seeds_lines_and_has_two_workers_with_users_of_their_own(
    master: str,
) -> None:
    here, said = get_library("noop").environment(), []
    client = MasterClient(
        master,
        _place(dataclasses.replace(here, device="another"), here),
        get_settings(),
        said.append,
    )
    client.connect()
    line = joining.create_token("client", 60.0, "https://somewhere.invalid:1")
    compiles, measures = JoinToken.parse_client(line)
    specs = client.join(line)
    shown = "".join(f"INFO {text}\n" for text in said)
    assert shown == _filled(4, server=master, token=f"{compiles.id},{measures.id}")
    assert [spec.queue for spec in specs] == ["compile", "eval"]
    credentials = [Credentials.parse(spec.env["TUNA_GATEWAY"]) for spec in specs]
    assert {one.gateway.url for one in credentials} == {f"https://{master}"}, (
        "where it was told to go, not where the token says"
    )
    assert len({one.name for one in credentials}) == 2
    hidden = [one.secret for one in (*credentials, compiles, measures)]
    assert [spec.waits for spec in specs] == [False, False], "there is no board"
    for spec in specs:
        assert json.loads(spec.env["TUNA_WORKER_SESSION"])["environment"]["device"] == here.device
        assert not any(secret in " ".join(worker_command(spec)) for secret in hidden)
        assert "celery" not in worker_command(spec)
    assert not any(secret in shown for secret in hidden)
    with reading(open_database()) as connection:
        there = joined_workers.remote_workers(connection)
    assert sorted((one.role, one.environments, one.toolchains) for one in there) == [
        ("compile", (), (here.toolchain,)),
        ("eval", (here.machine_key,), ()),
    ]


@pytest.mark.service
def test_a_target_that_no_session_is_for_is_refused_and_its_token_is_left(master: str) -> None:
    other = dataclasses.replace(get_library("noop").environment(), device="another")
    client = MasterClient(master, _place(other), get_settings(), lambda _: None)
    with pytest.raises(
        BadInput,
        match=re.escape(f'The master at {master} has no session for the target {{"kind": "llvm"}}'),
    ):
        client.join(joining.create_token("client", 60.0))
    assert {token.state for token in api.list_tokens()} == {"open"}
    with reading(open_database()) as connection:
        assert joined_workers.remote_workers(connection) == []


@pytest.mark.service
def test_a_token_of_one_worker_is_not_a_clients(master: str) -> None:
    client = MasterClient(master, _place(), get_settings(), lambda _: None)
    with pytest.raises(BadInput, match="has two tokens") as raised:
        client.join(joining.create_token("eval", 60.0))
    assert "--role client" in raised.value.hint
    line = joining.create_token("client", 60.0)
    with pytest.raises(BadInput, match="not a join token") as raised:
        client.join(line[:-10] + "#")
    assert line[-20:-10] not in str(raised.value)


@pytest.mark.service
def test_a_client_of_the_masters_user_makes_its_own_token(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr(MasterClient, "join", lambda self, line: given.append(line) or [])
    monkeypatch.setattr(MasterClient, "serve", lambda self, specs: 0)
    port = master.rpartition(":")[2]
    assert joining.rpc_client(f"localhost:{port}", "llvm") == 0
    compiles, measures = JoinToken.parse_client(given[0])
    assert {(one.id, one.role) for one in api.list_tokens()} == {
        (compiles.id, "compile"),
        (measures.id, "eval"),
    }


def test_without_a_token_another_users_client_gets_nothing(
    type_in: Callable[..., Ended], home: Path
) -> None:
    """Whatever listens there: this home has no such port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = f"127.0.0.1:{listening.getsockname()[1]}"
        ended = type_in("tuna", "rpc-client", "--server", server, "--target", "llvm")
        connection, _ = listening.accept()
        with connection:
            assert connection.recv(100) == b"", "nothing was sent"
    assert ended.code == 2
    assert ended.out == _filled(2, server=server)
    assert "tuna token create --role client" in ended.err
    with sa.create_engine(f"sqlite:///{home / 'tuna.sqlite'}").connect() as connection_:
        assert access_tokens.list_all(connection_) == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--target", "llvm"], 5, "No master answers at 127.0.0.1:1: Connection refused."),
        (["--target", "cuda"], 2, "not 'cuda'"),
        (["--target", ARM], 2, "This machine cannot measure for aarch64-linux-gnu."),
        (["--target", ARM, "--device", "phone"], 2, "by its key and by the port"),
        (["--target", ARM, "--runner-port", "9190"], 2, "by its key and by the port"),
        (["--target", "llvm", "--server", "here"], 2, "'here' is not of the form HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    type_in: Callable[..., Ended],
    words: list[str],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuna.libraries.tvm.toolchain.platform.machine", lambda: "x86_64")
    ended = type_in("tuna", "rpc-client", "--server", "127.0.0.1:1", *words)
    assert (ended.code, says in ended.err) == (code, True), ended.err


def test_a_board_is_named_as_the_seed_has_it_and_measured_for_the_target_alone_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boards, "ask", lambda _: PI)
    monkeypatch.setattr("tuna.libraries.tvm.toolchain.check", lambda _: None)
    runner = MeasuringPlace.parse(
        "lvm -device=arm_cpu -mtriple=aarch64-linux-gnu", "my-device-key", 9190
    )
    assert str(runner) == "RPCRunner: 127.0.0.1:9190 - my-device-key"
    (alone, first), (own, second) = runner.places()
    assert alone == toolchain.target_environment(ARM)
    assert own == boards.environment_of(PI, runner.target, "my-device-key")
    assert first == {**second, "TUNA_TVM_TARGET_ALONE": "1"}
    assert second == {
        "TUNA_TVM_TRACKER": "127.0.0.1:9190",
        "TUNA_TVM_DEVICE_KEY": "my-device-key",
        "TUNA_TVM_TARGET": alone.target,
    }


@pytest.mark.parametrize(
    "target", [ARM, "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72 -num-cores=4"]
)
def test_a_worker_on_a_board_serves_the_environment_that_it_joined_with(
    target: str, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    facts = {**PI, "emulator": "qemu"}
    monkeypatch.setattr(boards, "ask", lambda _: facts)
    monkeypatch.setattr("tuna.libraries.tvm.toolchain.check", lambda _: None)
    for environment, variables in MeasuringPlace.parse(target, "key", 9190).places():
        with monkeypatch.context() as its:
            for name, value in variables.items():
                its.setenv(name, value)
            get_settings.cache_clear()
            library = tvm_library()
            assert isinstance(library.processes, BoardSession)
            assert library.environment() == environment
            library.processes.compare({**facts, "board": "1.2.3.4:9"})
            with pytest.raises(DeviceGone, match="another than the session's"):
                library.processes.compare({**facts, "board": "1.2.3.4:9", "cpu": "cortex-a53"})
        get_settings.cache_clear()


@pytest.mark.parametrize("target", ["llvm", '{"kind": "llvm"}', "llvm -mcpu=skylake"])
def test_a_worker_that_gets_these_settings_serves_that_environment(
    target: str, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """What the master admits, and what the worker then finds itself to be, are the same."""
    runner = MeasuringPlace.parse(target, None, None)
    for environment, variables in runner.places():
        with monkeypatch.context() as its:
            for name, value in variables.items():
                its.setenv(name, value)
            get_settings.cache_clear()
            assert TvmLibrary().environment() == environment
        get_settings.cache_clear()
