"""`tuna tune-rpc`: the seed's `python3 -m lorien tune @tune_rpc.yaml @workloads.yaml`, with its
files and its console lines."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import LiveLine, say
from tuna.common.messages import choices, counted
from tuna.configs import Workload, read_line
from tuna.errors import BadInput, NotFound, TunaError
from tuna_remote.cli import safe_yaml
from tuna_remote.cli.at_files import AtFileCommand
from tuna_remote.joining import listening
from tuna_remote.master import LayerCounts, Master, MasterPlan, start_master

_BAR_CHARS = 36
_TRIALS = click.IntRange(1, 10_000)
_NOT_HERE = {
    "local": "`tuna tune FILE -t TAG` tunes on this machine alone",
    "batch": "start `tuna worker ROLE --once` in the jobs of any batch system",
    "db": "results are in Tuna's database, which TUNA_DB_URL names",
    "job": "a master's jobs are in its database and its trace file",
    "job-configs": "a master's jobs are in its database and its trace file",
    "commit-workload": "workloads are always kept with their results",
    "test": "Tuna repeats a measurement until its interval is narrow",
    "repeat": "Tuna repeats a measurement until its interval is narrow",
    "min": "Tuna repeats a measurement until its interval is narrow",
}
_GRID = "a solver's whole space has up to 10^12 points; take random, or a larger --ntrial"
#: Lorien's tuners, with TVM's job option `strategy`; both others are a search that learns.
_TUNERS = {"random": "random", "ga": "search", "xgb": "search", "gridsearch": ""}


@dataclass(frozen=True)
class _Rpc:
    target: str
    port: int


class _RpcType(click.ParamType[_Rpc, Any]):
    """`{target: TEXT, port: NUMBER}`."""

    name = "rpc"
    keys = ("target", "port")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _Rpc:
        if isinstance(value, _Rpc):
            return value
        given: dict[str, Any] = {}
        for key, node in safe_yaml.pairs(safe_yaml.parse(str(value), "--rpc"), "--rpc"):
            if key.value not in self.keys:
                raise BadInput(
                    f"rpc has no {key.value!r}.", hint=choices(str(key.value), self.keys, "it has")
                )
            given[str(key.value)] = safe_yaml.value(node, "--rpc")
        if missing := [key for key in self.keys if key not in given]:
            raise BadInput(
                f"rpc needs {' and '.join(missing)}.", hint="such as {target: llvm, port: 18871}"
            )
        target, port = given["target"], given["port"]
        if not isinstance(target, str | dict) or not target:
            raise BadInput("rpc's target is a text, such as llvm -mcpu=znver4.")
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
            raise BadInput(f"rpc's port is a number from 0 to 65535, not {port!r}.")
        return _Rpc(json.dumps(target) if isinstance(target, dict) else target, port)


class _Workload(click.ParamType[Any, Any]):
    """A layer or task: a driver command, a JSON object or a mapping with its `kind`, and its body
    where it has one; several where a command has several directions."""

    name = "workload"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[Workload]:
        if not isinstance(value, str):
            found: Sequence[Workload] = value
            return found
        text = value.strip()
        if text.startswith("!") or "!!" in text:
            raise BadInput(_TAGGED)
        node = safe_yaml.parse(text, "the workload")
        document = safe_yaml.value(node, "the workload")
        if isinstance(document, dict):
            return [Workload.read(document)]
        return [Workload(config) for config in read_line(text)]


_TAGGED = (
    "a workload with a Python class tag is code or a pickle and is not read; write the layer as a"
    " driver command (MIOpenDriver gemm -m 64 -n 64 -k 64) or as a mapping with its kind"
)


@dataclass(frozen=True)
class _MasterOptions:
    """The target, its layers, and where trials and results go."""

    rpc: _Rpc = options.option(
        "{target: TEXT, port: NUMBER}", type=_RpcType(), required=True, metavar="YAML"
    )
    workloads: tuple[Sequence[Workload], ...] = options.option(
        "A driver command, or a mapping with its kind; may be repeated.",
        "--workload",
        type=_Workload(),
        metavar="LAYER",
    )
    tuner: str = options.option(
        "The search.", "-t", type=click.Choice(list(_TUNERS)), default="random"
    )
    ntrial: int = options.option("Trials per job.", "-n", type=_TRIALS, default=3000)
    table: str = options.option(
        "Label, and name of the table.", "--commit-table-name", default="lorien"
    )
    n_best: int = options.option(
        "Kept of each layer.", "--commit-nbest", type=options.COUNT, default=20
    )
    log_url: str = options.option(
        "Where all trials go: a folder, s3://...",
        "--commit-log-to",
        default="",
        show_default=False,
        metavar="URL",
    )
    trace_file: Path | None = options.option(
        "Go on with this; default: the last one of the table and target here.",
        type=click.Path(dir_okay=False, path_type=Path),
    )
    host: str = options.option(
        "Address that the port is opened on.", "--listen", default="127.0.0.1"
    )
    log_run: bool = options.option("Write the lines also into run-<date>.log.")
    output: Path | None = options.option(
        "Default: a folder named as the table.",
        "-o",
        type=click.Path(file_okay=False, path_type=Path),
    )


@click.command(
    "tune-rpc",
    cls=AtFileCommand,
    refused=_NOT_HERE,
    epilog="Each word @FILE stands for the options that the YAML file FILE holds.",
)
@options.collected(_MasterOptions)
@options.boards
def tune_rpc(wanted: _MasterOptions, tvm_tracker: str | None, device_key: str | None) -> int:
    """Tune workloads for one target on workers that join over the network, and commit the best of
    each.

    The port is for `tuna rpc-client`. A master that was interrupted goes on with its trace file,
    with or without its database.
    """
    target, port, table = wanted.rpc.target, wanted.rpc.port, wanted.table
    if wanted.tuner == "gridsearch":
        raise BadInput(f"The tuner gridsearch does not exist: {_GRID}.")
    workloads = [workload for group in wanted.workloads for workload in group]
    if not workloads and not (wanted.trace_file and wanted.trace_file.exists()):
        raise BadInput(
            "No workload was given.", hint="use --workload, or name a file: @workloads.yaml"
        )
    job_options = {"candidates": wanted.ntrial, "strategy": _TUNERS[wanted.tuner]}
    plan = MasterPlan(
        target, workloads, table, job_options, wanted.log_url, tvm_tracker or "", device_key or ""
    )
    with (
        listening(wanted.host, port, "`port` of --rpc"),
        _lines(wanted.log_run) as info,
        start_master(plan, wanted.trace_file) as master,
    ):
        info(f"INFO Master: Loaded {len(plan.layers)} workloads")
        if master.logs is not None:
            info(
                f"INFO Master: Tuning logs on {master.target.split()[0]} will be uploaded to"
                f" {master.logs.shown}"
            )
        _say_of(master)
        info(f"INFO RPCServer: Launching RPC server at port {port}")
        info("INFO RPCServer: Server has been initialized")
        with _Bar(master.target) as bar:
            master.run(bar.update)
        return _committed(master, wanted.output or Path(table), table, wanted.n_best)


@contextlib.contextmanager
def _lines(log_run: bool) -> Iterator[Callable[[str], None]]:
    """Return a function that prints a line, into a file too if wanted."""
    if not log_run:
        yield say
        return
    with open(
        f"run-{datetime.now(timezone.utc):%Y%m%d-%H%M}.log", "a", encoding="utf-8", buffering=1
    ) as file:

        def both(line: str) -> None:
            say(line)
            file.write(f"{line}\n")

        yield both


def _say_of(master: Master) -> None:
    """Print on stderr whatever the seed's master has no line for."""
    say(f"trace file: {master.trace.path}, session {master.session_id}", err=True)
    for label in master.unsolved:
        say(f"no solver can run {label}", err=True)
    if master.restored:
        say("restored from the trace file: the database did not have this session", err=True)
    if master.others:
        say(
            f"{counted(master.others, 'job')} of before keep their own number of trials, or tuner",
            err=True,
        )


def _committed(master: Master, folder: Path, table: str, n_best: int) -> int:
    """Commit and export; the exit code is 0 if each layer has a result."""
    total = master.counts().total + len(master.unsolved)
    try:
        done = master.commit(folder / f"{table}.results.jsonl", n_best)
        results = f"{done.added} new of {counted(done.results, 'result')} in the table"
        say(f"committed: {counted(done.layers, 'layer')} of {total}, {results}")
        show.exported(api.export(master.session_id, "tvm", folder, top=n_best))
        say(str(done.path))
    except NotFound as error:
        raise TunaError(str(error), hint=error.hint) from None
    if done.layers < total:
        say(f"see why some failed: `tuna status --session-id {master.session_id}`", err=True)
    return 0 if done.layers == total else 1


class _Bar(LiveLine):
    """The seed's line of progress: in place on a terminal, else when it changes and now and
    then."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target, self._started_at = target, time.monotonic()
        self._shown: tuple[int, int] | None = None
        self._at_start: int | None = None

    def update(self, counts: LayerCounts) -> None:
        """Show new counts."""
        if self._at_start is None:
            self._at_start = counts.done
        seconds = time.monotonic() - self._started_at
        line = bar_line(self._target, counts, seconds, counts.done - self._at_start)
        now = (counts.done, counts.workers)
        self.change(line, line, due=self._shown != now)
        self._shown = now


def bar_line(target: str, counts: LayerCounts, seconds: float, done_here: int) -> str:
    """`llvm on 1 RPC workers:  50%|##        | 1/2 [00:10<00:10, 10.00s/it]`; `done_here`: of this
    run."""
    share = counts.done / counts.total if counts.total else 1.0
    bar = f"{'#' * int(share * _BAR_CHARS):{_BAR_CHARS}}"
    left, rate = "?", "?it/s"
    if done_here and seconds:
        each_s = seconds / done_here
        left = _clock(each_s * (counts.total - counts.done))
        rate = f"{each_s:.2f}s/it" if each_s > 1 else f"{1 / each_s:.2f}it/s"
    return (
        f"{target} on {counts.workers} RPC workers: {100 * share:3.0f}%|{bar}|"
        f" {counts.done}/{counts.total} [{_clock(seconds)}<{left}, {rate}]"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
