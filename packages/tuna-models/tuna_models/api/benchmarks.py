"""Models: time built ones on a board behind TVM RPC or on this machine, and list what was
measured."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuna.api import get_settings
from tuna.api.rows import ModelTime, benchmarks, networks, open_database, reading, writing
from tuna.configs.model import TOLERANCE
from tuna.errors import BadInput
from tuna.libraries.abilities import toolchain_of
from tuna.libraries.registry import get_library
from tuna.libraries.tvm.boards import Tracker
from tuna.sandbox.cores import measuring_with, usable_count
from tuna.workers.devices import device_for, measuring_on
from tuna_models import arguments
from tuna_models.arguments import Argument
from tuna_models.benchmarks import benchmark
from tuna_models.benchmarks.benchmark import BenchmarkDevice
from tuna_models.judging.checks import check_recorded

#: An error that stands for outputs that are not finite, or of another shape.
_NONE = sys.float_info.max
#: Lengths of columns.
_LABEL_CHARS, _FUNCTION_CHARS = 255, 128


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
    limit_s: float = 600.0  #: Seconds of one call of the board or the child, which is killed then
    memory_mib: int | None = None  #: Limit of all arguments; None: the memory that the board has


_OPTIONS = BenchmarkOptions()


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

    Without a board it runs on this machine's measuring cores, in a box. `options.inputs` are as
    `x=n,3:float32`, `p.0=2,3:float32` (of a tuple) or `s=n,4:shape`; by default those of
    `LIBRARY.json`. One may be an npz file, whose arrays are taken in the place of random ones.
    `options.shapes` give values to open extents. `on_fault` is told what is wrong with outputs
    of `against`, by the rules of the check of built models with those of `library` as the
    reference. Raises BadInput, naming an argument that does not fit; NotFound for an unknown device
    key; ServiceError for a board or tracker that does not answer.
    """
    files = {benchmark.digest(path): path for path in (library, *([against] if against else []))}
    if against and len(files) == 1:
        raise BadInput(f"{against.name} is the same library as {library.name}.")
    facts = [_facts(path, digest) for digest, path in files.items()]
    recorded, texts = _recorded(options.inputs)
    variables = _inputs_of(library, facts[0], texts)
    points = arguments.sweep(variables, options.shapes)
    labels = [path.name for path in files.values()]
    if len(set(labels)) < len(labels):
        labels = [str(path) for path in files.values()]
    engine = open_database()
    run = benchmarks.new_run()
    with _place(board, options, _cores(facts[0])) as (place, device):
        measured = benchmark.measure(
            place,
            dict(zip(labels, files.values(), strict=True)),
            benchmark.BenchmarkInputs(variables, options.seed, recorded, _tolerance(facts[0])),
            points,
            function=options.function,
            on_point=lambda number: on_point(number, len(points)),
        )
        with reading(engine) as connection:
            ids = [
                benchmarks.model_id(connection, str(fact.get("model")), str(fact.get("version")))
                for fact in facts
            ]
        for point in measured:
            for label, fault in point.faults.items():
                on_fault(f"{label}: {fault}")
            rows = [
                benchmarks.NewBenchmark(
                    model_id=model_id,
                    label=label[:_LABEL_CHARS],
                    artifact=artifact,
                    function=options.function[:_FUNCTION_CHARS],
                    tracker=board.tracker[:_LABEL_CHARS] if board else "",
                    device=f"{device}{f', emulated by {point.emulator}' if point.emulator else ''}"[
                        :_LABEL_CHARS
                    ],
                    extents=dict(point.extents),
                    inputs=" ".join(map(str, variables)),
                    time_ms=point.timings[label].time_ms,
                    low_ms=point.timings[label].low_ms,
                    high_ms=point.timings[label].high_ms,
                    repeats=len(point.timings[label].times_ms),
                    noisy=point.timings[label].noisy,
                    error=None if point.errors[label] >= _NONE else point.errors[label],
                )
                for label, artifact, model_id in zip(labels, files, ids, strict=True)
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
def _place(
    board: BenchmarkBoard | None, options: BenchmarkOptions, cores: int
) -> Iterator[tuple[BenchmarkDevice, str]]:
    """Where to run, and the name of the device; this machine is locked against other measurements
    meanwhile.

    On this machine on so many `cores`, where TUNA_EVAL_CPUS names none.
    """
    memory = None if options.memory_mib is None else options.memory_mib << 20
    library = get_library("tvm")
    if board is not None:
        toolchain_of(library)  # raises LibraryMissing
        tracker = Tracker.parse(board.tracker)
        yield (
            BenchmarkDevice(
                tracker,
                board.device_key,
                wait_s=board.wait_s,
                limit_s=options.limit_s,
                memory_bytes=memory,
            ),
            board.device_key,
        )
        return
    with (
        contextlib.nullcontext()
        if get_settings().eval_cpus
        else measuring_with(min(cores, usable_count()))
    ):
        device = device_for(library, get_settings())
        with measuring_on(device):
            yield (
                BenchmarkDevice(cpus=device.cpus, limit_s=options.limit_s, memory_bytes=memory),
                library.environment().device,
            )


def _facts(library: Path, sha256: str) -> Mapping[str, Any]:
    """Return the facts that `tuna model build` wrote beside a library, none where it wrote none;
    raises BadInput for a library of which they have another size or SHA-256: loading one that is
    cut off would end the process."""
    try:
        found = json.loads(Path(f"{library}.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    size_bytes = library.stat().st_size
    if found.get("size_bytes", size_bytes) != size_bytes:
        fault = f"has {size_bytes} bytes, and {found['size_bytes']} by {library.name}.json"
    elif found.get("sha256", sha256) != sha256:
        fault = f"has another SHA-256 than {library.name}.json says"
    else:
        return found
    raise BadInput(
        f"{library.name} {fault}: it is cut off or damaged, or the files are of two builds.",
        hint="copy both files again, or build the model again",
    )


def _tolerance(facts: Mapping[str, Any]) -> float:
    """The largest error of floating-point outputs by which a library was checked."""
    found = facts.get("tolerance")
    return found if isinstance(found, float) and 0.0 < found < 1.0 else TOLERANCE


def _cores(facts: Mapping[str, Any]) -> int:
    """The cores that a library is built for; one where nothing says it."""
    target = facts.get("target")
    number = target.get("num-cores", 1) if isinstance(target, dict) else 1
    return number if isinstance(number, int) and number > 0 else 1


def _recorded(inputs: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The npz file among the inputs, and the others; raises BadInput for several."""
    found = [text for text in inputs if text.endswith(".npz")]
    if len(found) > 1:
        raise BadInput(
            "There is one file of inputs at most.",
            hint="numpy.savez writes several arrays into one",
        )
    return (check_recorded(Path(found[0])) if found else None), [
        text for text in inputs if text not in found
    ]


def _inputs_of(library: Path, facts: Mapping[str, Any], texts: Sequence[str]) -> list[Argument]:
    """The inputs as `texts` say, else as the facts beside the library do, which also know what an
    input can take."""
    try:
        there = [(str(one.get("parameter") or one["name"]), one) for one in facts.get("inputs", [])]
        plain = [f"{name}={','.join(map(str, one['shape']))}:{one['dtype']}" for name, one in there]
        bounds = {
            name: (int(one["bounds"][0]), int(one["bounds"][1]))
            for name, one in there
            if one.get("bounds")
        }
        labels = {name: str(one["name"]) for name, one in there}
    except (TypeError, KeyError, ValueError, IndexError, AttributeError):
        raise BadInput(
            f"{library}.json is not as `tuna model build` writes it.", hint="give --input"
        ) from None
    given = map(arguments.parse, texts or plain)
    return [
        replace(one, bounds=bounds.get(one.name), label=labels.get(one.name, "")) for one in given
    ]
