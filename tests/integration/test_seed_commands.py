"""Every command line that the seed document prints runs as printed, in order, against the double of
fin.

What stands in angle brackets is filled in; `../utils/recurrent_cfgs/resnet50.txt` is a list of one
layer. Each script is a program of its own when it is first typed, and a call within this process or
a fork after that, which start sooner.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_lines import PROGRAMS, Ended
from fin_double.rocm import install
from fork_server import ForkServer, forking
from private_servers import rabbitmq_server, redis_server
from processes import stop_redis
from shared_data import DRILLS, needed_program, shared_data

from tuna.libraries.miopen.environment import visible_gpu
from tuna.settings import get_settings

ROOT = Path(__file__).resolve().parents[2]
#: Hosts of this process alone, since the document has a fixed port.
REDIS, RABBITMQ = (f"127.{net}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}" for net in (71, 72))
_LIMIT_S = 120.0


def printed_commands(text: str) -> list[str]:
    """The command lines of the document, a line that goes on with options joined to the one
    before."""
    found: list[str] = []
    for raw in text.splitlines():
        line = raw.strip().removesuffix("</p>")
        if re.match(r"(\./\S+\.py |celery |export [A-Z_]+=|cd )", line):
            found.append(line)
        elif line.startswith("--") and " - " not in line:
            found[-1] += f" {line}"
    return found


def test_the_document_prints_what_we_think() -> None:
    found = printed_commands(seed())
    assert len([line for line in found if line.startswith("./")]) == 22
    assert len([line for line in found if line.startswith("celery")]) == 2
    assert found[4].endswith("--model Resnet50 --md_version 1 --framework Pytorch --fw_version 1")
    assert found[4].count("resnet50.txt") == 1


def seed() -> str:
    """The document."""
    (path,) = shared_data("..", "seeds").glob("001*.txt")
    return path.read_text()


@dataclass
class Terminals:
    """A user's working directory and terminals."""

    folder: Path
    env: dict[str, str]
    call: Callable[..., Ended]  #: what a command line does, in this process
    server: ForkServer | None
    seen: set[str]  #: scripts that ran as programs
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, line: str, **env: str) -> subprocess.Popen[bytes]:
        """Type a command line into a terminal of its own."""
        script = shlex.split(line)[0]
        server = self.server if script in self.seen else None
        self.seen.add(script)
        with forking(server), open(self.folder / "log", "ab") as log:
            log.write(f"\n$ {line}\n".encode())
            log.flush()
            process = subprocess.Popen(
                shlex.split(line),
                cwd=self.folder,
                env={**self.env, **env},
                stdout=subprocess.PIPE if "export_db" in line else log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def run(self, line: str, **env: str) -> str:
        """Type a command line, wait for its end, which must be a good one; returns what an export
        printed."""
        script, *words = shlex.split(line)
        name = script.removeprefix("./").removesuffix(".py")
        # Celery keeps the first broker of a process, so that what executes is always a process.
        if DRILLS == 1 and script in self.seen and name in PROGRAMS and "--execute" not in words:
            ended = self.call(name, *words)
            assert ended.code == 0, (line, ended)
            return ended.out
        process = self.start(line, **env)
        output, _ = process.communicate(timeout=_LIMIT_S)
        assert process.returncode == 0, f"{line}: {self.log()}"
        return (output or b"").decode()

    def work_off(
        self, coordinator: subprocess.Popen[bytes], worker: subprocess.Popen[bytes]
    ) -> None:
        """Wait for the coordinator; then ask the worker to leave. Both must end well."""
        assert coordinator.wait(_LIMIT_S) == 0, self.log()
        assert worker.poll() is None, self.log()
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(_LIMIT_S) == 0, self.log()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout:
                process.stdout.close()


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """Scripts that ran as programs in one of the tests here."""
    return set()


@pytest.fixture
def terminals(
    empty_home: Path,
    knows_machine: Callable[[Path], None],
    tmp_path: Path,
    type_in: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    tuna_forks: ForkServer | None,
    seen: set[str],
) -> Iterator[Terminals]:
    """A checkout beside `utils/recurrent_cfgs`, a ROCm with the double of fin, a TUNA_HOME without
    a database."""
    knows_machine(empty_home)
    checkout = tmp_path / "MITuna"
    checkout.mkdir()
    for name in (
        "go_fish.py",
        "load_job.py",
        "export_db.py",
        "update_golden.py",
        "tuna",
        "example",
    ):
        (checkout / name).symlink_to(ROOT / name)
    (tmp_path / "utils" / "recurrent_cfgs").mkdir(parents=True)
    lines = (ROOT / "tuna/example/resnet50_b1.txt").read_text().splitlines()
    layer = next(line for line in lines if "-y 3" in line)
    (tmp_path / "utils/recurrent_cfgs/resnet50.txt").write_text(f"{layer}\n")
    rocm = install(tmp_path / "rocm", arch="gfx908", num_cu=120, marked=False)
    paths = [str(Path(sys.executable).parent), str(tmp_path / "rocm" / "bin"), os.environ["PATH"]]
    for name, value in {"PATH": ":".join(paths), **rocm}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TUNA_SIMULATED")
    monkeypatch.chdir(checkout)
    get_settings.cache_clear()
    visible_gpu.cache_clear()
    made = Terminals(checkout, dict(os.environ), type_in, tuna_forks, seen)
    yield made
    made.end()
    stop_redis()
    visible_gpu.cache_clear()


def between(commands: list[str], first: str, last: str) -> list[str]:
    """The commands from the one that contains `first` up to the one that contains `last`."""
    start = next(number for number, line in enumerate(commands) if first in line)
    end = next(number for number, line in enumerate(commands) if last in line)
    return commands[start : end + 1]


def test_tuning_miopen_as_printed(terminals: Terminals, tmp_path: Path) -> None:
    commands = printed_commands(seed())
    for line in between(commands, "--add_model", "load_job.py"):
        terminals.run(line)
    enqueue, work = between(
        commands,
        "miopen_perf_compile --enqueue_only",
        "./go_fish.py miopen --session_id 1 --fin_steps miopen_perf_eval --enqueue_only",
    )[:2]
    assert work == enqueue.removesuffix(" --enqueue_only")
    terminals.work_off(terminals.start(enqueue), terminals.start(work))
    (enqueue,) = [line for line in commands if "miopen_perf_eval --enqueue_only" in line]
    # "This command is similar to the previous": the document prints the worker's only for the
    # compile step.
    terminals.work_off(
        terminals.start(enqueue), terminals.start(enqueue.removesuffix(" --enqueue_only"))
    )
    (export,) = [line for line in commands if "export_db.py" in line]
    assert export.endswith("-p")
    for flag, name in (
        ("-p", "gfx90878.db"),
        ("-f", "gfx90878.HIP.fdb.txt"),
        ("-k", "gfx90878.kdb"),
    ):
        path = terminals.run(export.removesuffix("-p") + flag).splitlines()[-1]
        assert Path(path).name == name
        assert (terminals.folder / path).stat().st_size > 0
    _manual_workers(terminals, commands, tmp_path)
    _golden(terminals, commands)


def _manual_workers(terminals: Terminals, commands: list[str], tmp_path: Path) -> None:
    """The two celery lines with their variables, one with Redis as broker, one with RabbitMQ."""
    compile_lines = between(commands, "CELERY_BROKER_URL=redis", "-Q <q_name>")
    eval_lines = commands[
        commands.index(compile_lines[-1]) + 1 : commands.index(compile_lines[-1]) + 5
    ]
    assert eval_lines[-1].endswith("-c 1")
    fill = {
        "<logfile>": str(tmp_path / "celery.log"),
        "<unique_worker_name>": "worker1@here",
        "<GPUID>": "0",
    }
    fill |= {"<user><password>": "user:password"}
    terminals.run(
        "./load_job.py --session_id 1 -t resnet50 --fin_steps miopen_find_compile,miopen_find_eval"
        " -l reason"
    )
    needed_program("rabbitmq-server")
    with (
        redis_server(host=REDIS, port=6379),
        rabbitmq_server(RABBITMQ, 6379, "14", "user", "password"),
    ):
        for step, queue, lines in (
            ("compile", "compile", compile_lines),
            ("eval", "eval", eval_lines),
        ):
            variables: dict[str, str] = {}
            for raw in lines:
                line = raw
                # Redis and RabbitMQ cannot share a port: each has its own host.
                host = RABBITMQ if "amqp:" in line else REDIS
                for mark, value in {**fill, "<q_name>": queue, "<hostname>": host}.items():
                    line = line.replace(mark, value)
                assert "<" not in line
                if line.startswith("export "):
                    name, _, value = line.removeprefix("export ").partition("=")
                    variables[name] = value
                elif line.startswith("celery"):
                    go = (
                        "./go_fish.py miopen --session_id 1 --fin_steps"
                        f" miopen_find_{step} --enqueue_only"
                    )
                    terminals.work_off(
                        terminals.start(go, **variables), terminals.start(line, **variables)
                    )


def _golden(terminals: Terminals, commands: list[str]) -> None:
    (line,) = [line for line in commands if "update_golden.py" in line]
    # the version that <old_ver> stands for
    terminals.run("./update_golden.py --session_id 1 --golden_v 1")
    for mark, value in ((r"\<id\>", "1"), (r"\<new_ver\>", "2"), (r"\<old_ver\>", "1")):
        line = line.replace(mark, value)
    terminals.run(line)
    path = terminals.run("./export_db.py --golden_v 2 -a gfx908 -n 120 -f").splitlines()[-1]
    assert Path(path).name == "gfx90878.HIP.fdb.txt"


def test_the_example_library_as_printed(terminals: Terminals) -> None:
    commands = [line for line in printed_commands(seed()) if "example" in line]
    assert len(commands) == 8
    for line in commands:
        terminals.run(line)
    show = [sys.executable, "-m", "tuna", "status", "--json"]
    output = subprocess.run(show, env=terminals.env, capture_output=True, check=True).stdout
    assert b'"evaluated": 1' in output
