"""`load_job.py`: jobs for a session."""

from __future__ import annotations

from dataclasses import dataclass

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.mituna import common
from tuna.errors import BadInput

#: MIOpen's names of the algorithms, and the families they name.
ALGORITHMS = {
    f"miopenConvolutionAlgo{name}": name
    for name in ("GEMM", "Direct", "FFT", "Winograd", "ImplicitGEMM")
}


@dataclass(frozen=True)
class _Selection:
    """The layers and solvers that get jobs."""

    tag: str | None = options.option("-t", "--tag", help="Config tag.")
    all_configs: bool = options.option(
        "--all_configs", is_flag=True, help="Every layer of the session."
    )
    fin_steps: str | None = options.option(
        "--fin_steps", help="Comma-separated steps; default: all of the library's."
    )
    algo: str | None = options.option(
        "-A", "--algo", type=click.Choice(list(ALGORITHMS)), help="Only solvers of this algorithm."
    )
    solvers: str | None = options.option(
        "-s", "--solvers", help="Only these solvers, comma-separated names or ids."
    )
    only_dynamic: bool = options.option(
        "-d", "--only_dynamic", is_flag=True, help="Only dynamic solvers."
    )
    recurrent: bool = options.option(
        "--recurrent", is_flag=True, help="Only layers of import_configs --mark_recurrent."
    )
    tunable: bool = options.option("--tunable", is_flag=True, help="Only tunable solvers.")
    cmd: str | None = options.option(
        "-c",
        "--cmd",
        type=click.Choice(["conv", "convfp16", "convbfp16"]),
        help="Only layers of this precision.",
    )
    label: str | None = options.option("-l", "--label", help="Reference text.")
    candidates: int | None = options.option(
        "--candidates", type=options.COUNT, help="Candidates to try for each layer and solver."
    )


@click.command(context_settings=common.CONTEXT)
@common.session_id
@options.collected(_Selection)
@click.option(
    "-o",
    "--only_applicable",
    is_flag=True,
    expose_value=False,
    help="As always: one job for each applicable solver.",
)
@common.arch
@common.num_cu
@common.debug
def load_job(
    session_id: int | None,
    arch: str | None,
    num_cu: int | None,
    wanted: _Selection,
) -> int:
    """Add jobs to a session."""
    number, reason = (
        common.required(session_id, "--session_id"),
        common.required(wanted.label, "-l"),
    )
    if wanted.algo and wanted.solvers:
        raise BadInput("Say -A or -s, not both.")
    facts: dict[str, object] = dict(options.job_options((), candidates=wanted.candidates))
    if api.session_library(number) == "example":
        # Its jobs need no imported layers: -a and -n are only recorded.
        show.loaded(
            api.load_example_job(number, reason, facts | common.given(arch=arch, num_cu=num_cu))
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


main = common.program(load_job, "load_job.py")
