"""Commands about database files: export, import-db, merge, db-diff, check-db."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import options, show
from tuna.cli.console import print_json, print_table, say
from tuna.common.messages import counted
from tuna.errors import BadInput

_PATH = click.Path(path_type=Path)
_DATABASE = click.Path(path_type=Path, exists=True)
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


class _Export(click.Command):
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The available forms; loaded lazily, because the libraries that bring them are slow to
        import."""
        with formatter.section("Forms, with their options"):
            formatter.write_dl(
                [
                    (one.form, f"{one.title}: {', '.join(one.options.model_fields)}")
                    for one in api.exporters()
                ]
            )


@dataclass(frozen=True)
class _Source:
    """The session or the golden version that is exported."""

    session_id: int | None = options.option("Whose results.", type=options.ID)
    golden: int | None = options.option(
        "Golden version, instead of a session; needs --arch.", type=options.GOLDEN
    )
    arch: str | None = options.option("Without --session-id: architecture, such as gfx90a.")
    num_cu: int | None = options.option(
        "With --golden: compute units; default: all of them mixed.", type=options.COUNT
    )
    library: str = options.option("With --golden: whose version.", default="miopen")


@dataclass(frozen=True)
class FileWishes:
    """Options of the file that is written, of which each form has some."""

    filename: str | None = options.option(
        "Base name; default: from architecture and number of compute units."
    )
    config_tag: str | None = options.option("Only layers that carry this tag.")
    top: int | None = options.option(
        "Solvers kept for a layer; default: 4, json and csv: all.", type=options.COUNT
    )
    text: bool = options.option("Write a perf db in text form (.db.txt), not SQLite.")
    packed: bool = options.option("Pack the file with bzip2.", "--bz2")
    opencl: bool = options.option("Name a find db after OpenCL instead of HIP.")


@click.command(cls=_Export)
@options.collected(_Source)
@click.option("--form", required=True, help="Form of the database; see below.")
@click.option(
    "-d", "--directory", type=options.OUTPUT_FOLDER, default=Path(), help="Output folder."
)
@options.collected(FileWishes, into="wishes")
@click.option(
    "--option", "pairs", multiple=True, metavar="NAME=VALUE", help="An option of the form."
)
def export(
    form: str,
    directory: Path,
    pairs: tuple[str, ...],
    wanted: _Source,
    wishes: FileWishes,
) -> None:
    """Write results as a database: find, perf, kernel (MIOpen's), tvm, json, csv, all trials as t4
    or optuna, or a plug-in's own form."""
    asked = asdict(wishes) | options.job_options(pairs)
    if (wanted.session_id is None) == (wanted.golden is None):
        raise BadInput("Choose the results by either --session-id or --golden.")
    if wanted.session_id is not None:
        show.exported(api.export(wanted.session_id, form, directory, **asked))
    else:
        device: dict[str, Any] = {
            "arch": wanted.arch or "",
            "num_cu": wanted.num_cu,
            "library": wanted.library,
        }
        show.exported(api.export_golden(wanted.golden or 0, form, directory, **device, **asked))


@click.command()
@click.argument("file", type=_DATABASE)
@click.option("--session-id", type=options.ID, help="Session to import into; default: a new one.")
@click.option(
    "--target", default="", help="Target whose records a TVM folder gives; default: the session's."
)
@click.option("--arch", help="Architecture; default: from the file's name.")
@click.option("--num-cu", type=options.COUNT, help="Compute units; default: from the file's name.")
@click.option("--rocm-version", "rocm_v", help="ROCm version that the database was made with.")
@click.option("--miopen-version", "miopen_v", help="MIOpen version that made the database.")
@click.option(
    "-l", "--label", "reason", default="imported", show_default=True, help="Session's reason."
)
def import_db(file: Path, session_id: int | None, target: str, reason: str, **facts: Any) -> None:
    """Import a find db or perf db of MIOpen's, or a json or csv export, packed with bzip2 or not,
    or a folder of TVM's, into a session."""
    given = options.given(facts)
    show.imported_database(api.import_database(file, session_id, reason, given, target=target))


@click.command()
@click.argument("master", type=_PATH)
@click.argument("targets", type=_FILE, nargs=-1, required=True, metavar="TARGET...")
@click.option("--form", help="Form that every file must have; default: the master's.")
@click.option(
    "-d",
    "--directory",
    type=options.OUTPUT_FOLDER,
    default=Path("merged"),
    show_default=True,
    help="Folder for the result.",
)
@click.option(
    "--keep-keys", is_flag=True, help="Keep the master's other entries of a key that both have."
)
def merge(
    master: Path, targets: tuple[Path, ...], form: str | None, directory: Path, keep_keys: bool
) -> None:
    """Merge TARGETs, of which later entries win, into a copy of MASTER."""
    found = api.merge_databases(master, *targets, output=directory, keep_keys=keep_keys, form=form)
    show.merged(found)


@click.command()
@click.argument("a", type=_DATABASE)
@click.argument("b", type=_DATABASE)
@click.option("--entries", is_flag=True, help="Show each entry that differs as well.")
@options.as_json
def db_diff(a: Path, b: Path, entries: bool, as_json: bool) -> int:
    """Say how database B differs from A: added, removed, changed, by solver and type. Exit 1 if it
    does."""
    if as_json:
        each: list[object] = []
        found = api.compare_databases(a, b, each.append if entries else lambda _: None)
        print_json(found.as_json() | ({"entries": each} if entries else {}))
        return int(found.differs)
    found = api.compare_databases(a, b, lambda pair: say(api.diff_line(pair)) if entries else None)
    if found.differs:
        print_table(
            ("solver", "type", "added", "removed", "changed"), found.rows(), right=(2, 3, 4)
        )
    say(found.summary())
    return int(found.differs)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--library", default="miopen", show_default=True, help="Library of the solvers.")
@options.as_json
def check_db(directory: Path, library: str, as_json: bool) -> int:
    """Check a folder of databases: MIOpen's by the rules of MIOpen's test suite, tile sizes by what
    vLLM and SGLang need. Exit 1 if a rule is broken."""
    found = api.check_databases(directory, library)
    if as_json:
        names = ("files", "entries", "left_out", "faults")
        print_json({name: getattr(found, name) for name in names})
        return int(bool(found.faults))
    for fault in found.faults:
        say(f"{fault.file}: {fault.rule}: {fault.text}")
    for why, count in sorted(found.left_out.items()):
        say(f"not checked: {count} {why}", err=True)
    faults = counted(len(found.faults), "fault") if found.faults else "no faults"
    say(
        f"{counted(len(found.files), 'file')}, {counted(found.entries, 'entry', 'entries')}:"
        f" {faults}"
    )
    return int(bool(found.faults))
