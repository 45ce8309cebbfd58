"""`load_job.py`: jobs for a session."""

from __future__ import annotations

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


@click.command(context_settings=common.CONTEXT)
@common.session_id
@click.option("-t", "--tag", help="Config tag.")
@click.option("--all_configs", is_flag=True, help="Every layer of the session.")
@click.option("--fin_steps", help="Comma-separated steps; default: all of the library's.")
@click.option(
    "-o",
    "--only_applicable",
    is_flag=True,
    expose_value=False,
    help="As always: one job for each applicable solver.",
)
@click.option(
    "-A", "--algo", type=click.Choice(list(ALGORITHMS)), help="Only solvers of this algorithm."
)
@click.option("-s", "--solvers", help="Only these solvers, comma-separated names or ids.")
@click.option("-d", "--only_dynamic", is_flag=True, help="Only dynamic solvers.")
@click.option("--recurrent", is_flag=True, help="Only layers of import_configs --mark_recurrent.")
@click.option("--tunable", is_flag=True, help="Only tunable solvers.")
@click.option(
    "-c",
    "--cmd",
    type=click.Choice(["conv", "convfp16", "convbfp16"]),
    help="Only layers of this precision.",
)
@click.option("-l", "--label", help="Reference text.")
@click.option(
    "--candidates", type=options.COUNT, help="Candidates to try for each layer and solver."
)
@common.arch
@common.num_cu
@common.debug
def load_job(
    session_id: int | None,
    tag: str | None,
    all_configs: bool,
    fin_steps: str | None,
    algo: str | None,
    solvers: str | None,
    only_dynamic: bool,
    recurrent: bool,
    tunable: bool,
    cmd: str | None,
    label: str | None,
    candidates: int | None,
    arch: str | None,
    num_cu: int | None,
) -> int:
    """Add jobs to a session."""
    number, reason = common.required(session_id, "--session_id"), common.required(label, "-l")
    if algo and solvers:
        raise BadInput("Say -A or -s, not both.")
    facts: dict[str, object] = dict(options.job_options((), candidates=candidates))
    if api.session_library(number) == "example":
        # Its jobs need no imported layers: -a and -n are only recorded.
        show.loaded(
            api.load_example_job(number, reason, facts | common.given(arch=arch, num_cu=num_cu))
        )
        return 0
    if (tag is None) != all_configs:
        raise BadInput("Say which layers: either -t TAG or --all_configs.")
    api.check_device(number, arch, num_cu)
    show.loaded(
        api.load_jobs(
            number,
            tag=tag,
            steps=options.split(fin_steps),
            reason=reason,
            solvers=options.split(solvers),
            options=facts,
            algorithm=ALGORITHMS[algo] if algo else None,
            only_dynamic=only_dynamic,
            only_tunable=tunable,
            only_recurrent=recurrent,
            command=cmd,
        )
    )
    return 0


main = common.program(load_job, "load_job.py")
