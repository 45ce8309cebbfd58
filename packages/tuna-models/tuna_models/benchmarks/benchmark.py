"""Times built models on a board behind TVM RPC, or in a sandbox on this machine."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuna.common.files import open_plain
from tuna.common.messages import first_fault
from tuna.configs.model import TOLERANCE
from tuna.errors import BadInput, ServiceError
from tuna.libraries.repeats import Timing, timing
from tuna.libraries.tvm.boards import Tracker
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildFailed, ChildFault, ChildTimeout, child_env
from tuna_models import arguments
from tuna_models.arguments import Argument
from tuna_models.limits import ModelLimits
from tuna_models.process import accepted

#: Rounds in which each model is timed once: enough for a 95 % interval without the ends.
ROUNDS = 11
#: Seconds for which a round runs a model.
_ROUND_S = 0.1
#: Beyond the wait for a board: the start of the child, with TVM's import.
_START_S = 60.0


@dataclass(frozen=True)
class BenchmarkDevice:
    """A device that runs models: a board, by its tracker and device key, or this machine."""

    tracker: Tracker | None = None
    device_key: str = ""
    cpus: Sequence[int] = ()  #: Cores of this machine, also for the client of a board
    wait_s: float = 60.0  #: Seconds to wait for a free board
    limit_s: float = 600.0  #: Seconds that one call may take
    memory_bytes: int | None = None  #: Limit of all arguments; None: the board's free memory

    def __str__(self) -> str:
        return f"{self.device_key} at {self.tracker}" if self.tracker else "this machine"


@dataclass(frozen=True)
class BenchmarkPoint:
    """Measurements with one set of open extents, by label of the model."""

    extents: Mapping[str, int]
    timings: Mapping[str, Timing]
    errors: Mapping[str, float]  #: largest error against the first model, relative to its magnitude
    faults: Mapping[str, str]  #: fault of the outputs; only of models that have one
    outputs: Sequence[Sequence[int]]  #: shapes of the outputs
    emulator: str = ""  #: Name of the board's emulator, whose times are not a real device's


class _Answer(BaseModel):
    """An answer of the child, which a model or a board may have forged."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Opened(_Answer):
    emulator: str


class _Loaded(_Answer):
    parameters: list[str]


class _Checked(_Answer):
    pass


class _Ran(_Answer):
    errors: dict[str, Annotated[float, Field(ge=0)]]
    faults: dict[str, Annotated[str, Field(max_length=arguments.FAULT_CHARS)]]
    outputs: list[list[int]]


class _Timed(_Answer):
    times_ms: dict[str, Annotated[float, Field(gt=0)]]


_Found = TypeVar("_Found", bound=_Answer)


class BenchmarkProcess:
    """A child with one session on the board; ended by `close`, and the board is free again."""

    def __init__(
        self, place: BenchmarkDevice, models: Sequence[Path], recorded: Path | None = None
    ) -> None:
        """`models` are the libraries that may be loaded, `recorded` a file of inputs."""
        self._recorded = None if recorded is None else recorded.resolve()
        self._place = place
        names = ("TVM_NUM_THREADS", "OMP_NUM_THREADS")
        variables = dict.fromkeys(names, str(len(place.cpus) or 1)) | {"TVM_BIND_THREADS": "0"}
        self._home = TemporaryDirectory(prefix="tuna-", ignore_cleanup_errors=True)
        box = Box(
            writable=(Path(self._home.name),),
            readable=[path.resolve() for path in (*models, *([recorded] if recorded else []))],
            network=place.tracker is not None,
        )
        self._limits = ModelLimits.of_settings()
        self._child = Child(
            "tuna_models.benchmarks.benchmark_child",
            env=child_env(variables),
            cpus=place.cpus,
            box=box,
            cwd=self._home.name,
            limits=self._limits.resources,
        )

    def open(self, function: str, lease_s: float) -> str:
        """Take the board; return its emulator, if it has one."""
        place = self._place
        return self._call(
            _Opened,
            "open",
            place.wait_s + _START_S,
            tracker=None if place.tracker is None else [place.tracker.host, place.tracker.port],
            key=place.device_key,
            wait_s=place.wait_s,
            memory_bytes=place.memory_bytes,
            lease_s=lease_s,
            function=function,
        ).emulator

    def load(self, label: str, path: Path) -> list[str]:
        """Load a library as the model `label`; return its function's parameter names."""
        return self._call(_Loaded, "load", path=str(path.resolve()), label=label).parameters

    def check(self, tree: Mapping[str, Any], order: Sequence[str]) -> None:
        """Raise BadInput if inputs, as `arguments.tree` returns them, do not fit."""
        self._call(_Checked, "check", arguments=tree, order=order)

    def run(
        self, tree: Mapping[str, Any], order: Sequence[str], seed: int, tolerance: float
    ) -> _Ran:
        """Run each model once on the inputs of `tree`; `order` are the parameters' names."""
        return self._call(
            _Ran,
            "run",
            arguments=tree,
            order=order,
            seed=seed,
            recorded=str(self._recorded or ""),
            tolerance=tolerance,
        )

    def time(self, numbers: Mapping[str, int]) -> dict[str, float]:
        """Return the mean milliseconds of a run of each model, run this number of times."""
        found = self._call(_Timed, "time", numbers=numbers).times_ms
        if found.keys() != numbers.keys():
            raise _not_valid(self._place, "times of other models than those asked for")
        return found

    def _call(
        self, kind: type[_Found], op: str, limit_s: float | None = None, **request: Any
    ) -> _Found:
        """Return the child's answer; raises its refusal, or ServiceError for no valid answer."""
        limit_s = limit_s or self._place.limit_s
        try:
            return kind.model_validate(accepted(self._child.call({"op": op, **request}, limit_s)))
        except ValidationError as error:
            raise _not_valid(self._place, first_fault(error.errors())) from error
        except ChildTimeout as error:
            raise ServiceError(f"{self._place} did not answer within {limit_s:g} s.") from error
        except ChildFault as error:
            what = f"The process that runs models on {self._place}"
            if refusal := self._limits.refusal(what, error, len(self._place.cpus) or 1):
                raise refusal from error
            if isinstance(error, ChildFailed):
                reason = str(error).splitlines()[0]  # TVM's traceback follows
                raise BadInput(f"The models cannot be run on {self._place}: {reason}") from error
            lines = error.tail.strip().splitlines()
            # on this machine a model itself may have crashed it
            fault = BadInput if self._place.tracker is None else ServiceError
            raise fault(f"{what} ended: {error}.", hint=lines[-1] if lines else "") from error

    def close(self) -> None:
        """End the child, and its session with it."""
        self._child.close()
        self._home.cleanup()


@dataclass(frozen=True)
class BenchmarkInputs:
    """Arguments of the models, and the source of their values."""

    arguments: Sequence[Argument]
    seed: int = 0
    recorded: Path | None = None  #: npz file; None: random values
    tolerance: float = TOLERANCE  #: Largest relative error of floating-point outputs


def measure(
    place: BenchmarkDevice,
    models: Mapping[str, Path],
    inputs: BenchmarkInputs,
    points: Sequence[Mapping[str, int]],
    *,
    function: str = "main",
    on_point: Callable[[int], None] = lambda number: None,
) -> Iterator[BenchmarkPoint]:
    """Run and time the models, libraries by label, in turn at each point, in one session.

    Raises BadInput for an argument that does not fit, with its name, and ServiceError for a board
    that does not answer.
    """
    if place.tracker is not None:
        place.tracker.check_key(place.device_key, place.wait_s)
    lease_s = place.limit_s * (len(models) + len(points) * (2 + ROUNDS))
    process = BenchmarkProcess(place, list(models.values()), inputs.recorded)
    with contextlib.closing(process):
        emulator = process.open(function, lease_s)
        order: list[str] = []
        for label, path in models.items():
            loaded = process.load(label, path)
            order = order or loaded
            if loaded != order:
                raise BadInput(f"{path.name} takes {_listed(loaded)}, not {_listed(order)}.")
        _check_names(order, inputs.arguments)
        trees = [arguments.tree(inputs.arguments, extents) for extents in points]
        for tree in trees:
            process.check(tree, order)
        for number, (extents, tree) in enumerate(zip(points, trees, strict=True)):
            on_point(number)
            ran = process.run(tree, order, inputs.seed, inputs.tolerance)
            if ran.errors.keys() != models.keys() or not ran.faults.keys() <= models.keys():
                raise _not_valid(place, "errors of other models than those that ran")
            timings = _timings(process, list(models))
            yield BenchmarkPoint(extents, timings, ran.errors, ran.faults, ran.outputs, emulator)


def _not_valid(place: BenchmarkDevice, reason: str) -> ServiceError:
    return ServiceError(f"{place} gave an answer that is not valid: {reason}.")


def digest(path: Path) -> str:
    """SHA-256 of a library, hex; raises BadInput for a file that is none or unreadable."""
    try:
        with open_plain(path) as file:
            data = file.read()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from None
    if not data.startswith(b"\x7fELF"):
        raise BadInput(
            f"{path} is not a shared library.", hint="`tuna model build NAME -o MODEL.so` makes one"
        )
    return hashlib.sha256(data).hexdigest()


def _timings(process: BenchmarkProcess, labels: Sequence[str]) -> dict[str, Timing]:
    once = process.time(dict.fromkeys(labels, 1))
    numbers = {label: max(1, round(_ROUND_S * 1e3 / max(ms, 1e-3))) for label, ms in once.items()}
    rounds = [process.time(numbers) for _ in range(ROUNDS)]
    return {label: timing([found[label] for found in rounds], "wall") for label in labels}


def _check_names(order: Sequence[str], given: Sequence[Argument]) -> None:
    names = {argument.name for argument in given}
    if unknown := sorted(names - set(order)):
        raise BadInput(f"The model has no input {unknown[0]}.", hint=f"it takes {_listed(order)}")
    if missing := [name for name in order if name not in names]:
        raise BadInput(
            f"The input {missing[0]} is missing.",
            hint=f"name its shape and type: --input {missing[0]}=1,3,224,224:float32",
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
