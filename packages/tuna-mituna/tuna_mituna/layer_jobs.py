"""`load_job.py`, and `go_fish.py` with import_configs: layers, their networks and their jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from tuna import api
from tuna.cli import options, seeds, show
from tuna.cli.console import say
from tuna.errors import BadInput

#: Families of solvers by MIOpen's name of the algorithm
ALGORITHMS = {
    f"miopenConvolutionAlgo{name}": name
    for name in ("GEMM", "Direct", "FFT", "Winograd", "ImplicitGEMM")
}
#: Options that store a model or a framework: its name, and its version
_NETWORKS: Sequence[tuple[Literal["model", "framework"], str, str]] = (
    ("model", "add_model", "md_version"),
    ("framework", "add_framework", "fw_version"),
)


@dataclass(frozen=True)
class _Import:
    """Layers to import, and the network that has them."""

    file_name: Path | None = options.option("File of driver commands or find-db keys.", "-f")
    driver: str | None = options.option("One driver command, instead of a file.", "-d")
    tag: str | None = options.option("Name for these layers.", "-t")
    tag_only: bool = options.option("Tag layers that are there already; add none.", "-T")
    mark_recurrent: bool = options.option(
        "Mark the layers: load_job --recurrent, with each release."
    )
    batches: str | None = options.option(
        "Comma-separated batch sizes, each instead of a line's own.", "-b"
    )
    command: str | None = options.option(
        "Precision for all lines.", "-c", type=click.Choice(["conv", "convfp16", "convbfp16"])
    )
    model: str | None = options.option("Model that has these layers.", "-m")
    md_version: str | None = options.option("Version of the model.")
    framework: str | None = options.option("Framework of the model.", "-F")
    fw_version: str | None = options.option("Version of the framework.")
    gpu_count: int = options.option("GPUs of the run.", "-g", type=options.COUNT, default=1)
    add_model: str | None = options.option("Store a model; needs --md_version.", metavar="NAME")
    add_framework: str | None = options.option(
        "Store a framework; needs --fw_version.", metavar="NAME"
    )
    print_models: bool = options.option("List models and frameworks.")
    strict: bool = options.option("Import nothing if any line is rejected.")


@click.command(context_settings=seeds.CONTEXT)
@options.collected(_Import, "_")
@seeds.debug
def import_configs(
    wanted: _Import,
) -> int:
    """Import layers; or add a model or a framework."""
    if wanted.add_model or wanted.add_framework or wanted.print_models:
        add_networks(vars(wanted))
        return 0
    if (wanted.file_name is None) == (wanted.driver is None):
        raise BadInput("Say which layers: either -f FILE or -d 'MIOpenDriver ...'.")
    network = None
    if any((wanted.model, wanted.md_version, wanted.framework, wanted.fw_version)):
        network = api.Network(
            seeds.required(wanted.model, "--model"),
            seeds.required(wanted.md_version, "--md_version"),
            seeds.required(wanted.framework, "--framework"),
            seeds.required(wanted.fw_version, "--fw_version"),
            wanted.gpu_count,
        )
    tag = "no_tag" if wanted.tag is None and wanted.mark_recurrent else wanted.tag
    tag = seeds.required(tag, "-t")
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


def add_networks(given: Mapping[str, Any]) -> None:
    """Store a model or a framework, or list them, as the options say that both programs have."""
    for what, option, version in _NETWORKS:
        if name := given[option]:
            number = seeds.required(given[version], f"--{version}")
            new = api.add_network(what, name, number)
            say(f"{what} {name} {number}: {'added' if new else 'already there'}")
    if given.get("print_models"):
        show.networks(api.list_networks())


def _numbers(text: str | None) -> tuple[int, ...]:
    words = options.split(text)
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise BadInput(f"{word!r} is not a batch size.")
    return tuple(map(int, words))


@dataclass(frozen=True)
class _Selection:
    """The layers and solvers that get jobs."""

    tag: str | None = options.option("Config tag.", "-t")
    all_configs: bool = options.option("Every layer of the session.")
    fin_steps: str | None = options.option("Comma-separated steps; default: all of the library's.")
    algo: str | None = options.option(
        f"Only solvers of this algorithm: {', '.join(ALGORITHMS)}.",
        "-A",
        type=click.Choice(list(ALGORITHMS)),
        metavar="ALGORITHM",
    )
    solvers: str | None = options.option("Only these solvers, comma-separated names or ids.", "-s")
    only_dynamic: bool = options.option("Only dynamic solvers.", "-d")
    recurrent: bool = options.option("Only layers of import_configs --mark_recurrent.")
    tunable: bool = options.option("Only tunable solvers.")
    cmd: str | None = options.option(
        "Only layers of this precision.", "-c", type=click.Choice(["conv", "convfp16", "convbfp16"])
    )
    label: str | None = options.option("Reference text.", "-l")
    candidates: int | None = options.option(
        "Candidates to try for each layer and solver.", type=options.COUNT
    )


@click.command(context_settings=seeds.CONTEXT)
@seeds.session_id
@options.collected(_Selection, "_")
@click.option(
    "-o",
    "--only_applicable",
    is_flag=True,
    expose_value=False,
    help="As always: one job for each applicable solver.",
)
@seeds.arch
@seeds.num_cu
@seeds.debug
def load_job(
    session_id: int | None,
    arch: str | None,
    num_cu: int | None,
    wanted: _Selection,
) -> int:
    """Add jobs to a session."""
    number, reason = (
        seeds.required(session_id, "--session_id"),
        seeds.required(wanted.label, "-l"),
    )
    if wanted.algo and wanted.solvers:
        raise BadInput("Say -A or -s, not both.")
    facts: dict[str, object] = dict(options.job_options((), candidates=wanted.candidates))
    if api.session_library(number) == "example":
        # Its jobs need no imported layers: -a and -n are only recorded.
        show.loaded(
            api.load_example_job(
                number, reason, facts | options.given({"arch": arch, "num_cu": num_cu})
            )
        )
        return 0
    if (wanted.tag is None) != wanted.all_configs:
        raise BadInput("Say which layers: either -t TAG or --all_configs.")
    api.check_device(number, arch, num_cu)
    show.loaded(
        api.load_jobs(
            number,
            tag=wanted.tag,
            steps=options.split(wanted.fin_steps),
            reason=reason,
            solvers=options.split(wanted.solvers),
            options=facts,
            only=api.Only(
                algorithm=ALGORITHMS[wanted.algo] if wanted.algo else None,
                dynamic=wanted.only_dynamic,
                tunable=wanted.tunable,
                recurrent=wanted.recurrent,
                command=wanted.cmd,
            ),
        )
    )
    return 0


load_job_main = seeds.program(load_job, "load_job.py")
