"""`import_db` and `merge_db`: databases that are there already."""

from __future__ import annotations

from pathlib import Path

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.mituna import common

_PATH = click.Path(path_type=Path)


@click.command(context_settings=common.CONTEXT)
@click.option(
    "-t",
    "--target_file",
    type=_PATH,
    required=True,
    help="Find db or perf db, packed with bzip2 or not.",
)
@click.option("--rocm_v", help="ROCm version that it was made with.")
@click.option("--miopen_v", help="MIOpen version that it was made with.")
@common.session_id
@common.arch
@common.num_cu
@click.option(
    "-l", "--label", default="imported", show_default=True, help="Reference text of a new session."
)
@common.debug
def import_db(
    target_file: Path,
    rocm_v: str | None,
    miopen_v: str | None,
    session_id: int | None,
    arch: str | None,
    num_cu: int | None,
    label: str,
) -> int:
    """Import a database of MIOpen's into a session; without --session_id into a new one."""
    facts = common.given(arch=arch, num_cu=num_cu, rocm_v=rocm_v, miopen_v=miopen_v)
    show.imported_database(api.import_database(target_file, session_id, label, facts))
    return 0


@click.command(context_settings=common.CONTEXT)
@click.option(
    "-m",
    "--master_file",
    type=_PATH,
    required=True,
    help="The database that is added to, or a folder of them.",
)
@click.option(
    "-t", "--target_file", type=_PATH, required=True, help="The database whose entries win."
)
@click.option(
    "-p",
    "--perf_db",
    is_flag=True,
    expose_value=False,
    help="Ignored: the kind is detected from the files.",
)
@click.option("-f", "--find_db", is_flag=True, expose_value=False, help="Ignored, likewise.")
@click.option("-b", "--bin_cache", is_flag=True, expose_value=False, help="Ignored, likewise.")
@click.option(
    "-k",
    "--keep_keys",
    is_flag=True,
    help="Where both have a key, keep the master's other entries.",
)
@click.option(
    "-o",
    "--output",
    type=options.OUTPUT_FOLDER,
    default=Path(),
    help="Folder for the result; default: here.",
)
@common.debug
def merge_db(master_file: Path, target_file: Path, keep_keys: bool, output: Path) -> int:
    """Merge two find dbs, perf dbs or kernel dbs into a new file; neither of them is changed."""
    show.merged(api.merge_databases(master_file, target_file, output, keep_keys=keep_keys))
    return 0
