"""Models: time built ones on a board behind TVM RPC or on this machine, and list what was
measured."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tuna.api import changed_settings, get_settings, measure_built
from tuna.api.rows import ModelTime, benchmarks, networks, open_database, reading, writing
from tuna.common.files import open_plain, read_errors
from tuna.common.messages import last_line
from tuna.configs.model import TOLERANCE, WholeModelConfig
from tuna.errors import BadInput, LibraryMissing, ServiceError
from tuna.libraries.boards import WorkerBoards, installed_boards
from tuna.libraries.items import Candidate, StepResult, Trial, WorkItem
from tuna.libraries.repeats import timing
from tuna.libraries.tvm.boards import Tracker
from tuna.libraries.tvm.library import TvmLibrary
from tuna.libraries.tvm.model_answers import Answers, Case
from tuna.libraries.tvm.solvers import MODEL
from tuna.sandbox.cores import measuring_with, usable_count
from tuna.vocabulary import Cause
from tuna_models import arguments
from tuna_models.arguments import Argument
from tuna_models.judging import inputs
from tuna_models.judging.checks import check_recorded

#: Names of the libraries in `Answers.call`.
_ROLES = ("library", "against")
#: Copies of the inputs on this machine: as drawn, in a file, and in the process that sends them.
_COPIES = 3


@dataclass(frozen=True)
class BenchmarkBoard:
    """A board behind a TVM RPC tracker."""

    tracker: str  #: HOST:PORT
    device_key: str
    wait_s: float = 60.0  #: Seconds to wait for it to be free


@dataclass(frozen=True)
class BenchmarkOptions:
    """Inputs and limits of a timing of models."""

    inputs: Sequence[str] = ()  #: `x=n,3:float32`, `s=n,4:shape`; empty: those of LIBRARY.json
    shapes: Sequence[str] = ()  #: Values for open extents: `n=1,4,8`
    function: str = "main"
    seed: int = 0  #: Seed of the random inputs
    limit_s: float = 600.0  #: Seconds in which the models must be loaded, compared and timed
    memory_mib: int | None = None  #: Limit of all arguments; None: the memory that the board has


_OPTIONS = BenchmarkOptions()


@dataclass(frozen=True)
class _Library:
    """A library that is timed."""

    path: Path
    label: str
    data: bytes
    facts: Mapping[str, Any]  #: facts that `tuna model build` wrote beside it; empty: none

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of its bytes."""
        return hashlib.sha256(self.data).hexdigest()


def benchmark_model(
    library: Path,
    board: BenchmarkBoard | None = None,
    *,
    against: Path | None = None,
    options: BenchmarkOptions = _OPTIONS,
    on_point: Callable[[int, int], None] = lambda number, points: None,
    on_fault: Callable[[str], None] = lambda sentence: None,
) -> list[ModelTime]:
    """Run a built model, and `against` in turn with it in the same session, and time both; the rows
    that were stored.

    It is a job of the kind `model` whose library is there already, worked on by this process.
    Without a board it runs on this machine's measuring cores, in a box. `options.inputs` are as
    `x=n,3:float32`, `p.0=2,3:float32` (of a tuple) or `s=n,4:shape`; by default those of
    `LIBRARY.json`. One may be an npz file, whose arrays are taken in the place of random ones.
    `options.shapes` give values to open extents. `on_fault` is told what is wrong with outputs
    of `against`, by the rules of the check of built models with those of `library` as the
    reference. Raises BadInput, naming an argument that does not fit; NotFound for an unknown device
    key; ServiceError for a board or tracker that does not answer.
    """
    paths = [library, *([against] if against else [])]
    same_name = len({path.name for path in paths}) < len(paths)
    libraries = [read_library(path, str(path) if same_name else path.name) for path in paths]
    first, other = libraries[0], libraries[-1]
    if against and first.data == other.data:
        raise BadInput(f"{against.name} is the same library as {library.name}.")
    recorded, texts = _recorded(options.inputs)
    variables = _inputs_of(first, texts)
    points = arguments.sweep(variables, options.shapes)
    calls = [_call(libraries, options, recorded, variables, extents) for extents in points]
    engine, run = open_database(), benchmarks.new_run()
    with reading(engine) as connection:
        ids = [
            benchmarks.model_id(
                connection, str(each.facts.get("model")), str(each.facts.get("version"))
            )
            for each in libraries
        ]
    with contextlib.ExitStack() as stack:
        tuned, device = stack.enter_context(_opened(board, first.facts))
        items = [_item(tuned, libraries, call, options) for call in calls]
        given = [*(each.data for each in libraries), *calls]
        measured = stack.enter_context(contextlib.closing(measure_built(tuned, items, given)))
        for number, extents in enumerate(points):
            on_point(number, len(points))
            trial = _trial(next(measured), first.label, device if board else "this machine")
            if trial.max_error is None or trial.max_error > _tolerance(first.facts):
                on_fault(f"{other.label}: {trial.output_tail.removeprefix('the ')}")
            rows = [
                benchmarks.NewBenchmark(
                    model_id=model_id,
                    label=each.label,
                    artifact=each.digest,
                    function=options.function,
                    tracker=board.tracker if board else "",
                    device=device,
                    extents=dict(extents),
                    inputs=" ".join(map(str, variables)),
                    time_ms=timed.time_ms,
                    low_ms=timed.low_ms,
                    high_ms=timed.high_ms,
                    repeats=len(timed.times_ms),
                    noisy=timed.noisy,
                    error=0.0 if each is first else trial.max_error,
                )
                for each, model_id, times_ms in zip(
                    libraries, ids, [trial.times_ms, tuple(trial.parts.values())], strict=False
                )
                for timed in [timing(times_ms, trial.clock)]
            ]
            with writing(engine) as connection:  # what was measured stays if a later point fails
                benchmarks.store(connection, run, rows)
    with reading(engine) as connection:
        return benchmarks.of_run(connection, run)


def list_benchmarks(model: str | None = None) -> list[ModelTime]:
    """The times of whole models, or of runs with the imports `NAME` or `NAME@VERSION`, the latest
    last. Raises NotFound."""
    with reading(open_database()) as connection:
        return benchmarks.of_models(
            connection, None if model is None else networks.ids_of(connection, model)
        )


@contextlib.contextmanager
def _opened(
    board: BenchmarkBoard | None, facts: Mapping[str, Any]
) -> Iterator[tuple[TvmLibrary, str]]:
    """TVM on the board or on this machine, and the name of the device.

    On this machine on as many cores as `facts` say of a library, where TUNA_EVAL_CPUS names none.
    """
    said = facts.get("target")
    target = said if isinstance(said, dict) else {}
    if board is None:
        cores = target.get("num-cores", 1)
        cores = cores if isinstance(cores, int) and cores > 0 else 1
        with (
            contextlib.nullcontext()
            if get_settings().eval_cpus
            else measuring_with(min(cores, usable_count()))
        ):
            tuned = TvmLibrary()
            yield tuned, tuned.environment().device
        return
    boards, tracker = installed_boards(), Tracker.parse(board.tracker)
    named = WorkerBoards(board.tracker, board.device_key, json.dumps(target) if target else "")
    with changed_settings(boards.worker_settings(named, "")):
        tracker.await_board(board.device_key, board.wait_s)
        tuned = TvmLibrary(boards)
        try:
            emulator = tuned.environment().flags.get("emulator")
        except LibraryMissing as error:
            raise ServiceError(str(error), hint=error.hint) from error
        yield tuned, f"{board.device_key}{f', emulated by {emulator}' if emulator else ''}"


def _item(
    tuned: TvmLibrary, libraries: Sequence[_Library], call: bytes, options: BenchmarkOptions
) -> WorkItem:
    """The job of a model whose candidate is the first library, with the `call` of `_call`."""
    first, other, target = libraries[0], libraries[-1], tuned.environment().target
    digest = hashlib.sha256(call).hexdigest()
    config = WholeModelConfig(first.label, target, first.digest, other.digest, digest)
    return WorkItem(
        job_id=1,
        attempt=1,
        session_id=0,
        library=tuned.name,
        step=tuned.steps[-1].name,
        solver=MODEL.name,
        config=config.to_json(),
        data=config.data_digests,
        target=target,
        options={"candidates": 1, "finalists": 0, "measure_timeout_s": options.limit_s},
        candidates=(Candidate(index=0, artifact=first.digest),),
    )


def _trial(result: StepResult, label: str, device: str) -> Trial:
    """The measurement; raises BadInput for a library or argument that does not fit, ServiceError
    for a device that does not answer."""
    if result.ok:
        return result.trials[0]
    said = last_line(result.output_tail)
    if result.cause in (Cause.DEVICE_LOST, Cause.RUN_TIMEOUT):
        raise ServiceError(f"{device} did not answer: {said}.")
    _, is_input, text = said.partition(f"{BadInput.__name__}: ")
    raise BadInput(text if is_input else f"{label} cannot be run on {device}: {said}.")


def _call(
    libraries: Sequence[_Library],
    options: BenchmarkOptions,
    recorded: Path | None,
    variables: Sequence[Argument],
    extents: Mapping[str, int],
) -> bytes:
    """The file of `Answers.call` with these extents; raises BadInput for inputs that need more
    memory than there is, before they are made."""
    generator, arrays = np.random.default_rng(options.seed), list[Any]()
    _check_memory(variables, extents, options.memory_mib)

    def placed(one: Argument) -> Any:
        shape = one.shape(extents)
        if recorded is not None and (one.place or one.type == arguments.SHAPE):
            text = f"The input {one.name} is a tuple or a shape, which no file of arrays has."
            raise BadInput(text)
        if one.type == arguments.SHAPE:
            arrays.append(np.array(shape, np.int64))
            return {"shape": len(arrays) - 1}
        if recorded is None:
            arrays.append(inputs.draw(one.type, shape, one.bounds, generator))
        else:
            name = one.label or one.name
            array = {"name": name, "dtype": one.type, "shape": shape}
            arrays.append(inputs.read([array], recorded)[name])
        return len(arrays) - 1

    call = {
        "function": options.function,
        "arguments": arguments.tree(variables, placed),
        "labels": {role: each.label for role, each in zip(_ROLES, libraries, strict=False)},
    }
    with tempfile.NamedTemporaryFile() as file:
        path = Path(file.name)
        Answers([Case(arrays, ())], _tolerance(libraries[0].facts), call).write(path)
        return path.read_bytes()


def _check_memory(
    variables: Sequence[Argument], extents: Mapping[str, int], memory_mib: int | None
) -> None:
    """Raise BadInput for inputs that need more than they may take on the device, or than this
    machine has left (MemAvailable of proc(5))."""
    sizes = (math.prod(one.shape(extents)) for one in variables)
    kinds = (8 if one.type == arguments.SHAPE else np.dtype(one.type).itemsize for one in variables)
    needed = sum(size * kind for size, kind in zip(sizes, kinds, strict=True))
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    for limit, place in (
        (None if memory_mib is None else memory_mib << 20, "may take on the board"),
        ((int(lines["MemAvailable"].split()[0]) << 10) // _COPIES, "can have on this machine"),
    ):
        if limit is not None and needed > limit:
            raise BadInput(
                f"The inputs need {needed / 1e9:.2f} GB, and {place} {limit / 1e9:.2f} GB."
            )


def read_library(path: Path, label: str = "") -> _Library:
    """Read a library; raises BadInput for a file that is none or unreadable, and for one of which
    the facts beside it have another size or SHA-256: loading one that is cut off would end the
    process."""
    with read_errors(path), open_plain(path) as file:
        data = file.read()
    if not data.startswith(b"\x7fELF"):
        raise BadInput(
            f"{path} is not a shared library.", hint="`tuna model build NAME -o MODEL.so` makes one"
        )
    facts: Any = {}
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads(Path(f"{path}.json").read_text())
    library = _Library(path, label, data, facts if isinstance(facts, dict) else {})
    if library.facts.get("size_bytes", len(data)) != len(data):
        fault = f"has {len(data)} bytes, and {library.facts['size_bytes']} by {path.name}.json"
    elif library.facts.get("sha256", library.digest) != library.digest:
        fault = f"has another SHA-256 than {path.name}.json says"
    else:
        return library
    raise BadInput(
        f"{path.name} {fault}: it is cut off or damaged, or the files are of two builds.",
        hint="copy both files again, or build the model again",
    )


def _tolerance(facts: Mapping[str, Any]) -> float:
    """The largest error of floating-point outputs by which a library was checked."""
    tolerance = facts.get("tolerance")
    return tolerance if isinstance(tolerance, float) and 0.0 < tolerance < 1.0 else TOLERANCE


def _recorded(texts: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The npz file among the inputs, and the others; raises BadInput for several."""
    files = [text for text in texts if text.endswith(".npz")]
    if len(files) > 1:
        raise BadInput(
            "There is one file of inputs at most.",
            hint="numpy.savez writes several arrays into one",
        )
    return (check_recorded(Path(files[0])) if files else None), [
        text for text in texts if text not in files
    ]


def _inputs_of(library: _Library, texts: Sequence[str]) -> list[Argument]:
    """The inputs as `texts` say, else as the facts beside the library do, which also know what an
    input can take."""
    known = dict[str, Argument]()
    try:
        for one in library.facts.get("inputs", []):
            name, shape = one.get("parameter") or one["name"], ",".join(map(str, one["shape"]))
            bounds = one.get("bounds")
            known[str(name)] = replace(
                arguments.parse(f"{name}={shape}:{one['dtype']}"),
                bounds=(int(bounds[0]), int(bounds[1])) if bounds else None,
                label=str(one["name"]),
            )
    except (TypeError, KeyError, ValueError, IndexError, AttributeError):
        raise BadInput(
            f"{library.path}.json is not as `tuna model build` writes it.", hint="give --input"
        ) from None
    return [
        replace(one, bounds=known[one.name].bounds, label=known[one.name].label)
        if one.name in known
        else one
        for one in map(arguments.parse, texts)
    ] or list(known.values())
