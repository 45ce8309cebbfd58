"""Commands that prepare a session: environment, layers, solvers, applicability, jobs."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json, print_table, say
from tuna.messages import counted

#: Layers of a captured program that are listed.
_MOST_LAYERS = 30


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
@click.option("-l", "--label", "reason", required=True, help="Why: a short text.")
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
@click.option("-t", "--tag", required=True, help="The set of layers.")
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
    "--options", "show_options", is_flag=True, help="List the options of its jobs instead."
)
@click.option(
    "--conditions",
    "show_conditions",
    is_flag=True,
    help="List what its sessions may choose instead.",
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


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-t", "--tag", required=True, help="Name for this set of layers.")
@click.option(
    "--model", help="The model that gets the numbers of calls as weights; default: the tag."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def capture(tag: str, model: str | None, command: tuple[str, ...]) -> int:
    """Run COMMAND, and import the layers that it asks MIOpen, hipBLASLt, oneDNN and PyTorch's
    TunableOp for.

    Put `--` before COMMAND. Its input and output are those of the terminal or the pipe that you
    started this in; only the lines of the logs are taken out. The exit code is that of COMMAND.
    What is printed here goes to stderr.
    """
    found = api.capture(command, tag, model=model, waiting=_say_waiting)
    if found.status < 0:
        name = (
            signal.Signals(-found.status).name
            if -found.status in set(signal.Signals)
            else f"signal {-found.status}"
        )
        say(f"The program was ended by {name}; what it had logged until then counts.", err=True)
    if found.stopped:
        say(f"Later lines were not read: {found.stopped}", err=True)
    show.rejections(found.parsed.rejections)
    show.left_out(found.parsed.left_out)
    if found.imported is None:
        _say_nothing(found)
    else:
        _show_layers(found, tag)
    return found.exit_code


def _show_layers(found: api.CapturedProgram, tag: str) -> None:
    assert found.imported is not None
    rows = [
        (config.label, count, f"{config.flops * count / 1e9:.3f}")
        for config, count in found.layers[:_MOST_LAYERS]
    ]
    print_table(("layer", "calls", "GFLOP in all"), rows, right=(1, 2), err=True)
    if len(found.layers) > _MOST_LAYERS:
        say(f"and {len(found.layers) - _MOST_LAYERS} more: `tuna configs -t {tag}`", err=True)
    counts = found.parsed.counts
    say(
        f"{counted(sum(count for _, count in found.layers), 'call')} of"
        f" {counted(len(found.layers), 'layer')} in"
        f" {counted(counts.total, 'logged line')} ({counts.unsupported} unsupported,"
        f" {counts.rejected} rejected): {counted(found.imported.added, 'layer')} added,"
        f" {found.imported.tagged} newly tagged {tag!r}",
        err=True,
    )


def _say_nothing(found: api.CapturedProgram) -> None:
    counts = found.parsed.counts
    if counts.total:
        say(
            f"Nothing was imported: none of {counts.total} logged lines names a layer that Tuna"
            " tunes.",
            err=True,
        )
        return
    say("Nothing was imported: the program's libraries logged nothing.", err=True)
    say(
        "  Does it use MIOpen, hipBLASLt or oneDNN, or PyTorch on a GPU? Products in fp32 on x86"
        " CPUs go to other libraries (MKL, OpenBLAS); a program that sets its own environment may"
        " switch the logging off.",
        err=True,
    )


def _say_waiting() -> None:
    say(
        "The program has ended; processes that it started still hold its output. Ctrl-C imports"
        " without waiting.",
        err=True,
    )
