"""Commands that prepare a session: environment, layers, solvers, applicability, jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json, print_table, say
from tuna.common.messages import counted


@dataclass(frozen=True)
class _Facts:
    """The environment of a session of another machine, or of a board."""

    arch: str | None = options.option(
        "Architecture, for a session of another machine (miopen, triton): gfx90a."
    )
    num_cu: int | None = options.option("Its compute units.", type=options.COUNT)
    device_name: str | None = options.option("Its device's name, as its driver states it (triton).")
    rocm_v: str | None = options.option(
        "Its ROCm, where that is not installed here.", "--rocm-version"
    )
    miopen_v: str | None = options.option("Its MIOpen, likewise.", "--miopen-version")
    target: str | None = options.option(
        "TVM's target, as text or JSON, for a session of boards (tvm); default: the board's own."
    )


@click.command()
@options.library_argument
@click.option("-l", "--label", "reason", required=True, help="Reason of the session, a short text.")
@options.conditions
@options.collected(_Facts)
@options.boards
@options.session_options
@options.cores
def init_session(
    library: str,
    reason: str,
    conditions: Mapping[str, str],
    wanted: _Facts,
    tvm_tracker: str | None,
    device_key: str | None,
    session_options: Mapping[str, str],
) -> None:
    """Start a tuning effort of LIBRARY in this machine's environment, or a board's; the same effort
    is found again.

    Conditions say how its results are measured; see `tuna solvers LIBRARY --conditions`.
    """
    named = asdict(wanted) | {"tvm_tracker": tvm_tracker, "device_key": device_key}
    facts = options.given(named)
    show.started(
        api.init_session(library, reason, facts, conditions=conditions, options=session_options)
    )


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-t", "--tag", required=True, help="Name for this set of layers.")
@click.option("--strict", is_flag=True, help="Import nothing if any line is rejected.")
@options.shapes
def import_(file: Path, tag: str, strict: bool, shapes_file: Path | None) -> None:
    """Import layers from FILE, one MIOpenDriver command, JSON object or find-db key a line.

    FILE may be - for standard input. It may also be a log: MIOpen's, oneDNN's (ONEDNN_VERBOSE=1),
    hipBLASLt's (HIPBLASLT_LOG_MASK=32) or a file of PyTorch's TunableOp. `tuna capture` makes and
    imports these by itself. Or FILE is a Triton kernel (*.py), and --shapes says for which shapes.
    """
    show.imported(lambda: api.import_configs(file, tag, strict=strict, shapes=shapes_file), tag)


@click.command()
@click.option("-t", "--tag", required=True, help="Name of the set of layers.")
@options.as_json
def configs(tag: str, as_json: bool) -> None:
    """List the layers that carry a tag; with --json one object a line, under MIOpen's field
    names."""
    found = api.list_configs(tag)
    if as_json:
        for config in found:
            say(json.dumps(config.to_json()))
        return
    print_table(
        ("layer", "GFLOP"),
        [(config.label, f"{config.flops / 1e9:.3f}") for config in found],
        right=(1,),
    )


@click.command()
@options.library_argument
def update_solvers(library: str) -> None:
    """Store the solvers that LIBRARY has now."""
    say(f"{library} has {counted(api.update_solvers(library), 'solver')}")


@click.command()
@options.library_argument
@click.option(
    "--options", "show_options", is_flag=True, help="List options of the library's jobs instead."
)
@click.option(
    "--conditions",
    "show_conditions",
    is_flag=True,
    help="List the conditions that its sessions may choose instead.",
)
@options.as_json
def solvers(library: str, show_options: bool, show_conditions: bool, as_json: bool) -> None:
    """List the stored solvers of LIBRARY, what `load-jobs --option` takes, or what `init-session
    --condition` takes."""
    if show_conditions:
        show.conditions(api.list_conditions(library), as_json)
        return
    if show_options:
        show.job_options(library, api.list_job_options(library), as_json)
        return
    found = api.list_solvers(library)
    if as_json:
        print_json(found)
    else:
        show.solvers(found)


@click.command()
@options.session_id
@click.option("-t", "--tag", help="Only layers that carry this tag.")
def applicability(session_id: int, tag: str | None) -> None:
    """Work out which solvers can run which layers in a session."""
    show.applicability(api.update_applicability(session_id, tag))


@dataclass(frozen=True)
class _Jobs:
    """The layers, solvers and steps of jobs, and why."""

    tag: str | None = options.option(
        "Only layers that carry this tag; default: all of the session.", "-t"
    )
    steps: str | None = options.option("Comma-separated steps; default: all of the library's.")
    solvers: str | None = options.option(
        "Comma-separated solvers; default: every applicable one.", "-s"
    )
    recurrent: bool = options.option(
        "Only layers that are marked to be tuned again with each release."
    )
    reason: str = options.option("Why: a short text.", "-l", "--label", default="tuning")


@click.command()
@options.session_id
@options.collected(_Jobs)
@options.job_choices
def load_jobs(session_id: int, wanted: _Jobs, asked: options.JobChoices) -> None:
    """Make the jobs of a session: one for each layer and applicable solver that has none yet."""
    show.loaded(
        api.load_jobs(
            session_id,
            tag=wanted.tag,
            steps=options.split(wanted.steps),
            reason=wanted.reason,
            solvers=options.split(wanted.solvers),
            only=api.Only(recurrent=wanted.recurrent),
            options=asked.given(),
        )
    )
