"""`tuna quickstart`: every convolution of ResNet-50, tuned with TVM on this machine, end to end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import say
from tuna.cli.winners import print_winners
from tuna.cli.work import work_through
from tuna.errors import LibraryMissing
from tuna.messages import counted

TAG = "resnet50"
NETWORK = api.Network("ResNet-50", "1.5", "torchvision", "any")
REASON = "quickstart"
#: Per layer and solver.
CANDIDATES = 8
#: As the layers run inside a network: one kernel hands its blocks of channels to the next.
CONDITIONS = {"layouts": "native"}
#: Measured beside ours where it is installed.
VENDOR = "onednn"
FORMS = ("find", "perf", "kernel", "tvm")


@click.command()
@click.option("-o", "--output", type=options.OUTPUT_FOLDER, default=Path("quickstart-results"))
@click.option(
    "--candidates",
    type=options.COUNT,
    default=CANDIDATES,
    show_default=True,
    help="Per layer and solver.",
)
def quickstart(output: Path, candidates: int) -> int:
    """Tune the convolutions of ResNet-50 on this machine, and write databases and a report.

    Where oneDNN is installed (`pip install 'tuna-autotuner[onednn]'`) its times stand beside. A
    second start resumes; nothing is measured twice.
    """
    # an unwritable folder is reported before the tuning, not after it
    output.mkdir(parents=True, exist_ok=True)
    session_id = _prepared("tvm", {"candidates": candidates})
    errored = work_through([session_id], workers=True)
    vendor = _vendor()
    figures = api.report(session_id, vendor)
    print_winners(figures)
    say("\nDatabases:")
    show.exported(*(api.export(session_id, form, output) for form in FORMS), marks=False)
    say("\nReport:")
    say(str(api.write_report(figures, output / "report.html")))
    if errored:
        say(
            f"\n{counted(errored, 'job')} failed; see why: `tuna status --session-id {session_id}`",
            err=True,
        )
    say(
        f"\nTry the result with TVM alone: `{sys.executable} examples/use_exported_db.py"
        f" {output}/*.tvm`"
    )
    return 0 if figures.with_winner == len(figures.layers) else 1


def _prepared(library: str, options: Mapping[str, int], solvers: Sequence[str] = ()) -> int:
    """The session with its layers and jobs."""
    wanted = api.Tuning(library, REASON, options, CONDITIONS, solvers)
    with as_file(files("tuna.data") / "resnet50_b1.txt") as path:
        found = show.prepared(
            lambda: api.prepare_tuning(path, TAG, wanted, network=NETWORK),
            library,
            TAG,
        )
    return found.session.id


def _vendor() -> int | None:
    """The session with the vendor's times, measured now; None where its library is not
    installed."""
    try:
        names = [one.name for one in api.get_library(VENDOR).solvers()]
        # its slowest way: a layer as a product of matrices
        session_id = _prepared(VENDOR, {}, [name for name in names if "Gemm" not in name])
    except LibraryMissing as error:
        say(f"Without the vendor's times beside: {error} {error.hint}")
        return None
    work_through([session_id], workers=True)
    return session_id
