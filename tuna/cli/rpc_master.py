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
from types import TracebackType
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tuna import api
from tuna.cli import options, safe_yaml, show
from tuna.cli.at_files import AtFileCommand
from tuna.cli.console import say
from tuna.configs import Config, from_json, read_line
from tuna.errors import BadInput, NotFound, TunaError
from tuna.messages import choices, counted

#: Seconds between two lines of the bar where there is no terminal, if nothing changes.
_LINE_EVERY_S = 10.0
_BAR_CHARS = 36
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
#: Lorien's tuners, with what TVM's job option `search` has for them; both others are a search that
#: learns.
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
        return _Rpc(_json(target) if isinstance(target, dict) else target, port)


class _Workload(click.ParamType[Any, Any]):
    """A layer: a driver command, a JSON object or a mapping with its `kind`; several where a
    command has several directions."""

    name = "workload"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[Config]:
        if not isinstance(value, str):
            found: Sequence[Config] = value
            return found
        text = value.strip()
        if text.startswith("!") or "!!" in text:
            raise BadInput(_TAGGED)
        node = safe_yaml.parse(text, "the workload")
        document = safe_yaml.value(node, "the workload")
        if isinstance(document, dict):
            return [from_json(document)]
        return read_line(text)


_TAGGED = (
    "a workload with a Python class tag is code or a pickle and is not read; write the layer as a"
    " driver command (MIOpenDriver gemm -m 64 -n 64 -k 64) or as a mapping with its kind"
)


def _json(target: dict[str, Any]) -> str:
    return json.dumps(target)


@click.command(
    "tune-rpc",
    cls=AtFileCommand,
    refused=_NOT_HERE,
    epilog="Each word @FILE stands for the options that the YAML file FILE holds.",
)
@click.option(
    "--rpc", type=_RpcType(), required=True, metavar="YAML", help="{target: TEXT, port: NUMBER}"
)
@click.option(
    "--workload", "workloads", type=_Workload(), multiple=True, metavar="LAYER",
    help="A driver command, or a mapping with its kind; may be repeated.",
)  # fmt: skip
@click.option(
    "-t",
    "--tuner",
    type=click.Choice(list(_TUNERS)),
    default="random",
    show_default=True,
    help="The search.",
)
@click.option(
    "-n",
    "--ntrial",
    type=click.IntRange(1, 10_000),
    default=3000,
    show_default=True,
    help="Trials per job.",
)
@click.option(
    "--commit-table-name",
    "table",
    default="lorien",
    show_default=True,
    help="Label, and name of the table.",
)
@click.option(
    "--commit-nbest",
    "n_best",
    type=options.COUNT,
    default=20,
    show_default=True,
    help="Kept of each layer.",
)
@click.option(
    "--commit-log-to",
    "log_url",
    default="",
    metavar="URL",
    help="Where all trials go: a folder, s3://...",
)
@click.option(
    "--trace-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Go on with this; default: a new one.",
)
@click.option(
    "--listen",
    "host",
    default="127.0.0.1",
    show_default=True,
    help="Address that the port is opened on.",
)
@click.option("--log-run", is_flag=True, help="Write the lines also into run-<date>.log.")
@options.boards
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Default: a folder named as the table.",
)
def tune_rpc(
    rpc: _Rpc,
    workloads: tuple[Sequence[Config], ...],
    tuner: str,
    ntrial: int,
    table: str,
    n_best: int,
    log_url: str,
    trace_file: Path | None,
    host: str,
    log_run: bool,
    tvm_tracker: str | None,
    device_key: str | None,
    output: Path | None,
) -> int:
    """Tune workloads for one target on workers that join over the network, and commit the best of
    each.

    The port is for `tuna rpc-client`. A master that was interrupted goes on with its trace file,
    with or without its database.
    """
    if tuner == "gridsearch":
        raise BadInput(f"There is no gridsearch: {_GRID}.")
    layers = list({config.key: config for found in workloads for config in found}.values())
    trace = trace_file or Path(f"lorien-tune-{time.time_ns() // 1_000_000}.trace")
    if not layers and not trace.exists():
        raise BadInput(
            "There is no workload.", hint="give them with --workload, or in a file: @workloads.yaml"
        )
    given = {"candidates": ntrial, "search": _TUNERS[tuner]}
    plan = api.MasterPlan(
        rpc.target, layers, table, given, log_url, tvm_tracker or "", device_key or ""
    )
    with (
        api.listening(host, rpc.port),
        _lines(log_run) as info,
        api.start_master(plan, trace) as master,
    ):
        info(f"INFO Master: Loaded {len(layers)} workloads")
        if master.logs is not None:
            info(
                f"INFO Master: Tuning logs on {master.target.split()[0]} will be uploaded to"
                f" {master.logs.url}"
            )
        _say_of(master)
        info(f"INFO RPCServer: Launching RPC server at port {rpc.port}")
        info("INFO RPCServer: Server has been initialized")
        with Bar(master.target) as bar:
            master.run(bar.update)
        return _committed(master, output or Path(table), table, n_best)


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


def _say_of(master: api.Master) -> None:
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


def _committed(master: api.Master, folder: Path, table: str, n_best: int) -> int:
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


class Bar:
    """The seed's line of progress: in place on a terminal, else when it changes and now and
    then."""

    def __init__(self, target: str) -> None:
        self._target, self._console = target, Console(stderr=True)
        self._live: Live | None = None
        self._started_at = time.monotonic()
        self._shown: tuple[int, int] | None = None
        self._printed_at = 0.0
        self._at_start: int | None = None

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, counts: api.LayerCounts) -> None:
        """Show new counts."""
        now = time.monotonic()
        if self._at_start is None:
            self._at_start = counts.done
        line = bar_line(self._target, counts, now - self._started_at, counts.done - self._at_start)
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif (
            self._shown != (counts.done, counts.workers) or now - self._printed_at >= _LINE_EVERY_S
        ):
            self._shown, self._printed_at = (counts.done, counts.workers), now
            say(line, err=True)


def bar_line(target: str, counts: api.LayerCounts, seconds: float, done_here: int) -> str:
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
