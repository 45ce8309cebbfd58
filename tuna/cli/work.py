"""Commands that do the work: run, enqueue, worker, reproduce."""

from __future__ import annotations

from typing import Any, NoReturn

import click

from tuna.cli import actions, options
from tuna.errors import BadInput, NotFound


@click.command()
@options.session_id
@click.option("--steps", help="Comma-separated steps; default: all.")
@click.option(
    "--compile-processes", type=click.IntRange(min=1), help="Default: one for each core that does not measure."
)
def run(session_id: int, steps: str | None, compile_processes: int | None) -> int:
    """Work through a session with workers on this machine. Interrupted, it goes on where it was."""
    return 1 if actions.enqueue(session_id, options.split(steps), workers=True, processes=compile_processes) else 0


@click.command()
@options.session_id
@click.option("--steps", help="Comma-separated steps; default: all.")
def enqueue(session_id: int, steps: str | None) -> int:
    """Fill the queues and drain results until every job is through; workers run in other terminals or machines."""
    return 1 if actions.enqueue(session_id, options.split(steps)) else 0


@click.command()
@click.argument("queue", type=click.Choice(["compile", "eval"]))
@click.option("-c", "--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Worker processes.")
@click.option("--devices", help="all, or numbers such as 0,2: one eval worker for each, with its own cores.")
@click.option("--session-id", type=click.IntRange(min=1), help="Work only for this session; needs the database.")
@click.option("--once", is_flag=True, help="Leave when the queues are empty.")
@click.option(
    "--join", "line", metavar="URL#TOKEN", help="Join with this token, or that of a file; default: TUNA_JOIN."
)
def worker(
    queue: str, processes: int, devices: str | None, session_id: int | None, once: bool, line: str | None
) -> None:
    """Run workers in the foreground, start those that die again, and end them warmly: Ctrl-C again ends them at once."""
    from tuna.cli import members

    if line := members.join_line(line):
        members.join(queue, line)
    start_worker(queue, processes, devices=devices, session_id=session_id, once=once)


def start_worker(
    queue: str, processes: int, *, devices: str | None = None, session_id: int | None = None, once: bool = False
) -> NoReturn:
    """Run workers until they have ended; does not return."""
    from tuna.workers.serve import serve

    session = "" if session_id is None else _session(session_id)
    raise SystemExit(serve(queue, processes, devices=devices, session=session, once=once))


def _session(session_id: int) -> str:
    from tuna.cli.database import open_database
    from tuna.db import sessions
    from tuna.db.engine import reading
    from tuna.membership.compatibility import session_text

    with reading(open_database()) as connection:
        return session_text(session_id, sessions.get(connection, session_id).environment)


@click.command()
@click.argument("driver")
@click.option("--library", required=True)
@click.option("--solver", required=True)
@click.option("--step", "last", required=True, help="The steps up to this one are run.")
@click.option("--seed", type=int, default=0)
@click.option("--index", type=click.IntRange(min=0), help="Only this candidate; default: all.")
@click.option("--option", "pairs", multiple=True, metavar="NAME=VALUE")
@click.option("--target", help="The session's target; default: this machine's.")
@options.as_json
def reproduce(
    driver: str,
    library: str,
    solver: str,
    last: str,
    seed: int,
    index: int | None,
    pairs: tuple[str, ...],
    target: str | None,
    as_json: bool,
) -> int:
    """Repeat a job of the layer DRIVER, or one candidate of it, here and now; nothing is stored.

    Failed jobs print this command line ready to paste.
    """
    from tuna.cli.console import print_json, print_table
    from tuna.configs import parse_line
    from tuna.libraries.items import WorkItem
    from tuna.libraries.options import check
    from tuna.libraries.registry import get_library
    from tuna.pipeline.local_run import run_steps

    tuned = get_library(library)
    if solver not in [known.name for known in tuned.solvers()]:
        raise NotFound(f"{library} has no solver {solver!r}.", hint=f"see: tuna solvers {library}")
    configs = parse_line(driver)
    if len(configs) != 1:
        raise BadInput("The layer must have one direction.", hint="give it with -F 1, 2 or 4")
    item = WorkItem(
        job_id=1,
        attempt=1,
        session_id=0,
        library=library,
        step=last,
        solver=solver,
        config=configs[0].to_json(),
        target=tuned.environment().target if target is None else target,
        seed=seed,
        options=check(tuned.options, options.job_options(pairs, None), library),
    )
    results = run_steps(tuned, item, last, index)
    final = results[-1]
    if as_json:
        print_json([result.model_dump(mode="json") for result in results])
        return 0 if final.ok else 1
    rows: list[tuple[Any, ...]] = [
        (
            trial.index,
            "-" if trial.time_ms is None else f"{trial.time_ms:.4f}",
            "-" if trial.max_error is None else f"{trial.max_error:.1e}",
            trial.cause.value if trial.cause else "ok",
            (trial.output_tail.strip().splitlines() or [""])[-1][:90],
        )
        for trial in final.trials
    ]
    print_table(
        f"{final.step}: {configs[0].label}", ("candidate", "ms", "error", "outcome", "output"), rows, right=(0, 1)
    )
    if not final.ok:
        click.echo(f"{final.cause.value if final.cause else 'failed'}: {final.output_tail.strip()}", err=True)
    return 0 if final.ok else 1
