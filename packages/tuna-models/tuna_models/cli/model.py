"""`tuna model` and `tuna tune`: a model in, a faster model out."""

from __future__ import annotations

import contextlib
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tuna.api import RunEvents, of_all
from tuna.cli import options
from tuna.cli.console import ProgressView, print_json, print_table, say
from tuna.cli.groups import Group
from tuna.cli.show import failed
from tuna.common.files import atomic_file
from tuna.common.messages import counted, size
from tuna.errors import BadInput
from tuna_models import api
from tuna_models.cli.benchmark import benchmarks


@click.group(cls=Group)
def model() -> None:
    """Import models, see their tasks, build them with the kernels that won."""


@model.command("import")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--batch",
    "batches",
    metavar="N[,N...]",
    help="First extent of every input. Several: imports NAME-b1, NAME-b8 and so on.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="INPUT=N,C,H,W",
    help="Shape of an input, or size of an open extent.",
)
@click.option(
    "--value",
    "values",
    multiple=True,
    metavar="INPUT=N[,N...]",
    help="Value of an input, which becomes a constant; may be repeated.",
)
@click.option(
    "--session-id", type=options.ID, help="For the target of this session; default: this machine's."
)
@options.model_cores
def import_model(
    name: str,
    file: Path,
    batches: str | None,
    shapes: tuple[str, ...],
    values: tuple[str, ...],
    session_id: int | None,
) -> None:
    """Import the model FILE, ONNX or a .pt2 of torch.export, as NAME; its functions become tasks
    that can be tuned."""
    sizes, wanted, fixed = _batches(batches), dict(map(_shape, shapes)), dict(map(_value, values))
    with api.open_work(session_id, model="") as work:
        for batch in sizes:
            named = name if len(sizes) < 2 else f"{name}-b{batch}"
            show_import(
                api.import_model(named, file, batch=batch, shapes=wanted, values=fixed, work=work)
            )


@model.command("list")
@options.as_json
def list_models(as_json: bool) -> None:
    """List imported models, the latest first."""
    found = api.list_models()
    if as_json:
        print_json([api.model_document(entry) for entry in found])
        return
    rows = [
        (
            *(entry.name, entry.version[:12]),
            " ".join(
                f"{one.name}:{'x'.join(map(str, one.shape))}" for one in entry.manifest.inputs
            ),
            *(len(entry.manifest.tasks), sum(task.count for task in entry.manifest.tasks)),
            size(entry.manifest.size_bytes),
        )
        for entry in found
    ]
    print_table(("model", "version", "inputs", "tasks", "calls", "size"), rows, right=(3, 4, 5))


@model.command()
@click.argument("name")
@click.option(
    "--workloads",
    type=options.OUTPUT_FILE,
    metavar="FILE",
    help="Write its tasks as `tuna import` and the master (tune-rpc) read them.",
)
@options.as_json
def show(name: str, workloads: Path | None, as_json: bool) -> None:
    """Show the tasks of a model: how often it calls each, and its fastest kernel."""
    if workloads is not None:
        lines = [workload.text() for workload in api.model_workloads(name)]
        with atomic_file(workloads) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines))
        say(f"{workloads}: {counted(len(lines), 'task')}")
        return
    imported, tasks = api.show_model(name)
    if as_json:
        print_json(api.tasks_document(imported, tasks))
        return
    rows = [
        (
            *(task.label, task.count, task.models),
            *((task.winner.solver, f"{task.winner.time_ms:.4f}") if task.winner else "--"),
        )
        for task in tasks
    ]
    print_table(
        ("task", "calls", "other models", "fastest", "ms"),
        rows,
        (1, 2, 4),
        title=f"{imported.name} {imported.version[:12]}",
    )


@dataclass(frozen=True)
class _Kernels:
    """The kernels that a model is built with, and what it is compared with."""

    winograd: bool = options.option(
        "Whether kernels may use Winograd, or direct sums only.",
        "--winograd/--no-winograd",
        default=True,
    )
    compare: bool = options.option(
        "Whether the fastest few kernels are timed in the model.",
        "--compare/--no-compare",
        default=True,
    )
    rivals: bool = options.option(
        "Whether onnxruntime and PyTorch are timed beside it.", "--rivals/--no-rivals", default=True
    )
    untuned: bool = options.option(
        "Also time what TVM makes of the model without tuning; takes long."
    )
    recorded: Path | None = options.option("A .npz file with the inputs to run it on.", "--input")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `api.build_model` and `api.check_model`."""
        checks = api.Checks(self.rivals, self.untuned, self.recorded, compare=self.compare)
        return {"winograd": self.winograd, "checks": checks}


@model.command()
@click.argument("name")
@click.option(
    "-o", "--output", type=options.OUTPUT_FILE, required=True, help="The shared library to write."
)
@click.option(
    "--session-id",
    type=options.ID,
    help="For this session's target, with its results; default: this machine's, with all for it.",
)
@click.option("--golden", type=options.GOLDEN, help="Only results of this golden version.")
@options.collected(_Kernels)
@options.built_cores
@options.as_json
def build(
    name: str,
    output: Path,
    session_id: int | None,
    golden: int | None,
    wanted: _Kernels,
    as_json: bool,
) -> None:
    """Build a model with its fastest kernels, check its answer against ONNX's reference, and time
    it, by a job of its session."""
    with (
        api.open_work(session_id, model=name, output=output) as work,
        _progress(work, "building"),
    ):
        built = api.build_model(
            name, output, session_id=session_id, golden=golden, work=work, **wanted.arguments()
        )
    if as_json:
        print_json(_as_json(built))
    else:
        show_built(built)


@contextlib.contextmanager
def _progress(work: api.ModelWork, title: str) -> Iterator[None]:
    """Show what the workers do."""
    with (
        ProgressView(title) as view,
        work.showing(view.update, view.stopping, view.waiting, view.log_kept),
    ):
        yield


model.add_command(benchmarks)


@dataclass(frozen=True)
class _Tuning:
    """A model to import and tune, and the limits."""

    name: str | None = options.option("Name of the model; default: the file's.")
    session_id: int | None = options.option(
        "For the target of this session, with its workers; default: this machine.", type=options.ID
    )
    output: Path | None = options.option(
        "The shared library to build, check and time. Without it nothing is built.",
        "-o",
        type=options.OUTPUT_FILE,
    )
    batch: int | None = options.option("First extent of every input.", type=options.COUNT)
    shapes: tuple[str, ...] = options.option(
        "Shape of an input, or size of an open extent.", "--shape", metavar="INPUT=N,C,H,W"
    )
    values: tuple[str, ...] = options.option(
        "Value of an input, which becomes a constant; may be repeated.",
        "--value",
        metavar="INPUT=N[,N...]",
    )
    candidates: int = options.option(
        "Candidates for each task and solver.", type=options.COUNT, default=4
    )
    minutes: float | None = options.option(
        "All tasks end by then, the heaviest first; 0: no task is measured, the model gets the"
        " kernels that are known or predicted; default: until done.",
        type=click.FloatRange(min=0),
    )
    target_ms: float | None = options.option(
        "The model need not be faster: end then, or when it cannot be met.", type=options.POSITIVE
    )


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@options.collected(_Tuning)
@options.collected(_Kernels, into="kernels")
@options.log_to
@options.model_cores
def tune(file: Path, wanted: _Tuning, kernels: _Kernels, stored: options.OnStored) -> int:
    """Import the model FILE, ONNX or a .pt2 of torch.export, tune its tasks on this machine, or on
    that of a session, and with -o build it.

    Time goes to the tasks on which the model spends most. Tasks that another model has are not
    tuned again. Interrupted, the same command goes on from there.
    """
    arguments, session_id = kernels.arguments(), wanted.session_id
    shapes, values = dict(map(_shape, wanted.shapes)), dict(map(_value, wanted.values))
    events = RunEvents(on_stored=stored)
    with api.open_work(session_id, model="", output=wanted.output, events=events) as work:
        work.start_workers()
        imported = api.import_model(
            wanted.name or file.stem,
            file,
            batch=wanted.batch,
            shapes=shapes,
            values=values,
            work=work,
        )
        show_import(imported)
        name = f"{imported.model.name}@{imported.model.version}"
        if not work.own:
            say(f"by the workers of session {session_id}: {work.environment}")
        where = f"; kernels for {of_all()} (--cores)" if work.runs_here else ""
        latency, tuned = None, None
        builds_only = wanted.minutes == 0 and wanted.output is not None
        if wanted.target_ms is not None:
            latency = api.Latency(wanted.target_ms, arguments["checks"])
        elif not builds_only:  # which checks it
            with _progress(work, "checking"):
                checked = api.check_model(name, work=work, **arguments)
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

        if wanted.minutes == 0 and latency is None:
            say(f"no task is measured (--minutes 0){where}")
        else:
            with _progress(work, "tuning"):
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
            with _progress(work, "building"):
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


def show_import(imported: api.ImportedModel) -> None:
    """Print what an import found."""
    found, tasks = imported.model, imported.model.manifest.tasks
    cores = [task for task in tasks if task.task.core is not None]
    calls = counted(sum(task.count for task in tasks), "call")
    say(
        f"{found.name} {found.version[:12]}: {calls} of {counted(len(tasks), 'task')},"
        f" {len(cores)} of them convolutions and products;"
        f" {counted(imported.added, 'task is', 'tasks are')} new"
    )


def show_built(built: api.BuiltModel) -> None:
    """Print how good a built model is, and where its kernels come from."""
    print_table(
        ("kernels", "tasks", "of the time"),
        [
            *(
                (str(kind), built.tasks[kind], f"{100 * built.shares.get(kind, 0.0):.1f} %")
                for kind in built.tasks
            ),
            ("runtime", "", f"{100 * built.runtime_share:.1f} %"),
        ],
        right=(1, 2),
    )
    for label, reason in built.refused.items():
        say(f"the record of {label} could not be applied: {reason}", err=True)
    if built.compared:
        say(
            f"of {counted(built.compared, 'task')} the fastest kernels were compared inside the"
            " model"
        )
    ours = statistics.median(built.times_ms["tuna"])
    for name, times in built.times_ms.items():
        median = statistics.median(times)
        wall = statistics.median(built.wall_ms[name]) if name in built.wall_ms else None
        ratio = "" if name == "tuna" else f", this model takes {ours / median:.2f} of it"
        spread = f"({min(times):.2f} to {max(times):.2f})"
        if wall is None:
            say(f"{name}: {median:.2f} ms {spread} on {built.device}{ratio}")
        elif built.cores > 1:
            say(f"{name}: {median:.2f} ms {spread}, wall time of {built.cores} threads{ratio}")
        else:
            say(f"{name}: {median:.2f} ms of CPU time {spread}, wall {wall:.2f}{ratio}")
    if built.untuned_ms is not None:
        untuned, in_turn = built.untuned_ms
        say(
            f"untuned: {untuned:.2f} ms, in turn with which this model takes {in_turn:.2f} ms,"
            f" {in_turn / untuned:.2f} of it"
        )
    for name, reason in built.absent.items():
        say(f"{name}: {reason}")
    if built.cached:
        say(f"taken from the cache; built and timed {built.made_at}")
    errors = ", ".join(f"{error:.1e} against {what}" for what, error in built.errors.items())
    for line in filter(None, (built.remark, f"checked: {built.rule}", built.report)):
        say(line)
    say(
        f"{built.path}: built for {counted(built.cores, 'core')}; largest error over largest value"
        f" {errors}"
    )


def _as_json(built: api.BuiltModel) -> dict[str, Any]:
    names = (
        *("path", "tasks", "shares", "cores", "device", "times_ms", "wall_ms", "absent"),
        *("runtime_share", "functions_ms", "tuned_ms", "lookup_s", "errors", "remark", "refused"),
        *("rule", "report"),
        *("compared", "made_at", "cached", "untuned_ms"),
    )
    facts = {name: getattr(built, name) for name in names}
    return {"model": built.model.name, "version": built.model.version, **facts}


def _batches(text: str | None) -> list[int | None]:
    """The batches that are asked for; one of None where none is."""
    if text is None:
        return [None]
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) < 1 << 31 for part in parts):
        raise BadInput(f"{text!r} is not of the form 1,8.")
    return [int(part) for part in parts]


def _shape(text: str) -> tuple[str, list[int]]:
    name, mark, extents = text.rpartition("=")
    try:
        found = [int(extent) for extent in extents.split(",")]
    except ValueError:
        found = []
    if not mark or not name or not found or min(found) < 1:
        raise BadInput(f"{text!r} is not of the form input=1,3,224,224.")
    return name, found


def _value(text: str) -> tuple[str, list[float]]:
    name, mark, numbers = text.rpartition("=")
    words = {"true": 1.0, "false": 0.0}
    try:
        found = [
            words[word] if word in words else float(word) for word in numbers.lower().split(",")
        ]
    except ValueError:
        found = []
    if not mark or not name or not found:
        raise BadInput(f"{text!r} is not of the form sr=16000 or axes=1,2.")
    return name, found
