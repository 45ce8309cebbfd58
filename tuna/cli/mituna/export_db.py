"""`export_db.py`: a session's or a golden version's results as the files that MIOpen loads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.mituna import common
from tuna.errors import BadInput


@dataclass(frozen=True)
class _Wishes:
    """Options of the file that is written."""

    opencl: bool = options.option(
        "-c", "--opencl", is_flag=True, help="Name the find db after OpenCL instead of HIP."
    )
    text: bool = options.option(
        "--text", is_flag=True, help="With -p: MIOpen's text form (.db.txt) instead of SQLite."
    )
    packed: bool = options.option("--bz2", is_flag=True, help="Pack the file with bzip2.")
    filename: str | None = options.option("--filename", help="Base name of the file.")
    config_tag: str | None = options.option("--config_tag", help="Only layers that carry this tag.")
    top: int = options.option(
        "--top", type=options.COUNT, default=4, show_default=True, help="Solvers kept for a layer."
    )


@click.command(context_settings=common.CONTEXT)
@common.session_id
@click.option(
    "--golden_v", type=options.GOLDEN, help="Golden version, instead of a session; needs -a."
)
@click.option("-p", "--perf_db", "form", flag_value="perf", help="Export the performance db.")
@click.option("-f", "--find_db", "form", flag_value="find", help="Export the find db.")
@click.option("-k", "--kern_db", "form", flag_value="kernel", help="Export the kernel db.")
@click.option("--tvm_db", "form", flag_value="tvm", help="Export TVM's own JSON database.")
@common.arch
@common.num_cu
@options.collected(_Wishes)
@common.debug
def export_db(
    session_id: int | None,
    golden_v: int | None,
    form: str | None,
    arch: str | None,
    num_cu: int | None,
    wanted: _Wishes,
) -> int:
    """Export results; the last line printed is the path."""
    if form is None:
        raise BadInput("Say which database: -p, -f, -k or --tvm_db.")
    if (session_id is None) == (golden_v is None):
        raise BadInput("Say whose results: either --session_id or --golden_v.")
    wishes = asdict(wanted)
    if session_id is not None:
        api.check_device(session_id, arch, num_cu)
        show.exported(api.export(session_id, form, Path(), **wishes))
    else:
        named = common.required(arch, "-a")
        show.exported(
            api.export_golden(golden_v or 0, form, Path(), arch=named, num_cu=num_cu, **wishes)
        )
    return 0


main = common.program(export_db, "export_db.py")
