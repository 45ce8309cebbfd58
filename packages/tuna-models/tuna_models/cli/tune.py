"""`tuna tune`: a model file in, a faster model out."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from tuna.api import RunEvents, of_all
from tuna.cli import options
from tuna.cli.console import say
from tuna.cli.show import failed
from tuna.common.messages import counted
from tuna_models import api
from tuna_models.cli.inputs import Inputs
from tuna_models.cli.model import Kernels, progress, show_built, show_import, show_promise
from tuna_models.manifest import Precision
from tuna_models.names import bounded
from tuna_models.work import store


@dataclass(frozen=True)
class _Tuning:
    """A model to import and tune, and the limits."""

    name: str | None = options.option(
        "Name of the model; default: the file's, with -bf16 in that precision."
    )
    session_id: int | None = options.option(
        "For the target of this session, with its workers; default: this machine.", type=options.ID
    )
    output: Path | None = options.option(
        "The shared library to build, check and time. Without it nothing is built.",
        "-o",
        type=options.OUTPUT_FILE,
    )
    batch: int | None = options.option("First extent of every input.", type=options.COUNT)
    candidates: int = options.option(
        "Candidates for each task and solver.", type=options.COUNT, default=4
    )
    minutes: float | None = options.option(
        "All tasks end by then, the most useful first; 0: no task is measured, the model gets the"
        " kernels that are known or predicted; default: until done.",
        type=click.FloatRange(min=0),
    )
    target_ms: float | None = options.option(
        "The model need not be faster: end then, or when it cannot be met.", type=options.POSITIVE
    )


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@options.collected(_Tuning)
@options.collected(Inputs, into="inputs")
@options.collected(Kernels, into="kernels")
@options.log_to
@options.model_cores
def tune(
    file: Path, wanted: _Tuning, inputs: Inputs, kernels: Kernels, stored: options.OnStored
) -> int:
    """Import the model FILE, ONNX or a .pt2 of torch.export, tune its tasks on this machine, or on
    that of a session, and with -o build it.

    Time goes to the tasks on which the model spends most. Tasks that another model has are not
    tuned again. Interrupted, the same command goes on from there.
    """
    arguments, session_id = kernels.arguments(), wanted.session_id
    events = RunEvents(on_stored=stored)
    with (
        api.open_work(session_id, model="", output=wanted.output, events=events) as work,
        contextlib.ExitStack() as stack,
    ):
        imported = api.import_model(
            wanted.name or _name_of(file, inputs.precision),
            file,
            batch=wanted.batch,
            work=work,
            start_workers=True,
            **inputs.arguments(),
        )
        stack.enter_context(api.forgotten_if_refused(imported))
        show_import(imported)
        if not work.own:
            say(f"by the workers of session {session_id}: {work.environment}")
        with progress(work, "checking"):
            model = api.keep_error(imported.model, work, arguments["checks"])
        where = f"; kernels for {of_all()} (--cores)" if work.runs_here else ""
        latency, tuned = None, None
        builds_only = wanted.minutes == 0 and wanted.output is not None
        if wanted.target_ms is not None:
            latency = api.Latency(wanted.target_ms, arguments["checks"])
        elif not builds_only:  # which checks it
            with progress(work, "checking"):
                checked = api.check_model(_version(model), work=work, **arguments)
            model = checked.model
            for line in filter(None, (checked.remark, f"checked: {checked.rule}", checked.report)):
                say(line)
            say(
                "with predicted kernels its answer is right: largest error over largest value"
                f" {checked.error:.1e}"
            )

        def started(tuned: api.TunedModel) -> None:
            say(
                f"session {tuned.session_id}: {counted(tuned.tasks, 'task')} can be tuned,"
                f" {tuned.known} of them have a result;"
                f" {counted(tuned.wanted, 'job is', 'jobs are')} missing{where}"
            )
            if tuned.undecided and tuned.wanted:
                say(
                    f"first {counted(tuned.undecided, 'task')} with kernels of several families"
                    f" within a factor of {api.CLOSE} by their estimates"
                )

        show_promise(model.manifest)
        name = _version(model)
        if wanted.minutes == 0 and latency is None:
            say(f"no task is measured (--minutes 0){where}")
        else:
            with progress(work, "tuning"):
                tuned = api.tune_model(
                    name,
                    candidates=wanted.candidates,
                    winograd=kernels.winograd,
                    minutes=wanted.minutes,
                    latency=latency,
                    on_start=started,
                    work=work,
                )
            if tuned.reached is not None:
                say(reached(tuned.reached, tuned.added))
            elif tuned.added < tuned.wanted:
                say(
                    f"{tuned.added} of {counted(tuned.wanted, 'job')} fitted into the time; the"
                    " same command goes on"
                )
            if tuned.unmeasured:
                say(
                    f"{counted(tuned.unmeasured, 'task is', 'tasks are')} not measured, with the"
                    " kernel of a similar one or a predicted one"
                )
        if wanted.output is not None:
            with progress(work, "building"):
                built = api.build_model(name, wanted.output, work=work, **arguments)
            show_built(built)
        else:
            say(
                f"to build and time it: `tuna model build {shlex.quote(imported.model.name)} -o"
                f" {shlex.quote(imported.model.name)}.so`"
            )
    if tuned is None:
        return 0
    failed(tuned.errored, tuned.session_id)
    missed = tuned.reached is not None and tuned.reached.ending is not api.Ending.MET
    return 1 if tuned.errored or missed else 0


def _version(model: api.StoredModel) -> str:
    return f"{model.name}@{model.version}"


def _name_of(file: Path, precision: str) -> str:
    """The name of an import that the user gives none: in another precision another one."""
    ending = "" if precision == Precision.FP32 else f"-{precision}"
    return bounded(file.stem, store.NAME_CHARS - len(ending)) + ending


def reached(found: api.Reached, jobs: int) -> str:
    """Say how tuning for a wanted time ended, after so many jobs."""
    best = f"the best so far takes {found.best_ms:.2f} ms"
    after = f"after {counted(jobs, 'job')}" if jobs else "by what was known, without a trial"
    if found.ending is api.Ending.MET:
        return f"{found.target_ms:g} ms are met {after}: the model takes {found.best_ms:.2f} ms"
    why = {
        api.Ending.IMPOSSIBLE: f"by the estimates it takes {found.least_ms:.2f} ms at least",
        api.Ending.BUDGET: "the time is over",
        api.Ending.DONE: "all jobs are done",
    }[found.ending]
    return f"{found.target_ms:g} ms are not met, {after}: {why}; {best}"
