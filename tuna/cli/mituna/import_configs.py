"""`go_fish.py LIBRARY import_configs`: layers, and the networks that have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import say
from tuna.cli.mituna import common
from tuna.errors import BadInput


@dataclass(frozen=True)
class _Import:
    """Layers to import, and the network that has them."""

    file_name: Path | None = options.option(
        "-f",
        "--file_name",
        type=click.Path(path_type=Path),
        help="File of driver commands or find-db keys.",
    )
    driver: str | None = options.option(
        "-d", "--driver", help="One driver command, instead of a file."
    )
    tag: str | None = options.option("-t", "--tag", help="Name for these layers.")
    tag_only: bool = options.option(
        "-T", "--tag_only", is_flag=True, help="Tag layers that are there already; add none."
    )
    mark_recurrent: bool = options.option(
        "--mark_recurrent",
        is_flag=True,
        help="Mark the layers: load_job --recurrent, with each release.",
    )
    batches: str | None = options.option(
        "-b", "--batches", help="Comma-separated batch sizes, each instead of a line's own."
    )
    command: str | None = options.option(
        "-c",
        "--command",
        type=click.Choice(["conv", "convfp16", "convbfp16"]),
        help="Precision for all lines.",
    )
    model: str | None = options.option("-m", "--model", help="Model that has these layers.")
    md_version: str | None = options.option("--md_version", help="Version of the model.")
    framework: str | None = options.option("-F", "--framework", help="Framework of the model.")
    fw_version: str | None = options.option("--fw_version", help="Version of the framework.")
    gpu_count: int = options.option(
        "-g",
        "--gpu_count",
        type=options.COUNT,
        default=1,
        show_default=True,
        help="GPUs of the run.",
    )
    add_model: str | None = options.option(
        "--add_model", metavar="NAME", help="Store a model; needs --md_version."
    )
    add_framework: str | None = options.option(
        "--add_framework", metavar="NAME", help="Store a framework; needs --fw_version."
    )
    print_models: bool = options.option(
        "--print_models", is_flag=True, help="List models and frameworks."
    )
    strict: bool = options.option(
        "--strict", is_flag=True, help="Import nothing if any line is rejected."
    )


@click.command(context_settings=common.CONTEXT)
@options.collected(_Import)
@common.debug
def import_configs(
    wanted: _Import,
) -> int:
    """Import layers; or add a model or a framework."""
    if wanted.add_model or wanted.add_framework or wanted.print_models:
        add_networks(
            wanted.add_model,
            wanted.md_version,
            wanted.add_framework,
            wanted.fw_version,
            print_models=wanted.print_models,
        )
        return 0
    if (wanted.file_name is None) == (wanted.driver is None):
        raise BadInput("Say which layers: either -f FILE or -d 'MIOpenDriver ...'.")
    network = None
    if any((wanted.model, wanted.md_version, wanted.framework, wanted.fw_version)):
        network = api.Network(
            common.required(wanted.model, "--model"),
            common.required(wanted.md_version, "--md_version"),
            common.required(wanted.framework, "--framework"),
            common.required(wanted.fw_version, "--fw_version"),
            wanted.gpu_count,
        )
    tag = "no_tag" if wanted.tag is None and wanted.mark_recurrent else wanted.tag
    tag = common.required(tag, "-t")
    show.imported(
        lambda: api.import_configs(
            wanted.file_name,
            tag,
            driver=wanted.driver,
            strict=wanted.strict,
            batches=_numbers(wanted.batches),
            command=wanted.command,
            storing=api.Storing(wanted.mark_recurrent, wanted.tag_only, network),
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
