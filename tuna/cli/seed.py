"""The seeds' command lines, flag for flag: go_fish.py, load_job.py and export_db.py."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import click

from tuna.cli import actions, options
from tuna.cli.main import guarded
from tuna.cli.setup import print_solvers
from tuna.errors import BadInput
from tuna.libraries.base import Resource

_T = TypeVar("_T")
_CONTEXT = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=_CONTEXT)
@click.argument("library")
@click.argument("action", required=False, type=click.Choice(["import_configs"]))
@click.option("--init_session", is_flag=True, help="Create a session entry; needs -l.")
@click.option("--update_solvers", is_flag=True, help="Store the solvers that the library has.")
@click.option("--update_applicability", is_flag=True, help="Work out which solvers apply; needs --session_id.")
@click.option("--list_solvers", is_flag=True, help="List the stored solvers.")
@click.option("--execute", is_flag=True, help="Run all steps of the session with workers on this machine.")
@click.option("--fin_steps", help="The step to enqueue (with --enqueue_only) or to run a worker for.")
@click.option("--enqueue_only", is_flag=True, help="Enqueue the step's jobs and drain the results.")
@click.option("--session_id", type=click.IntRange(min=1), help="Tuning session id.")
@click.option("-l", "--label", help="Reference text; with --update_applicability: the config tag.")
@click.option("-t", "--tag", help="import_configs: tag for the layers.")
@click.option("-f", "--file_name", type=click.Path(path_type=Path), help="import_configs: file of driver commands.")
@click.option("--strict", is_flag=True, help="import_configs: import nothing if any line is rejected.")
@click.option("--debug", is_flag=True, help="Show a traceback for every error.")
def _go_fish(
    library: str,
    action: str | None,
    init_session: bool,
    update_solvers: bool,
    update_applicability: bool,
    list_solvers: bool,
    execute: bool,
    fin_steps: str | None,
    enqueue_only: bool,
    session_id: int | None,
    label: str | None,
    tag: str | None,
    file_name: Path | None,
    strict: bool,
    debug: bool,
) -> int:
    """Prepare and run tuning sessions of LIBRARY; with import_configs, import layers."""
    chosen = [init_session, update_solvers, update_applicability, list_solvers, execute, bool(fin_steps), bool(action)]
    if sum(chosen) != 1:
        raise BadInput("Say one thing to do.", hint=f"see: ./go_fish.py {library} --help")
    if action:
        actions.import_configs(_required(file_name, "-f"), _required(tag, "-t"), strict=strict)
    elif init_session:
        actions.init_session(library, _required(label, "-l"))
    elif update_solvers:
        actions.update_solvers(library)
    elif list_solvers:
        print_solvers(actions.list_solvers(library))
    else:
        number = _required(session_id, "--session_id")
        return _with_session(library, number, update_applicability, label, fin_steps, enqueue_only)
    return 0


def _with_session(
    library: str, session_id: int, applicability: bool, label: str | None, fin_steps: str | None, enqueue_only: bool
) -> int:
    from tuna.libraries.registry import get_library

    actions.session_library(session_id, library)
    if applicability:
        actions.update_applicability(session_id, label)
        return 0
    steps = options.split(fin_steps)
    resources = {get_library(library).step(step).resource for step in steps}
    if not steps or enqueue_only:
        return 1 if actions.enqueue(session_id, steps, workers=not steps) else 0
    if len(resources) != 1:
        raise BadInput("A worker runs steps of one kind.", hint="name one step, or add --enqueue_only")
    from tuna.cli.work import start_worker
    from tuna.workers.devices import compile_cpus

    on_device = resources == {Resource.DEVICE}
    start_worker("eval" if on_device else "compile", 1 if on_device else len(compile_cpus()))
    return 0


def _required(value: _T | None, flag: str) -> _T:
    if value is None:
        raise BadInput(f"{flag} is missing.")
    return value


@click.command(context_settings=_CONTEXT)
@click.option("--session_id", type=click.IntRange(min=1), required=True, help="Tuning session id.")
@click.option("-t", "--tag", help="Config tag.")
@click.option("--all_configs", is_flag=True, help="Every layer of the session.")
@click.option("--fin_steps", help="Comma-separated steps; default: all of the library's.")
@click.option("-o", "--only_applicable", is_flag=True, help="A job for each applicable solver (always so).")
@click.option("-s", "--solvers", help="Only these solvers, comma-separated.")
@click.option("-l", "--label", required=True, help="Reference text.")
@click.option("--candidates", type=click.IntRange(min=1), help="Candidates to try for each layer and solver.")
@click.option("--debug", is_flag=True, help="Show a traceback for every error.")
def _load_job(
    session_id: int,
    tag: str | None,
    all_configs: bool,
    fin_steps: str | None,
    only_applicable: bool,
    solvers: str | None,
    label: str,
    candidates: int | None,
    debug: bool,
) -> int:
    """Add jobs to a session."""
    if (tag is None) != all_configs:
        raise BadInput("Say which layers: either -t TAG or --all_configs.")
    actions.load_jobs(
        session_id,
        tag=tag,
        steps=options.split(fin_steps),
        reason=label,
        solvers=options.split(solvers),
        options=options.job_options((), candidates),
    )
    return 0


@click.command(context_settings=_CONTEXT)
@click.option("--session_id", type=click.IntRange(min=1), required=True, help="Tuning session id.")
@click.option("-p", "--perf_db", "form", flag_value="perf", help="Export the performance db.")
@click.option("-f", "--find_db", "form", flag_value="find", help="Export the find db.")
@click.option("-k", "--kern_db", "form", flag_value="kernel", help="Export the kernel db.")
@click.option("--tvm_db", "form", flag_value="tvm", help="Export TVM's own JSON database.")
@click.option("--filename", help="Base name of the file.")
@click.option("--config_tag", help="Only layers that carry this tag.")
@click.option("--top", type=click.IntRange(min=1), default=4, show_default=True, help="Solvers kept for a layer.")
@click.option("--debug", is_flag=True, help="Show a traceback for every error.")
def _export_db(
    session_id: int, form: str | None, filename: str | None, config_tag: str | None, top: int, debug: bool
) -> int:
    """Export a session's results; the last line printed is the path."""
    if form is None:
        raise BadInput("Say which database: -p, -f, -k or --tvm_db.")
    actions.export(session_id, form, Path(), filename=filename, config_tag=config_tag, top=top)
    return 0


def go_fish() -> None:
    """./go_fish.py"""
    raise SystemExit(guarded(_go_fish, name="go_fish.py"))


def load_job() -> None:
    """./load_job.py"""
    raise SystemExit(guarded(_load_job, name="load_job.py"))


def export_db() -> None:
    """./export_db.py"""
    raise SystemExit(guarded(_export_db, name="export_db.py"))
