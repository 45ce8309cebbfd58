"""`go_fish.py LIBRARY import_configs`: layers, and the networks that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import say
from tuna.cli.mituna import common
from tuna.errors import BadInput


@click.command(context_settings=common.CONTEXT)
@click.option(
    "-f",
    "--file_name",
    type=click.Path(path_type=Path),
    help="File of driver commands or find-db keys.",
)
@click.option("-d", "--driver", help="One driver command, instead of a file.")
@click.option("-t", "--tag", help="Name for these layers.")
@click.option("-T", "--tag_only", is_flag=True, help="Tag layers that are there already; add none.")
@click.option(
    "--mark_recurrent",
    is_flag=True,
    help="Mark the layers: load_job --recurrent, with each release.",
)
@click.option("-b", "--batches", help="Comma-separated batch sizes, each instead of a line's own.")
@click.option(
    "-c",
    "--command",
    type=click.Choice(["conv", "convfp16", "convbfp16"]),
    help="Precision for all lines.",
)
@click.option("-m", "--model", help="Model that has these layers.")
@click.option("--md_version", help="Version of the model.")
@click.option("-F", "--framework", help="Framework of the model.")
@click.option("--fw_version", help="Version of the framework.")
@click.option(
    "-g", "--gpu_count", type=options.COUNT, default=1, show_default=True, help="GPUs of the run."
)
@click.option("--add_model", metavar="NAME", help="Store a model; needs --md_version.")
@click.option("--add_framework", metavar="NAME", help="Store a framework; needs --fw_version.")
@click.option("--print_models", is_flag=True, help="List models and frameworks.")
@click.option("--strict", is_flag=True, help="Import nothing if any line is rejected.")
@common.debug
def import_configs(
    file_name: Path | None,
    driver: str | None,
    tag: str | None,
    tag_only: bool,
    mark_recurrent: bool,
    batches: str | None,
    command: str | None,
    model: str | None,
    md_version: str | None,
    framework: str | None,
    fw_version: str | None,
    gpu_count: int,
    add_model: str | None,
    add_framework: str | None,
    print_models: bool,
    strict: bool,
) -> int:
    """Import layers; or add a model or a framework."""
    if add_model or add_framework or print_models:
        add_networks(add_model, md_version, add_framework, fw_version, print_models=print_models)
        return 0
    if (file_name is None) == (driver is None):
        raise BadInput("Say which layers: either -f FILE or -d 'MIOpenDriver ...'.")
    network = None
    if any((model, md_version, framework, fw_version)):
        network = api.Network(
            common.required(model, "--model"),
            common.required(md_version, "--md_version"),
            common.required(framework, "--framework"),
            common.required(fw_version, "--fw_version"),
            gpu_count,
        )
    if tag is None and mark_recurrent:
        tag = "no_tag"
    tag = common.required(tag, "-t")
    show.imported(
        lambda: api.import_configs(
            file_name,
            tag,
            driver=driver,
            strict=strict,
            batches=_numbers(batches),
            command=command,
            recurrent=mark_recurrent,
            tag_only=tag_only,
            network=network,
        ),
        tag,
    )
    return 0


def add_networks(
    model: str | None,
    md_version: str | None,
    framework: str | None,
    fw_version: str | None,
    *,
    print_models: bool = False,
) -> None:
    """Store a model or a framework, or list them."""
    if model:
        _add_network("model", model, common.required(md_version, "--md_version"))
    if framework:
        _add_network("framework", framework, common.required(fw_version, "--fw_version"))
    if print_models:
        show.networks(api.list_networks())


def _add_network(what: Literal["model", "framework"], name: str, version: str) -> None:
    new = api.add_network(what, name, version)
    say(f"{what} {name} {version}: {'added' if new else 'already there'}")


def _numbers(text: str | None) -> tuple[int, ...]:
    words = options.split(text)
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise BadInput(f"{word!r} is no batch size.")
    return tuple(map(int, words))
