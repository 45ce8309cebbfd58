"""`tuna tune`: a list of layers, or a model, tuned with one command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import model, options, show
from tuna.cli.console import say
from tuna.cli.winners import print_winners
from tuna.cli.work import work_through
from tuna.messages import counted


@dataclass(frozen=True)
class _Layers:
    """Options for a list of layers."""

    tag: str = options.option("-t", "--tag", required=True, help="Name for this set of layers.")
    library: str = options.option(
        "--library", default="tvm", show_default=True, help="What is tuned."
    )
    output: Path | None = options.option(
        "-o",
        "--output",
        type=options.OUTPUT_FOLDER,
        help="The folder to write databases and a report into.",
    )
    reason: str = options.option(
        "-l", "--label", default="", help="Why: a short text; default: tune TAG."
    )
    strict: bool = options.option(
        "--strict", is_flag=True, help="Do nothing if any line of FILE is rejected."
    )


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@options.collected(_Layers)
@options.job_choices
@options.conditions
@options.cores
def layers(
    file: Path,
    asked: Mapping[str, int | float | str],
    conditions: Mapping[str, str],
    wanted: _Layers,
) -> int:
    """Tune the layers of a file."""
    prepared = show.prepared(
        lambda: api.prepare_tuning(
            file,
            wanted.tag,
            api.Tuning(wanted.library, wanted.reason, asked, conditions),
            strict=wanted.strict,
        ),
        wanted.library,
        wanted.tag,
    )
    number = prepared.session.id
    if where := _cores_of(wanted.library):
        say(f"kernels for {where} (--cores)")
    errored = work_through([number], workers=True)
    figures = api.report(number)
    print_winners(figures)
    if wanted.output is not None and figures.with_winner:
        show.exported(
            *(api.export(number, form, wanted.output) for form in api.forms_of(wanted.library)),
            marks=False,
        )
        say(str(api.write_report(figures, wanted.output / "report.html")))
    if errored:
        say(
            f"{counted(errored, 'job')} failed; see why: `tuna status --session-id {number}`",
            err=True,
        )
    say(f"all results: `tuna results --session-id {number}`", err=True)
    done = figures.with_winner + len(prepared.loaded.met)
    return 0 if done and done >= len(figures.layers) else 1


def _cores_of(library: str) -> str:
    """On how many cores a library measures; empty where its device is another."""
    return api.of_all() if api.get_library(library).device_kind is api.DeviceKind.CPU else ""


class _ByFile(click.Command):
    """Runs one of two commands, by what the file is; has the options of both."""

    def __init__(self, name: str, help_text: str) -> None:
        both = {str(one.name): one for command in (model.tune, layers) for one in command.params}
        params = [_for_either(one, _help_of(name)) for name, one in both.items()]
        params.sort(key=lambda one: isinstance(one, click.Option))
        super().__init__(name, params=params, help=help_text)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        rest = super().parse_args(ctx, args)
        ctx.obj = words
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        of_model = ctx.params["file"].suffix in api.MODEL_ENDINGS
        chosen, other = (model.tune, layers) if of_model else (layers, model.tune)
        known = {option for one in chosen.params for option in one.opts}
        for one in other.params:
            typed = (
                ctx.get_parameter_source(str(one.name)) is click.core.ParameterSource.COMMANDLINE
            )
            if typed and not known & set(one.opts):
                mine, others = ("model", "layers") if of_model else ("list of layers", "models")
                raise click.UsageError(
                    f"{max(one.opts, key=len)} is for {others}, and FILE is a {mine}.", ctx
                )
        with chosen.make_context(ctx.info_name, ctx.obj, parent=ctx.parent) as own:
            return chosen.invoke(own)


def _help_of(name: str) -> str:
    """The help of an option: what it means for layers and for models, where that is not the
    same."""
    of = {"Layers": layers, "Models": model.tune}
    texts = {
        sort: f"{one.help} (default: {one.default})" if one.show_default else one.help or ""
        for sort, command in of.items()
        for one in command.params
        if isinstance(one, click.Option) and one.name == name
    }
    distinct = set(texts.values())
    if len(texts) == len(of) and len(distinct) == 1:
        return distinct.pop()
    return " ".join(f"{sort}: {text[:1].lower()}{text[1:]}" for sort, text in texts.items())


def _for_either(parameter: click.Parameter, help_text: str) -> click.Parameter:
    """The parameter as one of both commands: what one of them requires may be missing."""
    if isinstance(parameter, click.Argument):
        return parameter
    assert isinstance(parameter, click.Option)
    kind = options.OUTPUT if parameter.name == "output" else parameter.type
    flags = {"is_flag": True} if parameter.is_flag and not parameter.secondary_opts else {}
    names = [
        "/".join((parameter.opts[-1], *parameter.secondary_opts)),
        *parameter.opts[:-1],
        str(parameter.name),
    ]
    return click.Option(
        names,
        type=None if parameter.is_flag else kind,
        multiple=parameter.multiple,
        metavar=parameter.metavar,
        help=help_text,
        default=parameter.default if parameter.secondary_opts else None,
        **flags,
    )


tune = _ByFile(
    "tune",
    """Tune what FILE holds on this machine: layers (one a line, as `tuna import` reads them), or a
    model.

    Layers need a tag: session, import, jobs, run and report in one. The tasks of a model (*.onnx,
    *.pt2) are tuned and, with -o, built into a shared library. Interrupted, the same command goes
    on from there.
    """,
)
