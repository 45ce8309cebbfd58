"""Commands that do the work: run, enqueue, worker, reproduce, retry, cancel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tuna import api
from tuna.cli import options, show, tokens
from tuna.cli.console import ProgressView, by_state, print_json, print_table, say
from tuna.common import signals
from tuna.common.cpu import load
from tuna.common.lifetime import has_starter
from tuna.common.messages import counted
from tuna.errors import BadInput
from tuna.settings import get_settings
from tuna.vocabulary import Cause

if TYPE_CHECKING:
    from tuna.coordinator.session_run import Progress


@click.command()
@options.session_ids
@click.option("--steps", help="Comma-separated steps; default: all.")
@click.option(
    "--compile-processes", type=options.COUNT, help="Number; default: one per build core."
)
@options.policy
@options.log_to
@options.cores
def run(
    session_ids: tuple[int, ...],
    every: bool,
    steps: str | None,
    compile_processes: int | None,
    policy: str | None,
    stored: options.OnStored,
) -> int:
    """Work through sessions with workers on this machine. Interrupted, it goes on where it was."""
    chosen = options.sessions(session_ids, every=every)
    wanted = options.split(steps)
    errored = work_through(
        chosen,
        wanted,
        workers=True,
        processes=compile_processes,
        policy=policy,
        on_stored=stored,
    )
    return int(errored > 0)


@click.command()
@options.session_ids
@click.option("--steps", help="Comma-separated steps; default: all.")
@options.policy
@options.log_to
@click.option("--stay", is_flag=True, help="With --all: go on without jobs, until a signal.")
def enqueue(
    session_ids: tuple[int, ...],
    every: bool,
    steps: str | None,
    policy: str | None,
    stored: options.OnStored,
    stay: bool,
) -> int:
    """Fill the queues and drain results until every job is through; workers run in other terminals
    or machines."""
    chosen = options.sessions(session_ids, every=every)
    if stay and chosen is not None:
        raise BadInput("A coordinator that stays serves all sessions.", hint="--all --stay")
    if not stay:
        return int(work_through(chosen, options.split(steps), policy=policy, on_stored=stored) > 0)
    with _set_by_signal() as stop:
        work_through(chosen, options.split(steps), policy=policy, stop=stop, on_stored=stored)
    say("Ended; what is queued is done, and its results wait in Redis.", err=True)
    return 0


@contextlib.contextmanager
def _set_by_signal() -> Iterator[threading.Event]:
    """Yield an event that the first signal sets; the second one ends the process."""
    stop = signals.SignalEvent()

    def ask(number: int, at_once: bool) -> None:
        stop.set()
        if at_once:
            signals.end_at_once(number)

    with signals.handling(ask, by_command=has_starter()):
        yield stop


def work_through(
    session_ids: Sequence[int] | None,
    steps: Sequence[str] = (),
    *,
    workers: bool = False,
    processes: int | None = None,
    policy: str | None = None,
    stop: threading.Event | None = None,
    on_stored: options.OnStored = lambda _: None,
) -> int:
    """Run or enqueue the steps with a view of the progress; returns the number of jobs that
    errored.

    `session_ids`: None for all sessions that have open jobs. `stop`: see `api.enqueue`;
    `on_stored`: see `api.RunEvents`.
    """
    with ProgressView(_title(session_ids), _notice() if workers else "") as view:

        def say_ended(session_id: int, progress: Progress) -> None:
            view.say(_end(session_id, progress))

        events = api.RunEvents(
            on_wait=view.stopping,
            on_waiting=view.waiting,
            on_stored=on_stored,
            on_ended=say_ended,
            on_log=view.log_kept,
        )
        if workers:
            end = api.run(
                session_ids,
                steps,
                processes=processes,
                policy=policy,
                on_progress=view.update,
                events=events,
            )
        else:
            end = api.enqueue(
                session_ids,
                steps,
                policy=policy,
                on_progress=view.update,
                events=events,
                stop=stop,
            )
    for key, part in sorted(end.sessions.items()):
        say(_end(key, part))
        show.failed(part.errored, key)
    if not end.sessions and stop is None:
        say("No session has open jobs.")
    return end.errored


def _end(session_id: int, end: Progress) -> str:
    rounds = f"rounds of searches: {by_state(end.rounds)}" if end.rounds else ""
    return f"session {session_id}: {'; '.join(filter(None, (by_state(end.states), rounds)))}"


def _notice() -> str:
    """Return the reasons why this machine's workers are slower than they could be; "" if none."""
    quiet = get_settings().quiet == "yes"
    stops = "Builds stop while devices are measured: TUNA_QUIET=yes." if quiet else ""
    return " ".join(filter(None, (load().advice, stops)))


def _title(session_ids: Sequence[int] | None) -> str:
    if session_ids is None:
        return "all sessions"
    return f"session{'s' if len(session_ids) > 1 else ''} {', '.join(map(str, session_ids))}"


@dataclass(frozen=True)
class _WorkerOptions:
    """Numbers of workers, their devices and boards."""

    processes: int = options.option(
        "Worker processes; with --tvm-tracker one for each board.",
        "-c",
        type=options.COUNT,
        default=1,
    )
    devices: str | None = options.option(
        "all, or numbers such as 0,2: one eval worker for each, with its own cores."
    )
    session_id: int | None = options.option(
        "Work only for this session; needs the database.", type=options.ID
    )
    once: bool = options.option("Leave when the queues are empty and no job is to come.")
    target: str | None = options.option(
        "The boards' target, where the session has another than their own."
    )
    reset: str | None = options.option(
        "What may bring a lost board back; tried once a minute at most.", metavar="COMMAND"
    )
    line: str | None = options.option(
        "Join with this token, or that of a file; default: TUNA_JOIN.",
        "--join",
        metavar="URL#TOKEN",
    )


@click.command()
@click.argument("role", type=click.Choice(["compile", "eval"]))
@options.collected(_WorkerOptions)
@options.boards
def worker(
    role: api.Role, wanted: _WorkerOptions, tvm_tracker: str | None, device_key: str | None
) -> int:
    """Run workers in the foreground, start those that die again, and end them warmly: Ctrl-C again
    ends them at once."""
    boards = None
    named = (tvm_tracker, device_key, wanted.target, wanted.reset)
    if any(given is not None for given in named):
        boards = api.WorkerBoards(*(given or "" for given in named))
    if line := tokens.join_line(wanted.line):
        api.joining().join(role, line, wanted.processes, devices=wanted.devices, boards=boards)
    try:
        return api.serve_workers(
            role,
            wanted.processes,
            devices=wanted.devices,
            session_id=wanted.session_id,
            once=wanted.once,
            boards=boards,
        )
    except signals.INTERRUPTS:  # before there was a worker
        say("Ended; nothing was begun.", err=True)
        return 0


@dataclass(frozen=True)
class _Repeated:
    """The job or candidate that is repeated."""

    trial: int | None = options.option(
        "Only this candidate, built from its params; it takes nothing else.", type=options.ID
    )
    library: str | None = options.option()
    solver: str | None = options.option()
    last: str | None = options.option("The steps up to this one are run.", "--step")
    seed: int = options.option(type=click.IntRange(0, 2**63 - 1), default=0, show_default=False)
    index: int | None = options.option(
        "Only this candidate; default: all.", type=click.IntRange(min=0, max=2**31 - 1)
    )
    pairs: tuple[str, ...] = options.option("", "--option", metavar="NAME=VALUE")
    target: str | None = options.option("The session's target; default: this machine's.")


@click.command()
@click.argument("driver", required=False)
@options.collected(_Repeated)
@options.conditions
@options.as_json
def reproduce(
    driver: str | None,
    conditions: Mapping[str, str],
    as_json: bool,
    wanted: _Repeated,
) -> int:
    """Repeat a job of the layer DRIVER (driver command, JSON object or find-db key), or one
    candidate of it.

    It is done here and now, and nothing is stored.

    Failed jobs print this command line ready to paste. Candidates that a search found are repeated
    with --trial ID.
    """
    if wanted.trial is not None:
        if driver or wanted.library or wanted.solver or wanted.last:
            raise click.UsageError(
                "--trial says everything: leave out DRIVER, --library, --solver and --step."
            )
        return _show(*api.reproduce_trial(wanted.trial), as_json)
    if not (driver and wanted.library and wanted.solver and wanted.last):
        raise click.UsageError("It takes DRIVER, --library, --solver and --step, or --trial alone.")
    results = api.reproduce(
        driver,
        library=wanted.library,
        solver=wanted.solver,
        step=wanted.last,
        index=wanted.index,
        options=options.job_options(wanted.pairs),
        origin=api.JobOrigin(wanted.seed, conditions, wanted.target),
    )
    return _show(results, driver, as_json)


def _show(results: Sequence[api.StepResult], driver: str, as_json: bool) -> int:
    final = results[-1]
    if as_json:
        print_json(results)
    else:
        _print_trials(final, driver)
    return 0 if final.ok else 1


def _print_trials(final: api.StepResult, driver: str) -> None:
    rows = [
        (
            trial.index,
            "-" if trial.time_ms is None else f"{trial.time_ms:.4f}",
            "-" if trial.max_error is None else f"{trial.max_error:.1e}",
            trial.cause.value if trial.cause else "ok",
            (trial.output_tail.strip().splitlines() or [""])[-1][:90],
        )
        for trial in final.trials
    ]
    columns = ("candidate", "ms", "error", "outcome", "output")
    print_table(columns, rows, right=(0, 1), title=f"{final.step}: {api.read_one(driver).label}")
    if not final.ok:
        say(
            f"{final.cause.value if final.cause else 'failed'}: {final.output_tail.strip()}",
            err=True,
        )


_jobs = click.option(
    "--job", "jobs", type=options.ID, multiple=True, help="Only this job; may be repeated."
)


@click.command()
@options.session_id
@click.option(
    "--cause",
    type=click.Choice([cause.value for cause in Cause]),
    metavar="CAUSE",
    help=f"Only jobs that failed for this cause: {', '.join(Cause)}.",
)
@_jobs
def retry(session_id: int, cause: str | None, jobs: tuple[int, ...]) -> None:
    """Send errored jobs back to the step that failed, as if it had never been tried.

    Canceled jobs begin anew if --job names them; so a search goes on of which they are rounds.
    """
    moved = api.retry(session_id, jobs=jobs, cause=cause)
    say(f"session {session_id}: {_count(moved, 'try again', 'at ')}")


@click.command()
@options.session_id
@click.option("--tag", help="Only jobs of layers with this tag.")
@_jobs
def cancel(session_id: int, tag: str | None, jobs: tuple[int, ...]) -> None:
    """End jobs that are not finished; results of their current attempts are refused.

    A search of which one round is canceled opens no more.
    """
    done = api.cancel(session_id, jobs=jobs, tag=tag)
    say(f"session {session_id}: {_count(done.states, 'canceled', 'were ')}")
    if not done.workers_told:
        say(
            "Redis is unreachable: workers finish their current chunks, whose results are refused.",
            err=True,
        )


def _count(moved: Mapping[str, int], what: str, mark: str) -> str:
    if not moved:
        return "no job is concerned"
    total = sum(moved.values())
    parts = ", ".join(f"{count} {mark}{name}" for name, count in sorted(moved.items()))
    return f"{counted(total, 'job')} {what} ({parts})"
