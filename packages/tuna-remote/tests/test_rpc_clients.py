"""Masters and clients over the network, as programs of their own: two at once, a master that is
killed, clients that end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from private_servers import free_port, wait_until
from shared_data import need
from test_boards import Shell, end

pytestmark = [pytest.mark.drill(only=True), pytest.mark.timeout(600)]
MASTER = """
import sys
from pathlib import Path
from tuna import api
from tuna_remote import joining
port, target, label, number = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
with joining.listening("127.0.0.1", port):
    session = api.init_session("tvm", label, {"target": target}).id
    api.import_configs(Path(f"{label}.txt"), tag=label)
    api.update_solvers("tvm")
    api.update_applicability(session)
    api.load_jobs(
        session, tag=label, reason="r", solvers=["TvmGemmTile"], options={"candidates": 1}
    )
    show = lambda _: print("workers", api.count_workers(session), flush=True)
    state = api.enqueue(session, on_progress=show)
print("ended", state.states, flush=True)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    need(find_spec("tvm"), "TVM")
    made = Shell(tmp_path)
    yield made
    made.close()


class Programs:
    """Masters and clients of one TUNA_HOME, each with a log of its own."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def master(self, port: int, target: str, label: str, layers: int) -> subprocess.Popen[bytes]:
        (self._shell.folder / f"{label}.txt").write_text(
            "".join(
                f"MIOpenDriver gemm -m {32 * number} -n 32 -k 32\n"
                for number in range(1, layers + 1)
            )
        )
        return self._start(
            label, sys.executable, "-c", MASTER, str(port), target, label, str(layers)
        )

    def client(self, port: int, target: str, name: str) -> subprocess.Popen[bytes]:
        where = ("--server", f"127.0.0.1:{port}", "--target", target)
        return self._start(name, sys.executable, "-m", "tuna", "rpc-client", *where)

    def log(self, name: str) -> str:
        path = self._shell.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with open(self._shell.folder / f"{name}.log", "ab") as log:
            made = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=self._shell.env,
                cwd=self._shell.folder,
                start_new_session=True,
            )
        return self._shell.adopt(made)


def _stop(client: subprocess.Popen[bytes]) -> None:
    """SIGTERM: it ends long before what a worker may take (30 s), and nothing of it is left."""
    started = psutil.Process(client.pid).children(recursive=True)
    began = time.monotonic()
    client.send_signal(signal.SIGTERM)
    assert client.wait(60) == 0
    assert time.monotonic() - began < 20
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


def test_two_masters_of_one_home_have_a_port_each_and_their_clients_end_at_once(
    shell: Shell,
) -> None:
    programs, one, other = Programs(shell), free_port(), free_port()
    targets = {one: "llvm", other: "llvm -num-cores=1"}
    first = programs.master(one, targets[one], "one", 2)
    wait_until(lambda: "workers 0" in programs.log("one"), 60, "the first master serves")
    second = programs.master(other, targets[other], "other", 2)
    wait_until(lambda: "workers 0" in programs.log("other"), 60, "the second master serves")
    clients = [programs.client(port, target, f"client-{port}") for port, target in targets.items()]
    assert [master.wait(300) for master in (first, second)] == [0, 0]
    for name in ("one", "other"):
        assert "ended {'evaluated': 2}" in programs.log(name)
        assert "workers 1" in programs.log(name)
    for port, client in zip(targets, clients, strict=True):
        said = [
            line for line in programs.log(f"client-{port}").splitlines() if line.startswith("INFO")
        ]
        assert said[0] == f"INFO RPCClient: Connecting to server 127.0.0.1:{port}"
        assert said[3:7] == [
            "INFO RPCClient: LocalRunner",
            "INFO RPCClient: Requesting a job for tuning",
            "INFO RPCClient: Start tuning",
            "INFO Tuner: Tuning workload TvmGemmTile on gemm 32x32x32 NN fp32",
        ]
        _stop(client)


def test_a_killed_master_comes_back_and_its_clients_go_on(shell: Shell) -> None:
    programs, port = Programs(shell), free_port()
    doomed = programs.master(port, "llvm", "one", 6)
    wait_until(lambda: "workers 0" in programs.log("one"), 60, "the master serves")
    client = programs.client(port, "llvm", "client")
    wait_until(
        lambda: programs.log("client").count("Tuning workload") >= 2, 200, "the client works"
    )
    end(doomed)
    time.sleep(3)
    assert client.poll() is None
    again = programs.master(port, "llvm", "one", 6)
    assert again.wait(300) == 0
    assert "ended {'evaluated': 6}" in programs.log("one")
    _stop(client)
