"""`go_fish.py`: the main program; LIBRARY, miopen unless said, then what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tuna import api
from tuna.cli import options, seeds, show, work
from tuna.cli.console import say
from tuna.common.messages import counted
from tuna.errors import BadInput
from tuna.libraries.steps import find_step
from tuna.vocabulary import Resource
from tuna_mituna import db_files, layer_jobs, yaml_steps

DEFAULT_LIBRARY = "miopen"
#: Commands that `go_fish.py LIBRARY` takes as a word instead of options
SUBCOMMANDS: dict[str, click.Command] = {
    "import_configs": layer_jobs.import_configs,
    "load_job": layer_jobs.load_job,
    "export_db": db_files.export_db,
    "update_golden": db_files.update_golden,
}


class _Fish(click.Group):
    """A group whose sub-commands are the libraries."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """A command line that starts with an option is for the default library."""
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = [DEFAULT_LIBRARY, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return api.known_libraries()

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        return click.Group(
            name,
            params=list(library_command.params),
            commands=SUBCOMMANDS,
            callback=library_command.callback,
            invoke_without_command=True,
            help=f"Prepare and run tuning sessions of {name}.",
            context_settings={**seeds.CONTEXT, "obj": name},
        )


@click.group(cls=_Fish, context_settings=seeds.CONTEXT)
def go_fish() -> None:
    """Tune a library: ./go_fish.py [LIBRARY] WHAT-TO-DO. Without a library: miopen."""


@click.command()
@click.option("--add_tables", is_flag=True, help="Create the tables of the database.")
@click.option("--init_session", is_flag=True, help="Create a session entry; needs -l.")
@click.option("--update_solvers", is_flag=True, help="Store the solvers that the library has.")
@click.option(
    "--update_applicability", is_flag=True, help="Work out which solvers apply; needs --session_id."
)
@click.option("--list_solvers", is_flag=True, help="List the stored solvers.")
@click.option("-s", "--status", is_flag=True, help="Show devices, services and sessions.")
@click.option(
    "--execute", is_flag=True, help="Run all steps of the session with workers on this machine."
)
@click.option(
    "--fin_steps", help="The step to enqueue (with --enqueue_only) or to run a worker for."
)
@click.option(
    "--yaml",
    "yaml_file",
    type=click.Path(path_type=Path),
    help="Do what a YAML file says, step by step.",
)
@click.option("--add_model", metavar="NAME", help="Store a model; needs --md_version.")
@click.option("--md_version", help="Version of the model.")
@click.option("--add_framework", metavar="NAME", help="Store a framework; needs --fw_version.")
@click.option("--fw_version", help="Version of the framework.")
@click.option("--enqueue_only", is_flag=True, help="Enqueue the step's jobs and drain the results.")
@seeds.session_id
@click.option("-l", "--label", help="Reference text; with --update_applicability: the config tag.")
@seeds.arch
@seeds.num_cu
@click.option("--rocm_v", help="--init_session: ROCm version, where it is not installed.")
@click.option("--miopen_v", help="--init_session: MIOpen version, where it is not installed.")
@seeds.debug
@click.pass_context
@functools.partial(options.session_options, spelling="_")
def library_command(ctx: click.Context, /, **given: Any) -> int | None:
    """Prepare and run tuning sessions."""
    wanted = [name for name in _ACTIONS if given[name]]
    if ctx.invoked_subcommand:
        if any(given.values()):
            raise BadInput(f"Options belong after {ctx.invoked_subcommand}.")
        return None
    if len(wanted) != 1:
        raise BadInput("Give exactly one action.", hint=f"see: ./go_fish.py {ctx.obj} --help")
    return _ACTIONS[wanted[0]](str(ctx.obj), given) or 0


def _init_session(library: str, given: dict[str, Any]) -> None:
    facts = options.given({name: given[name] for name in ("arch", "num_cu", "rocm_v", "miopen_v")})
    reason = seeds.required(given["label"], "-l")
    show.started(api.init_session(library, reason, facts, options=given["session_options"]))


def _update_solvers(library: str, _: dict[str, Any]) -> None:
    say(f"{library} has {counted(api.update_solvers(library), 'solver')}")


def _update_applicability(library: str, given: dict[str, Any]) -> None:
    number = seeds.required(given["session_id"], "--session_id")
    show.applicability(api.update_applicability(number, given["label"], library=library))


def _execute(library: str, given: dict[str, Any]) -> int:
    number = seeds.required(given["session_id"], "--session_id")
    api.session_library(number, library)
    return 1 if work.work_through([number], workers=True) else 0


def _fin_steps(library: str, given: dict[str, Any]) -> int:
    """Enqueue, or run a worker: the two terminals of the seeds."""
    number = seeds.required(given["session_id"], "--session_id")
    api.session_library(number, library)
    steps = options.split(given["fin_steps"])
    resources = {find_step(api.get_library(library), step).resource for step in steps}
    if given["enqueue_only"]:
        return 1 if work.work_through([number], steps) else 0
    if len(resources) != 1:
        raise BadInput(
            "A worker runs steps of one kind.", hint="name one step, or add --enqueue_only"
        )
    on_device = resources == {Resource.DEVICE}
    return api.serve_workers(
        "eval" if on_device else "compile", 1 if on_device else len(api.compile_cpus())
    )


def _yaml(library: str, given: dict[str, Any]) -> int:
    if [name for name, value in given.items() if value] != ["yaml_file"]:
        raise BadInput("--yaml stands alone: put everything else into the file.")
    return yaml_steps.run_file(given["yaml_file"], library, go_fish)


def _add_tables(_: str, __: dict[str, Any]) -> None:
    api.upgrade_database()
    say(f"tables: {', '.join(api.list_tables())}")


def _status(library: str, _: dict[str, Any]) -> int:
    """Check this machine and its services for the library, then list its sessions; 1 if something
    must change."""
    found = api.doctor(library)
    show.findings(found)
    show.sessions([session for session in api.status() if session.library == library])
    return 0 if all(finding.ok for finding in found) else 1


#: Handler of each action option, called with the library and all options; returns the exit code,
#: None for 0
_ACTIONS: dict[str, Callable[[str, dict[str, Any]], int | None]] = {
    "add_tables": _add_tables,
    "init_session": _init_session,
    "update_solvers": _update_solvers,
    "update_applicability": _update_applicability,
    "list_solvers": lambda library, _: show.solvers(api.list_solvers(library)),
    "status": _status,
    "execute": _execute,
    "fin_steps": _fin_steps,
    "yaml_file": _yaml,
    "add_model": lambda _, given: layer_jobs.add_networks(given),
    "add_framework": lambda _, given: layer_jobs.add_networks(given),
}

main = seeds.program(go_fish, "go_fish.py")
