"""Models: build one with the kernels that won, checked and timed by a job of its session."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tuna.api.golden import find
from tuna.api.rows import benchmarks, open_database, reading, writing
from tuna.common.files import atomic_file
from tuna.errors import BadInput
from tuna.libraries.repeats import timing
from tuna_models.judging.checks import Checks, Imprecise
from tuna_models.manifest import Class
from tuna_models.work import known_kernels
from tuna_models.work.checked_build import Build, BuildFacts
from tuna_models.work.known_kernels import Winner
from tuna_models.work.model_job import MeasuredModel
from tuna_models.work.promises import keep_error
from tuna_models.work.session import ModelWork, find_model, open_work, planned_for
from tuna_models.work.store import StoredModel

#: Parts of a measured model: its run as a whole, and TVM's of it (`whole_models`).
_TIMED, _UNTUNED = "timed_0", "untuned"
_CHECKS = Checks()
_Built = TypeVar("_Built")
#: Builds of a model in bf16 that may be beyond its bound, each with more in fp32
_ATTEMPTS = 3


@dataclass(frozen=True)
class BuiltModel:
    """A built model as it was checked and timed on a device of its session's environment."""

    path: Path
    model: StoredModel
    #: Largest errors, relative to the largest magnitude, against ONNX's `reference` and others
    errors: Mapping[str, float]
    #: Times by contender, this model is `tuna`: repeats of its measurement; if others took part,
    #: rounds in turn, in CPU time of the thread, of several threads in wall time
    times_ms: Mapping[str, Sequence[float]]
    wall_ms: Mapping[str, Sequence[float]]  #: Wall time of the rounds in turn
    noisy: Sequence[str]  #: Contenders that were timed while the device was not quiet
    device: str  #: Device that it was timed on
    absent: Mapping[str, str]  #: contenders that did not take part, and why
    remark: str  #: Fault of the reference; empty where there was none
    rule: str  #: Rule of the comparison, in one line
    tolerance: float  #: Largest error of floating-point outputs by that rule
    report: str  #: how many whole numbers differ within their rules
    tasks: Mapping[Class, int]
    shares: Mapping[Class, float]  #: Shares of the time, by the source of kernels
    runtime_share: float  #: Share of TVM's virtual machine and allocation
    functions_ms: Mapping[str, float]  #: Times by label, all calls together
    tuned_ms: Mapping[str, float]  #: the same as measured alone, of tasks that have such a result
    compared: int  #: tasks of which several kernels were timed inside the model
    made_at: str  #: Time of the build, check and timing, also of a cached one
    cached: bool
    lookup_s: float  #: Seconds of the search for results of its tasks
    cores: int = 1  #: Number of cores that it is built for
    cpu_flags: Sequence[str] = ()  #: Flags of /proc/cpuinfo without which a CPU cannot run it
    #: records that could not be applied, by task label
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Times of TVM's model without tuning, and of this model in turn with it
    untuned_ms: tuple[float, float] | None = None

    @property
    def time_ms(self) -> float:
        """The median of its times."""
        return statistics.median(self.times_ms["tuna"])


@dataclass(frozen=True)
class CheckedModel:
    """A model whose answer is right."""

    model: StoredModel  #: The import that was checked: in bf16 the one that keeps the error
    error: float  #: Largest error of an output, relative to its largest magnitude
    rule: str  #: Rule of the comparison, in one line
    report: str  #: how many whole numbers differ within their rules
    remark: str  #: what was wrong with the reference, empty where nothing was


def build_model(
    name: str,
    output: Path,
    *,
    session_id: int | None = None,
    golden: int | None = None,
    winograd: bool = True,
    checks: Checks = _CHECKS,
    work: ModelWork | None = None,
) -> BuiltModel:
    """Build an imported model into the shared library `output`; it is only there if it is right.

    It is built for the target of the session's environment, by default this machine and as many
    cores as it was imported for, and checked and timed there. Kernels are the winners of the
    session, of the golden version, or of all sessions for this target; else those of similar tasks;
    else predicted. With `checks.compare` the fastest few of each task are timed inside the
    model. A build
    of the same model and records that was made before is taken as it is. `work`: where it is done,
    if that is open already.

    Raises NotFound, and BadInput if the answer is wrong by the rules of
    `tuna_models/judging/right_answers.py`.
    """
    if session_id is not None and golden is not None:
        raise BadInput("Kernels come from a session or from a golden version, not from both.")
    with _opened(work, name, session_id, output) as opened:

        def run(model: StoredModel) -> tuple[BuildFacts, Mapping[str, Sequence[Winner]], float]:
            manifest = planned_for(model.manifest, opened)
            with reading(open_database()) as connection:
                release = None if golden is None else find(connection, golden, "tvm").id
                source = opened.scope(winograd=winograd, session_id=session_id, golden_id=release)
                started = time.perf_counter()
                known = known_kernels.finalists(connection, manifest, source)
                alike = known_kernels.nearest(connection, manifest, source, known)
                lookup_s = time.perf_counter() - started
            records = {
                key: [(winner.solver, winner.params, False) for winner in winners]
                for key, winners in known.items()
            }
            records |= {key: [(one.solver, one.params, True)] for key, one in alike.items()}
            with opened.workspace.new_folder() as folder:
                temporary = Path(folder) / "new.so"
                facts = Build(opened, model, manifest, records, winograd, checks).run(temporary)
                _move(temporary, output)
            return facts, known, lookup_s

        model, (facts, known, lookup_s) = _kept(find_model(name, opened), opened, checks, run)
        manifest = planned_for(model.manifest, opened)
    built = _described(output, model, facts, known, lookup_s=lookup_s, cores=manifest.cores)
    if not facts.cached:
        _store_time(built, facts.verdict.measured)
    target = json.loads(manifest.target)
    with atomic_file(Path(f"{output}.json")) as temporary:
        temporary.write_text(json.dumps(_for_programs(built, target), indent=1) + "\n")
    return built


def check_model(
    name: str,
    *,
    session_id: int | None = None,
    winograd: bool = True,
    checks: Checks = _CHECKS,
    work: ModelWork | None = None,
) -> CheckedModel:
    """Build an imported model with predicted kernels and check it as `build_model` does. Nothing is
    written.

    What cannot be built is so refused before anything is tuned. Raises what `build_model` raises.
    """
    with _opened(work, name, session_id) as opened, opened.workspace.new_folder() as folder:
        checks = replace(checks, untuned=False)

        def run(model: StoredModel) -> BuildFacts:
            manifest = planned_for(model.manifest, opened)
            return Build(opened, model, manifest, {}, winograd, checks).run(Path(folder) / "new.so")

        model, facts = _kept(find_model(name, opened), opened, checks, run)
    error, verdict = next(iter(facts.errors.values())), facts.verdict
    return CheckedModel(model, error, verdict.rule, verdict.report, facts.remark)


def _kept(
    model: StoredModel,
    work: ModelWork,
    checks: Checks,
    run: Callable[[StoredModel], _Built],
) -> tuple[StoredModel, _Built]:
    """Build a model by `run`, as the import that keeps the error of bf16; one that does not after
    all leaves more in fp32."""
    model = keep_error(model, work, checks)
    for _ in range(_ATTEMPTS):
        try:
            return model, run(model)
        except Imprecise as error:
            wider = keep_error(model, work, checks, built_error=error.error)
            if wider.version == model.version:
                raise
            model = wider
    return model, run(model)


@contextlib.contextmanager
def _opened(
    work: ModelWork | None, name: str, session_id: int | None, output: Path | None = None
) -> Iterator[ModelWork]:
    """The work, or one in the session for as many cores as the model was imported for."""
    with contextlib.ExitStack() as stack:
        yield work or stack.enter_context(open_work(session_id, model=name, output=output))


def _move(library: Path, output: Path) -> None:
    """Move a library to its place, at once."""
    try:
        library.replace(output)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        with atomic_file(output) as temporary:
            shutil.copyfile(library, temporary)


def _described(
    output: Path,
    model: StoredModel,
    facts: BuildFacts,
    known: Mapping[str, Sequence[Winner]],
    *,
    lookup_s: float,
    cores: int,
) -> BuiltModel:
    plan, verdict, compared = facts.plan, facts.verdict, facts.compared
    labels = {entry.task.key: entry.task.label for entry in model.manifest.tasks}
    parts_ms = verdict.measured.parts_ms
    spent: dict[Class, float] = defaultdict(float)
    by_label: dict[str, float] = defaultdict(float)
    tuned: dict[str, float] = defaultdict(float)
    for function, calls in plan.calls.items():
        key, kind, ms = plan.task_of(function), plan.class_of(function), parts_ms.get(function, 0.0)
        spent[kind] += ms
        by_label[labels.get(key, function)] += ms
        if kind is Class.EXACT and key in known:
            chosen = compared[key].chosen if key in compared else 0
            alone_ms = (
                known[key][chosen].time_ms
                if chosen is not None
                else min(compared[key].times_ms) / calls
            )
            tuned[labels[key]] += calls * alone_ms
    whole_ms = max(parts_ms[_TIMED], sum(spent.values())) or 1.0
    # functions of no task are one row
    kinds = {plan.task_of(function): plan.class_of(function) for function in plan.calls}
    numbers = Counter(kinds.values())
    in_turn = (parts_ms[_UNTUNED], parts_ms[_TIMED]) if _UNTUNED in parts_ms else None
    rounds = facts.contenders.times_ms
    noisy = [name for name, times in rounds.items() if timing(times, "").noisy]
    return BuiltModel(
        path=output,
        model=model,
        errors=facts.errors,
        times_ms=rounds or {"tuna": verdict.measured.times_ms},
        wall_ms=facts.contenders.wall_ms,
        noisy=noisy if rounds else ["tuna"] * verdict.measured.noisy,
        device=verdict.measured.device,
        absent=facts.contenders.absent,
        remark=facts.remark,
        rule=verdict.rule,
        tolerance=verdict.tolerance,
        report=verdict.report,
        tasks={kind: numbers[kind] for kind in Class if kind in numbers},
        shares={kind: ms / whole_ms for kind, ms in spent.items()},
        runtime_share=1.0 - sum(spent.values()) / whole_ms,
        functions_ms=dict(sorted(by_label.items(), key=lambda entry: -entry[1])),
        tuned_ms=dict(tuned),
        compared=len(compared),
        made_at=facts.made_at,
        cached=facts.cached,
        lookup_s=lookup_s,
        cores=cores,
        cpu_flags=plan.cpu_flags,
        refused={labels.get(key, key): reason for key, reason in plan.refused_records.items()},
        untuned_ms=in_turn,
    )


def _store_time(built: BuiltModel, measured: MeasuredModel) -> None:
    """Add the model's time to those of whole models."""
    engine = open_database()
    with reading(engine) as connection:
        model_id = benchmarks.model_id(connection, built.model.name, built.model.version)
    row = benchmarks.NewBenchmark(
        model_id=model_id,
        label=built.path.name,
        artifact=hashlib.sha256(built.path.read_bytes()).hexdigest(),
        function="main",
        tracker="",
        device=built.device,
        extents={},
        inputs=" ".join(
            f"{value.name}={','.join(map(str, value.shape))}:{value.dtype}"
            for value in built.model.manifest.inputs
        ),
        time_ms=measured.time_ms,
        low_ms=measured.low_ms,
        high_ms=measured.high_ms,
        repeats=len(measured.times_ms),
        noisy=measured.noisy,
        error=next(iter(built.errors.values())),
    )
    with writing(engine) as connection:
        benchmarks.store(connection, benchmarks.new_run(), [row])


def _for_programs(built: BuiltModel, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that stand beside the library, for programs that load it."""
    library = built.path.read_bytes()
    return {
        "model": built.model.name,
        "version": built.model.version,
        "size_bytes": len(library),
        "sha256": hashlib.sha256(library).hexdigest(),
        "inputs": [value.model_dump(mode="json") for value in built.model.manifest.inputs],
        "target": target,
        "precision": str(built.model.manifest.precision),
        "cpu_flags": list(built.cpu_flags),
        "tvm": built.model.manifest.tvm,
        "errors": dict(built.errors),
        "tolerance": built.tolerance,
        "tasks": {str(kind): count for kind, count in built.tasks.items()},
    }
