"""The seed's master and client as programs: killed, started again with the trace file, with and
without the database."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from jobs_builder import accepted
from private_servers import free_port, wait_until
from shared_data import need
from test_boards import Shell, end
from test_seed_master import printed_commands, printed_file, seed

from tuna.db.engine import make_engine

pytestmark = [pytest.mark.drill(only=True), pytest.mark.timeout(900)]
LAYERS = 6


class Programs:
    """A checkout's `lorien.py` in a folder with the seed's files, filled in for this machine."""

    def __init__(self, shell: Shell) -> None:
        self._shell, self.port = shell, free_port()
        self.trace = shell.folder / "session.trace"
        shutil.copy(Path(__file__).resolve().parents[3] / "lorien.py", shell.folder)
        text = printed_file(seed()).replace("18871", str(self.port)).replace("3000", "2")
        target = next(line for line in text.splitlines() if "target:" in line)
        (shell.folder / "tune_rpc.yaml").write_text(text.replace(target, "  target: lvm"))
        rows = "".join(
            f"  - MIOpenDriver gemm -m {32 * number} -n 32 -k 32\n"
            for number in range(1, LAYERS + 1)
        )
        (shell.folder / "workloads.yaml").write_text(f"workload:\n{rows}")

    def master(self) -> subprocess.Popen[bytes]:
        (line,) = [
            words for words in printed_commands(seed()) if "--trace-file=<trace_file_path>" in words
        ]
        return self._start(
            "master", *(word.replace("<trace_file_path>", str(self.trace)) for word in line)
        )

    def client(self) -> subprocess.Popen[bytes]:
        lines = [
            line for line in seed().splitlines() if line.startswith("python3 -m lorien rpc-client")
        ]
        words = shlex.split(lines[0])[3:]
        words[words.index("--server") + 1] = f"127.0.0.1:{self.port}"
        words[words.index("--target") + 1] = "llvm"
        return self._start("client", *words)

    def log(self, name: str) -> str:
        return (self._shell.folder / f"{name}.log").read_text()

    def ended(self) -> Counter[tuple[str, str]]:
        """By layer and solver, how often the trace says that the job has ended."""
        if not self.trace.exists():
            return Counter()
        lines = [
            line
            for line in self.trace.read_bytes().splitlines(keepends=True)[1:]
            if line.endswith(b"\n")
        ]
        found = [json.loads(line) for line in lines]
        return Counter(
            (one["job"]["key"], one["job"]["solver"])
            for one in found
            if one["state"] == "evaluated"
        )

    def _start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with open(self._shell.folder / f"{name}.log", "ab") as log:
            made = subprocess.Popen(
                [sys.executable, "-m", "lorien", *words],
                stdout=log, stderr=log, env=self._shell.env, cwd=self._shell.folder,
                start_new_session=True,
            )  # fmt: skip
        return self._shell.adopt(made)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    need(find_spec("tvm"), "TVM")
    made = Shell(tmp_path)
    yield made
    made.close()


def test_each_job_is_done_once_whatever_is_killed(shell: Shell) -> None:
    programs, home = Programs(shell), Path(shell.env["TUNA_HOME"])
    master, jobs = programs.master(), 2 * LAYERS
    wait_until(lambda: "0/6" in programs.log("master"), 100, "the master serves")
    client = programs.client()
    wait_until(lambda: len(programs.ended()) >= 2, 300, "two jobs have ended")
    end(master)

    with_database = programs.ended()
    assert len(with_database) < jobs, "it was killed in the middle"
    master = programs.master()
    wait_until(lambda: len(programs.ended()) >= len(with_database) + 2, 300, "two more have ended")
    end(master)
    end(client)

    without = programs.ended()
    assert len(without) < jobs
    shutil.rmtree(home)
    home.mkdir(mode=0o700)
    master = programs.master()
    wait_until(
        lambda: "restored from the trace file" in programs.log("master"),
        100,
        "the session is restored",
    )
    client = programs.client()
    assert master.wait(400) == 0, programs.log("master")[-3000:]
    started = psutil.Process(client.pid).children(recursive=True)
    client.send_signal(signal.SIGTERM)
    assert client.wait(20) == 0, "long before what a worker may take, 30 s"
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert set(programs.ended().values()) == {1}
    assert len(programs.ended()) == jobs
    assert "100%" in programs.log("master")
    engine = make_engine(f"sqlite:///{home}/tuna.sqlite")
    done = accepted(engine)
    engine.dispose()
    assert {count for *_, count in done} == {1}
    assert len({job for job, *_ in done}) == jobs
    assert (shell.folder / "lorien-data" / "lorien-data.results.jsonl").exists()
    assert len(list((shell.folder / "tuned-logs").glob("llvm/*.jsonl.gz"))) == jobs
