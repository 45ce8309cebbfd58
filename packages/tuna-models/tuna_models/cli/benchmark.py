"""Commands that time whole models: `tuna benchmark-model`, `tuna model benchmarks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tuna.cli import options
from tuna.cli.console import print_json, print_table, say
from tuna.errors import BadInput
from tuna_models import api


@dataclass(frozen=True)
class _Timing:
    """A board or this machine, inputs, and limits."""

    tracker: str | None = options.option(
        "TVM RPC tracker of the board.", "--tvm-tracker", metavar="HOST:PORT"
    )
    device_key: str | None = options.option("Key with which the board registered.", metavar="KEY")
    local: bool = options.option("Run on this machine's measuring cores, in a box.")
    inputs: tuple[str, ...] = options.option(
        "An input: x=n,3:float32, p.0=2,3:float32 of a tuple, s=n,4:shape. Default: those of"
        " MODEL.so.json. FILE.npz: the values of all.",
        "--input",
        metavar="NAME=SHAPE:TYPE",
    )
    shapes: tuple[str, ...] = options.option(
        "Values of an open extent; may be repeated.", "--shape", metavar="n=1,4,8"
    )
    against: Path | None = options.option("Time this one in turn with it.", metavar="OTHER.so")
    function: str = options.option("Function of the models.", default="main")
    seed: int = options.option(
        "Of the inputs.", type=click.IntRange(min=0, max=2**31 - 1), default=0
    )
    wait_s: float = options.option(
        "Seconds.", "--wait", type=click.FloatRange(min=0.1), default=60.0
    )
    limit_s: float = options.option(
        "Seconds to compare and time them.",
        "--timeout",
        type=click.FloatRange(min=1, max=86_400),
        default=600.0,
    )
    memory_mib: int | None = options.option(
        "That the inputs may take on the board.", "--memory", type=options.COUNT, metavar="MIB"
    )


@click.command("benchmark-model")
@click.argument("library", metavar="MODEL.so", type=click.Path(path_type=Path))
@options.collected(_Timing)
@options.built_cores
@options.as_json
def benchmark_model(
    library: Path,
    as_json: bool,
    wanted: _Timing,
) -> int:
    """Time a built model on a board behind TVM RPC, or on this machine.

    With --against both are timed in turn in one session, on the same random inputs, and their
    outputs are compared as those of a built model are with its reference; the exit code is 1 if
    they differ by more.
    """
    if wanted.local == bool(wanted.tracker and wanted.device_key) or (
        wanted.local and (wanted.tracker or wanted.device_key)
    ):
        raise BadInput("Name a board with --tvm-tracker and --device-key, or use --local.")
    faults: list[str] = []
    times = api.benchmark_model(
        library,
        None
        if wanted.local
        else api.BenchmarkBoard(str(wanted.tracker), str(wanted.device_key), wanted.wait_s),
        against=wanted.against,
        options=api.BenchmarkOptions(
            *(wanted.inputs, wanted.shapes, wanted.function, wanted.seed),
            *(wanted.limit_s, wanted.memory_mib),
        ),
        on_point=lambda number, points: (
            say(f"{number + 1}/{points}", err=True) if points > 1 else None
        ),
        on_fault=faults.append,
    )
    if as_json:
        print_json(times)
    else:
        print_times(times)
    for fault in faults:
        say(fault, err=True)
    return 1 if faults else 0


@click.command()
@click.argument("name", required=False)
@options.as_json
def benchmarks(name: str | None, as_json: bool) -> None:
    """List times of whole models, or of NAME and what was timed in turn with it."""
    found = api.list_benchmarks(name)
    if as_json:
        print_json(found)
    else:
        print_times(found)


def print_times(rows: Sequence[api.ModelTime]) -> None:
    """A line for each model and set of open extents."""
    print_table(
        ("model", "device", "extents", "ms", "95 % interval", "of the first", "error", "measured"),
        [
            (
                row.name,
                row.where,
                " ".join(f"{name}={value}" for name, value in row.extents.items()),
                f"{row.time_ms:.4g}{' noisy' if row.noisy else ''}",
                f"{row.low_ms:.4g} to {row.high_ms:.4g}",
                f"{row.ratio:.3f}",
                "-" if row.error is None else f"{row.error:.1e}",
                f"{row.measured_at:%Y-%m-%d %H:%M}",
            )
            for row in rows
        ],
        right=(3, 4, 5, 6),
    )
