"""`tuna tune`: layers, a kernel or a model, tuned with one command; `tuna quickstart`: the layers
of ResNet-50."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import say
from tuna.cli.report import print_winners
from tuna.cli.tuned import tuned
from tuna.cli.work import work_through
from tuna.configs.sources import SOURCES, source_of
from tuna.errors import LibraryMissing, NotFound

#: Tag, databases, candidates per layer and solver, and library to compare with where it is
#: installed, of the quickstart
_TAG, _FORMS, _CANDIDATES, _VENDOR = "resnet50", ("find", "perf", "kernel", "tvm"), 8, "onednn"
#: Conditions of its layers inside a network: one kernel hands its blocks of channels to the next
_CONDITIONS = {"layouts": "native"}


@dataclass(frozen=True)
class _Layers:
    """Options for a list of layers."""

    tag: str = options.option("Name for this set of layers.", "-t", required=True)
    library: str = options.option("What is tuned.", default="tvm")
    output: Path | None = options.option(
        "The folder to write databases and a report into.", "-o", type=options.OUTPUT_FOLDER
    )
    reason: str = options.option(
        "Why: a short text; default: tune TAG.", "-l", "--label", default="", show_default=False
    )
    strict: bool = options.option("Do nothing if any line of FILE is rejected.")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@options.collected(_Layers)
@options.job_choices
@options.conditions
@options.log_to
@options.cores
def layers(
    file: Path,
    asked: options.JobChoices,
    conditions: Mapping[str, str],
    wanted: _Layers,
    stored: options.OnStored,
) -> int:
    """Tune the layers of a file."""
    prepared = show.prepared(
        lambda: api.prepare_tuning(
            file,
            wanted.tag,
            api.Tuning(wanted.library, wanted.reason, asked.given(), conditions),
            strict=wanted.strict,
        ),
        wanted.library,
    )
    if where := _cores_of(wanted.library):
        say(f"kernels for {where} (--cores)")
    return tuned(prepared, api.forms_of(wanted.library), wanted.output, stored)


def _cores_of(library: str) -> str:
    """On how many cores a library measures; empty where its device is another."""
    return api.of_all() if api.get_library(library).device.kind == api.CPU else ""


class _Sort(NamedTuple):
    """One of the commands behind `tuna tune`, and the noun for its files."""

    command: click.Command
    noun: str


@functools.cache
def _sorts() -> dict[str, _Sort]:
    """Return the sorts of files by their plural: lists of layers, and the sources installed."""
    found = {"layers": _Sort(layers, "list of layers")}
    for source in SOURCES.all().values():
        module, _, name = source.tune.partition(":")
        command = getattr(importlib.import_module(module), name)
        found[source.plural] = _Sort(command, source.noun)
    return found


class _ByFile(click.Command):
    """Runs one of several commands, by what the file is; has the options of all."""

    def __init__(self, name: str, help_text: str) -> None:
        each = {str(one.name): one for sort in _sorts().values() for one in sort.command.params}
        params = sorted(map(_for_any, each.values()), key=lambda one: isinstance(one, click.Option))
        super().__init__(name, params=params, help=help_text)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        ctx.obj = words
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        source = source_of(ctx.params["file"])
        chosen, noun = _sorts()[source.plural if source else "layers"]
        known = {option for one in chosen.params for option in one.opts}
        for one in self.params:
            typed = (
                ctx.get_parameter_source(str(one.name)) is click.core.ParameterSource.COMMANDLINE
            )
            if typed and not known & set(one.opts):
                others = " and ".join(
                    name for name, sort in _sorts().items() if _option(sort.command, str(one.name))
                )
                raise click.UsageError(
                    f"{max(one.opts, key=len)} is for {others}, and FILE is a {noun}.", ctx
                )
        with chosen.make_context(ctx.info_name, ctx.obj, parent=ctx.parent) as own:
            return chosen.invoke(own)


def _option(command: click.Command, name: str) -> click.Option | None:
    found = (one for one in command.params if isinstance(one, click.Option) and one.name == name)
    return next(found, None)


def _help_of(name: str) -> str:
    """The help of an option: what it means for each sort of file that has it, where that is not the
    same."""
    texts: dict[str, list[str]] = {}
    for sort, (command, _) in _sorts().items():
        if one := _option(command, name):
            text = f"{one.help} (default: {one.default})" if one.show_default else one.help or ""
            texts.setdefault(text, []).append(sort)
    if len(texts) == 1 and len(*texts.values()) > 1:
        return next(iter(texts))
    return " ".join(
        f"{' and '.join(sorts).capitalize()}: {text[:1].lower()}{text[1:]}"
        for text, sorts in texts.items()
    )


def _for_any(parameter: click.Parameter) -> click.Parameter:
    """The parameter as one of all commands, without what one of them requires or does with it."""
    either = copy.copy(parameter)
    if isinstance(either, click.Option):
        either.help, either.show_default = _help_of(str(either.name)), False
        either.required, either.expose_value, either.callback = False, True, None
        if either.name == "output":
            either.type = options.OUTPUT
        if not either.secondary_opts:
            either.default = None
    return either


def _help() -> str:
    sources = [*SOURCES.all().values()]
    held = ["layers (one a line, as `tuna import` reads them)", *(one.holds for one in sources)]
    held[-1] = f"or {held[-1]}" if sources else held[-1]
    tuned_so = " ".join(one.help for one in sources)
    return f"""Tune what FILE holds on this machine: {", ".join(held)}.

    Layers need a tag: session, import, jobs, run and report in one. {tuned_so}
    Interrupted, the same command goes on from there.
    """


tune = _ByFile("tune", _help())


@click.command()
@click.option("-o", "--output", type=options.OUTPUT_FOLDER, default=Path("quickstart-results"))
@click.option(
    "--candidates",
    type=options.COUNT,
    default=_CANDIDATES,
    show_default=True,
    help="Candidates per layer and solver.",
)
def quickstart(output: Path, candidates: int) -> int:
    """Tune the convolutions of ResNet-50 on this machine, and write databases and a report.

    Where oneDNN is installed (`pip install tuna-onednn`) its times stand beside. A
    second start resumes; nothing is measured twice.
    """
    # an unwritable folder is reported before the tuning, not after it
    output.mkdir(parents=True, exist_ok=True)
    session_id = _prepared("tvm", {"candidates": candidates})
    work_through([session_id], workers=True)
    vendor = _vendor()
    figures = api.report(session_id, vendor)
    print_winners(figures)
    say("\nDatabases:")
    show.exported(*(api.export(session_id, form, output) for form in _FORMS), marks=False)
    say("\nReport:")
    say(str(api.write_report(figures, output / "report.html")))
    say(
        f"\nTry the result with TVM alone: `{sys.executable} examples/use_exported_db.py"
        f" {output}/*.tvm`"
    )
    return 0 if figures.with_winner == len(figures.layers) else 1


def _prepared(library: str, given: Mapping[str, int], solvers: Sequence[str] = ()) -> int:
    """The session with its layers and jobs."""
    wanted = api.Tuning(library, "quickstart", given, _CONDITIONS, solvers)
    network = api.Network("ResNet-50", "1.5", "torchvision", "any")
    with as_file(files("tuna.example") / "resnet50_b1.txt") as path:
        found = show.prepared(
            lambda: api.prepare_tuning(path, _TAG, wanted, network=network), library
        )
    return found.session.id


def _vendor() -> int | None:
    """The session with the vendor's times, measured now; None where its library is not
    installed."""
    try:
        names = [one.name for one in api.get_library(_VENDOR).solvers()]
        # its slowest way: a layer as a product of matrices
        session_id = _prepared(_VENDOR, {}, [name for name in names if "Gemm" not in name])
    except NotFound:
        say(f"The vendor's times are not shown beside: `pip install tuna-{_VENDOR}` adds them.")
        return None
    except LibraryMissing as error:
        say(f"The vendor's times are not shown beside: {error}")
        say(f"  {error.hint}", wrap=False)
        return None
    work_through([session_id], workers=True)
    return session_id
