"""The master of the seed's tutorial on RPC workers: its file, command lines and console lines as
printed."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shared_data import needed_program, shared_data

from tuna import api
from tuna.cli.main import guarded
from tuna.errors import BadInput
from tuna_remote.cli import rpc_master
from tuna_remote.cli.lorien import lorien
from tuna_remote.cli.rpc_master import bar_line
from tuna_remote.master import LayerCounts, Master, MasterPlan

pytestmark = [
    pytest.mark.keeps_processes,  # the private Redis, until the module's end
    pytest.mark.usefixtures("forked"),
]
GEMMS = "workload:\n" + "".join(
    f"  - MIOpenDriver gemm -m 32 -n 32 -k {16 + k}\n" for k in range(100)
)
GEMM = "MIOpenDriver gemm -m 8 -n 8 -k 8"


def seed() -> str:
    (path,) = shared_data("..", "seeds").glob("000*.txt")
    return path.read_text()


def printed_file(text: str) -> str:
    """`tune_rpc.yaml` as the document has it."""
    return text[text.index("# tune_rpc.yaml") :].split("\n\n")[0] + "\n"


def printed_commands(text: str) -> list[list[str]]:
    """The words of the command lines of masters, without `python3 -m lorien`."""
    return [
        shlex.split(line)[3:]
        for line in text.splitlines()
        if line.startswith("python3 -m lorien tune ")
    ]


def printed_lines(text: str) -> list[str]:
    """What the master prints first: lines of its log, then the bar."""
    lines = text[text.index("INFO Master: Loaded") :].split("\n\n")[0].splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [
        "INFO Master",
        "INFO Master",
        "INFO RPCServer",
        "INFO RPCServer",
    ]
    return lines


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.fixture
def typed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], tuple[int, list[str], list[str]]]:
    """A command line of `lorien` in this process: its exit code, lines on stdout and on stderr."""

    def run(words: list[str]) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        code = guarded(lorien, words, "lorien")
        found = capsys.readouterr()
        return code, found.out.splitlines(), found.err.splitlines()

    return run


def test_the_document_prints_what_we_think() -> None:
    assert printed_commands(seed()) == [
        ["tune", "@tune_rpc.yaml", "@workloads.yaml"],
        ["tune", "@tune_rpc.yaml", "@workloads.yaml", "--trace-file=<trace_file_path>"],
    ]
    assert "target: lvm -device=arm_cpu -mtriple=aarch64-linux-gnu" in printed_file(seed())


@pytest.mark.service
def test_a_master_as_printed(
    typed: Callable[..., tuple[int, list[str], list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its file as it stands, but for the port; its lines, with our values; no worker, so that
    nothing is waited for."""
    needed_program("aarch64-linux-gnu-g++")
    port = free_port()

    def run(master: Master, on_counts: Callable[[LayerCounts], Any]) -> None:
        on_counts(master.counts())

    monkeypatch.setattr(Master, "run", run)
    (tmp_path / "tune_rpc.yaml").write_text(printed_file(seed()).replace("18871", port))
    (tmp_path / "workloads.yaml").write_text(GEMMS)
    first, again = printed_commands(seed())
    code, out, err = typed(first)
    assert code == 1, "no workload has a result"
    *lines, bar = printed_lines(seed())
    ours = {
        "18871": port,
        "s3://tuned-logs/topi-llvm": "tuned-logs/llvm_-mtriple=aarch64-linux-gnu",
    }
    for mark, value in ours.items():
        lines = [line.replace(mark, value) for line in lines]
    assert out == lines
    target, counts = bar.split(" on 0 ")
    assert target.startswith("llvm ")
    pattern = re.escape(counts).replace(r"\ ", " ").replace("00:02", r"\d\d:\d\d")
    assert [
        line
        for line in err
        if re.fullmatch(f"llvm -mtriple=aarch64-linux-gnu on 0 {pattern}", line)
    ], err
    assert any("no result to commit" in line for line in err)
    (trace,) = tmp_path.glob("lorien-tune-*.trace")
    jobs = trace.read_text().splitlines()
    code, out, _ = typed([word.replace("<trace_file_path>", str(trace)) for word in again])
    assert (code, out) == (1, lines)
    assert trace.read_text().splitlines() == jobs, "the same session"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune"], "--rpc"),
        (["tune", "@tune_rpc.yaml"], "No workload was given"),
        (["tune", "@tune_rpc.yaml", "--tuner", "gridsearch"], "gridsearch does not exist"),
        (["tune", "@tune_rpc.yaml", "--local", "llvm"], "tunes on this machine alone"),
        (["tune", "--rpc", "{target: llvm, port: 1", "--workload", GEMM], "is not YAML"),
        (["generate"], "No such command 'generate'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_master_refuses(
    typed: Callable[..., tuple[int, list[str], list[str]]],
    tmp_path: Path,
    words: list[str],
    said: str,
) -> None:
    (tmp_path / "tune_rpc.yaml").write_text(printed_file(seed()))
    code, out, err = typed(words)
    assert (code, out) == (2, [])
    assert any(said in line for line in err), err
    assert list(tmp_path.glob("lorien-tune-*")) == []


@pytest.mark.service
@pytest.mark.parametrize(
    ("tuner", "strategy"), [("random", "random"), ("xgb", "search"), ("ga", "search")]
)
def test_options_become_the_options_of_jobs(
    typed: Callable[..., tuple[int, list[str], list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tuner: str,
    strategy: str,
) -> None:
    plans: list[MasterPlan] = []

    def start(plan: MasterPlan, trace: Path) -> None:
        plans.append(plan)
        raise BadInput("no more")

    monkeypatch.setattr(rpc_master, "start_master", start)
    # any port: others may run this at the same time
    (tmp_path / "tune_rpc.yaml").write_text(printed_file(seed()).replace("18871", "0"))
    (tmp_path / "workloads.yaml").write_text(GEMMS)
    layer = "MIOpenDriver gemm -m 32 -n 32 -k 16"
    typed([*f"tune @tune_rpc.yaml @workloads.yaml -t {tuner} --workload".split(), layer])
    (plan,) = plans
    assert plan.options == {"candidates": 3000, "strategy": strategy}
    assert (plan.target, plan.table, plan.log_url) == (
        "lvm -device=arm_cpu -mtriple=aarch64-linux-gnu",
        "lorien-data",
        "tuned-logs",
    )
    assert len(plan.layers) == 100, "equal ones are one"


@pytest.mark.parametrize(
    ("done", "total", "here", "seconds", "line"),
    [
        (0, 100, 0, 2.5, "llvm on 0 RPC workers:   0%|#{0} {36}| 0/100 [00:02<?, ?it/s]"),
        (1, 2, 1, 10.0, "llvm on 0 RPC workers:  50%|#{18} {18}| 1/2 [00:10<00:10, 10.00s/it]"),
        (4, 4, 3, 1.5, "llvm on 0 RPC workers: 100%|#{36} {0}| 4/4 [00:01<00:00, 2.00it/s]"),
        (1, 3, 0, 3700.0, "llvm on 0 RPC workers:  33%|#{12} {24}| 1/3 [1:01:40<?, ?it/s]"),
    ],
    ids=str,
)
def test_the_bar(done: int, total: int, here: int, seconds: float, line: str) -> None:
    """In the line `#{18}` stands for 18 of them."""
    drawn = re.sub(r"(.)\{(\d+)\}", lambda found: found[1] * int(found[2]), line)
    assert bar_line("llvm", LayerCounts(done, total, 0), seconds, here) == drawn


@pytest.mark.service
def test_the_lines_go_into_a_file_too(
    typed: Callable[..., tuple[int, list[str], list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Master, "run", lambda master, on_counts: on_counts(master.counts()))
    words = ["--rpc", f"{{target: llvm, port: {free_port()}}}", "--workload", GEMM]
    (tmp_path / "log.yaml").write_text("log-run: true\n")
    code, out, _ = typed(["tune", *words, "@log.yaml"])
    assert code == 1
    (path,) = tmp_path.glob("run-*.log")
    assert path.read_text().splitlines() == out
    assert out[0] == "INFO Master: Loaded 1 workloads"


def test_a_port_in_use_leaves_nothing(
    typed: Callable[..., tuple[int, list[str], list[str]]], tmp_path: Path
) -> None:
    words = ["--trace-file", "t", "--workload", GEMM]
    with socket.create_server(("127.0.0.1", 0)) as server:
        rpc = f"{{target: llvm, port: {server.getsockname()[1]}}}"
        code, out, err = typed(["tune", "--rpc", rpc, *words])
    assert (code, out) == (2, [])
    assert "is in use" in err[0]
    assert any("choose another one with `port` of --rpc" in line for line in err), err
    assert not (tmp_path / "t").exists()
    assert api.list_sessions() == []
