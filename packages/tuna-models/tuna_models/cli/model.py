"""`tuna model`: import models, see their tasks, build them."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from tuna.cli import options
from tuna.cli.console import ProgressView, print_json, print_table, say
from tuna.cli.groups import Group
from tuna.cli.report import NOISY, noisy_times
from tuna.common.files import atomic_file
from tuna.common.messages import counted, size
from tuna.configs.model import BF16_TOLERANCE
from tuna.configs.values import DataType
from tuna.errors import TunaError
from tuna_models import api
from tuna_models.cli.benchmark import benchmarks
from tuna_models.cli.file_check import check, show_whole_numbers, show_without_kernel
from tuna_models.cli.inputs import Inputs, batches_of
from tuna_models.manifest import Manifest


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
@options.collected(Inputs, into="inputs")
@click.option(
    "--session-id", type=options.ID, help="For the target of this session; default: this machine's."
)
@options.model_cores
def import_model(
    name: str, file: Path, batches: str | None, inputs: Inputs, session_id: int | None
) -> None:
    """Import the model FILE, ONNX or a .pt2 of torch.export, as NAME; its functions become tasks
    that can be tuned."""
    sizes, arguments = batches_of(batches), inputs.arguments()
    with api.open_work(session_id, model="") as work:
        for batch in sizes:
            named = name if len(sizes) < 2 else f"{name}-b{batch}"
            show_import(api.import_model(named, file, batch=batch, work=work, **arguments))


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
    """Show the tasks of a model: how often it calls each, its fastest kernel, and the share of this
    machine's peak that it reaches; and why a task has no kernel of Tuna's, or runs as scalars."""
    if workloads is not None:
        lines = [workload.text() for workload in api.model_workloads(name)]
        with atomic_file(workloads) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines))
        say(f"{workloads}: {counted(len(lines), 'task')}")
        return
    imported, tasks = api.show_model(name)
    checked = _checked(imported)
    shares = api.peak_shares(imported, tasks, checked)
    if as_json:
        print_json(api.tasks_document(imported, tasks, checked, shares))
        return
    rows = [
        (
            *(task.label, task.count, task.models),
            *((task.winner.solver, f"{task.winner.time_ms:.4f}") if task.winner else ("--", "--")),
            shares.get(task.label, "--"),
        )
        for task in tasks
    ]
    print_table(
        ("task", "calls", "other models", "fastest", "ms", "of the peak"),
        rows,
        (1, 2, 4),
        title=f"{imported.name} {imported.version[:12]}",
    )
    show_whole_numbers(imported.manifest.whole_numbers, imported.manifest.left_in_fp32)
    show_promise(imported.manifest)
    if checked is not None:
        show_without_kernel(checked)


def _checked(imported: api.StoredModel) -> api.FileCheck | None:
    """The check of an import; None where it cannot be made, which is said."""
    try:
        return api.check_import(f"{imported.name}@{imported.version}")
    except TunaError as error:
        say(f"Why tasks have no kernel is not known: {error}", err=True)
        return None


@dataclass(frozen=True)
class Kernels:
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
    max_error: float = options.option(
        "Largest error of a model in bf16, of the largest value of an answer; what would be further"
        " off stays in fp32. 1: nothing does.",
        type=options.POSITIVE,
        default=BF16_TOLERANCE,
    )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `api.build_model` and `api.check_model`."""
        checks = api.Checks(
            self.rivals,
            self.untuned,
            self.recorded,
            compare=self.compare,
            max_error=self.max_error,
        )
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
@options.collected(Kernels)
@options.built_cores
@options.as_json
def build(
    name: str,
    output: Path,
    session_id: int | None,
    golden: int | None,
    wanted: Kernels,
    as_json: bool,
) -> None:
    """Build a model with its fastest kernels, check its answer against ONNX's reference, and time
    it, by a job of its session."""
    with (
        api.open_work(session_id, model=name, output=output) as work,
        progress(work, "building"),
    ):
        built = api.build_model(
            name, output, session_id=session_id, golden=golden, work=work, **wanted.arguments()
        )
    if as_json:
        print_json(_as_json(built))
    else:
        show_built(built)


@contextlib.contextmanager
def progress(work: api.ModelWork, title: str) -> Iterator[None]:
    """Show what the workers do."""
    with (
        ProgressView(title) as view,
        work.showing(view.update, view.stopping, view.waiting, view.log_kept),
    ):
        yield


model.add_command(benchmarks)
model.add_command(check)


def show_import(imported: api.ImportedModel) -> None:
    """Print what an import found."""
    found, tasks = imported.model, imported.model.manifest.tasks
    cores = [task for task in tasks if task.task.core is not None]
    calls = counted(sum(task.count for task in tasks), "call")
    say(
        f"{found.name} {found.version[:12]}: {calls} of {counted(len(tasks), 'task')},"
        f" {len(cores)} of them convolutions, products and attention;"
        f" {counted(imported.additions.added, 'task is', 'tasks are')} new"
    )
    show_whole_numbers(found.manifest.whole_numbers, found.manifest.left_in_fp32)


def show_promise(
    manifest: Manifest, functions_ms: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Print what a model in bf16 leaves in fp32, and why; with its time in the model where that was
    measured."""
    promise = manifest.promise
    if promise is None:
        return
    cores = ((entry.task.core, entry.count) for entry in manifest.tasks)
    narrow = sum(count for core, count in cores if core and core.data_type is DataType.BF16)
    left, cost = promise.left, sum(each.cost for each in promise.left)
    say(
        f"{len(left)} of {len(left) + narrow} convolutions, products and attentions stay in fp32,"
        f" so that the error is {promise.max_error:g} at most: {promise.error:.1e} instead of"
        f" {promise.whole_error:.1e} with all in bf16 (--max-error 1);"
        f" by estimate they take {100 * cost:.1f} % longer for it"
    )
    for label, count in Counter(each.label for each in left).items():
        share = sum(each.cost for each in left if each.label == label)
        time = f", {functions_ms[label]:.3f} ms in the model" if label in functions_ms else ""
        say(f"in fp32: {count} x {label} (+{100 * share:.1f} %{time})")


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
    manifest = built.model.manifest
    show_whole_numbers(manifest.whole_numbers, manifest.left_in_fp32)
    show_promise(manifest, built.functions_ms)
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
        time = f"{median:.2f}{NOISY if name in built.noisy else ''} ms"
        if wall is None:
            say(f"{name}: {time} {spread} on {built.device}{ratio}")
        elif built.cores > 1:
            say(f"{name}: {time} {spread}, wall time of {built.cores} threads{ratio}")
        else:
            say(f"{name}: {time} of CPU time {spread}, wall {wall:.2f}{ratio}")
    if built.noisy:
        say(noisy_times(len(built.noisy)))
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
        *("rule", "report", "noisy"),
        *("compared", "made_at", "cached", "untuned_ms"),
    )
    facts = {name: getattr(built, name) for name in names}
    return {"model": built.model.name, "version": built.model.version, **facts}
