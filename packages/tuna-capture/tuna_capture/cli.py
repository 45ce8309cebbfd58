"""`tuna capture`: the layers of a program that runs."""

from __future__ import annotations

import signal

import click

from tuna.cli import show
from tuna.cli.console import print_table, say
from tuna.common.messages import counted
from tuna_capture.api import CapturedProgram
from tuna_capture.api import capture as run_and_import

#: Layers of a captured program that are listed.
_MAX_LAYERS = 30


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-t", "--tag", required=True, help="Name for this set of layers.")
@click.option(
    "--model", help="Model that stores the numbers of calls as weights; default: the tag."
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def capture(tag: str, model: str | None, command: tuple[str, ...]) -> int:
    """Run COMMAND, and import the layers that it asks MIOpen, hipBLASLt, oneDNN and PyTorch's
    TunableOp for.

    Put `--` before COMMAND. Its input and output are those of the terminal or the pipe that you
    started this in; only the lines of the logs are taken out. The exit code is that of COMMAND.
    What is printed here goes to stderr.
    """
    program = run_and_import(command, tag, model=model, waiting=_say_waiting)
    if program.status < 0:
        name = (
            signal.Signals(-program.status).name
            if -program.status in set(signal.Signals)
            else f"signal {-program.status}"
        )
        say(f"The program was ended by {name}; what it had logged until then counts.", err=True)
    if program.stopped:
        say(f"Later lines were not read: {program.stopped}", err=True)
    show.rejections(program.parsed.rejections)
    show.left_out(program.parsed.left_out)
    if program.imported is None:
        _say_nothing(program)
    else:
        _show_layers(program, tag)
    return program.exit_code


def _show_layers(program: CapturedProgram, tag: str) -> None:
    assert program.imported is not None
    rows = [
        (config.label, count, f"{config.flops * count / 1e9:.3f}")
        for config, count in program.layers[:_MAX_LAYERS]
    ]
    print_table(("layer", "calls", "GFLOP in all"), rows, right=(1, 2), err=True)
    if len(program.layers) > _MAX_LAYERS:
        say(f"and {len(program.layers) - _MAX_LAYERS} more: `tuna configs -t {tag}`", err=True)
    counts = program.parsed.counts
    say(
        f"{counted(sum(count for _, count in program.layers), 'call')} of"
        f" {counted(len(program.layers), 'layer')} in"
        f" {counted(counts.total, 'logged line')} ({counts.unsupported} unsupported,"
        f" {counts.rejected} rejected): {counted(program.imported.added, 'layer')} added,"
        f" {program.imported.tagged} newly tagged {tag!r}",
        err=True,
    )


def _say_nothing(program: CapturedProgram) -> None:
    counts = program.parsed.counts
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
