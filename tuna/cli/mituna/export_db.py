"""`export_db.py`: a session's or a golden version's results as the files that MIOpen loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.mituna import common
from tuna.errors import BadInput


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
@click.option("-c", "--opencl", is_flag=True, help="Name the find db after OpenCL instead of HIP.")
@click.option(
    "--text", is_flag=True, help="With -p: MIOpen's text form (.db.txt) instead of SQLite."
)
@click.option("--bz2", "packed", is_flag=True, help="Pack the file with bzip2.")
@click.option("--filename", help="Base name of the file.")
@click.option("--config_tag", help="Only layers that carry this tag.")
@click.option(
    "--top", type=options.COUNT, default=4, show_default=True, help="Solvers kept for a layer."
)
@common.debug
def export_db(
    session_id: int | None,
    golden_v: int | None,
    form: str | None,
    arch: str | None,
    num_cu: int | None,
    opencl: bool,
    text: bool,
    packed: bool,
    filename: str | None,
    config_tag: str | None,
    top: int,
) -> int:
    """Export results; the last line printed is the path."""
    if form is None:
        raise BadInput("Say which database: -p, -f, -k or --tvm_db.")
    if (session_id is None) == (golden_v is None):
        raise BadInput("Say whose results: either --session_id or --golden_v.")
    wishes: dict[str, Any] = {"filename": filename, "config_tag": config_tag, "top": top}
    wishes |= {"opencl": opencl, "text": text, "packed": packed}
    if session_id is not None:
        api.check_device(session_id, arch, num_cu)
        show.exported(api.export(session_id, form, Path(), **wishes))
    else:
        wanted = common.required(arch, "-a")
        show.exported(
            api.export_golden(golden_v or 0, form, Path(), arch=wanted, num_cu=num_cu, **wishes)
        )
    return 0


main = common.program(export_db, "export_db.py")
