"""`export_db.py` and `update_golden.py`: databases."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import options, seeds, show
from tuna.cli.databases import FileWishes
from tuna.cli.golden import KINDS, Accepted, print_build
from tuna.errors import BadInput


@click.command(context_settings=seeds.CONTEXT)
@seeds.session_id
@click.option(
    "--golden_v", type=options.GOLDEN, help="Golden version, instead of a session; needs -a."
)
@click.option("-p", "--perf_db", "form", flag_value="perf", help="Export the performance db.")
@click.option("-f", "--find_db", "form", flag_value="find", help="Export the find db.")
@click.option("-k", "--kern_db", "form", flag_value="kernel", help="Export the kernel db.")
@click.option("--tvm_db", "form", flag_value="tvm", help="Export TVM's own JSON database.")
@seeds.arch
@seeds.num_cu
@options.collected(
    FileWishes,
    "_",
    opencl={"names": ["-c"]},
    top={"default": 4, "help": "Solvers kept for a layer."},
)
@seeds.debug
def export_db(
    session_id: int | None,
    golden_v: int | None,
    form: str | None,
    arch: str | None,
    num_cu: int | None,
    wanted: FileWishes,
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
        named = seeds.required(arch, "-a")
        show.exported(
            api.export_golden(golden_v or 0, form, Path(), arch=named, num_cu=num_cu, **wishes)
        )
    return 0


@click.command(context_settings=seeds.CONTEXT)
@seeds.session_id
@click.option(
    "--golden_v", "version", type=options.GOLDEN, required=True, help="Golden version to create."
)
@click.option(
    "--base_golden_v", "base_version", type=options.GOLDEN, help="Golden version to start from."
)
@options.collected(Accepted, "_")
@click.option(
    "-C",
    "--config_type",
    "kind",
    type=KINDS,
    help="Only the session's results for layers of this kind.",
)
@seeds.debug
@click.pass_context
def update_golden(ctx: click.Context, /, wanted: Accepted, **chosen: Any) -> int:
    """Build a golden version from a session, an earlier version, or both."""
    library = ctx.obj if isinstance(ctx.obj, str) else None
    print_build(api.golden.build(library=library, **chosen, **asdict(wanted)))
    return 0


export_db_main = seeds.program(export_db, "export_db.py")
update_golden_main = seeds.program(update_golden, "update_golden.py")
