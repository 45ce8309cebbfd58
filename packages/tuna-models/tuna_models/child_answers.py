"""Answers of the child that reads, builds and checks models, and the model that it is asked of, as
data. Imports no TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from tuna.configs.model import BF16_TOLERANCE, TOLERANCE
from tuna_models.manifest import Class, ManifestTask, ModelTensor, Precision, Promise

#: Files of a planned model: the functions to compile, and the program that calls them.
BODY, PROGRAM = "body.json.gz", "program.vm"


class Data(BaseModel):
    """Facts that do not change, without fields of other names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFile(Data):
    """A model's file as it was imported."""

    path: str
    shapes: dict[str, list[int]]  #: See `Manifest.shapes`
    values: dict[str, list[float]]  #: See `Manifest.values`
    precision: Precision = Precision.FP32
    in_fp32: tuple[int, ...] = ()  #: See `Manifest.in_fp32`
    max_error: float = BF16_TOLERANCE  #: See `Checks.max_error`


class AskedFile(Data):
    """A model's file as a user asks for its import."""

    path: str
    target: str  #: JSON of TVM's target; nothing but `num-cores`: this machine with so many
    shapes: Mapping[str, Sequence[int]] = {}  #: By input, or by the name of an open extent
    values: Mapping[str, Sequence[float]] = {}  #: Of inputs that become constants
    batch: int | None = None  #: First extent of the inputs that `shapes` does not name
    precision: Precision = Precision.FP32
    in_fp32: tuple[int, ...] = ()  #: See `Manifest.in_fp32`


class ChildAnswer(Data):
    """An answer of the child; the base is that of an operation which only writes a file."""


class WeightFiles(ChildAnswer):
    """Places of its weights that a model file names, unchecked."""

    locations: tuple[str, ...]


class ReadModel(ChildAnswer):
    """A model that was imported: what its manifest is made of."""

    opset: str  #: see `Manifest.opset`
    inputs: tuple[ModelTensor, ...]
    tasks: tuple[ManifestTask, ...]
    bodies: dict[str, str]  #: Texts of tasks without a core, by their SHA-256
    tvm: str  #: TVM's version
    left_in_fp32: dict[str, int] = {}  #: see `Manifest.left_in_fp32`


class Obstacle(Data):
    """One thing that is in the way of a model's import."""

    operator: str = ""  #: The operator; empty: not one of them
    node: str = ""  #: Name of the operator's node, or of an input
    reason: str
    hint: str = ""  #: What to do


class PlainTask(Data):
    """A task that would run as TVM's plain code, without a kernel of Tuna's, or as scalars."""

    task: str  #: Label of the task
    count: int  #: Number of its calls
    reason: str
    share: float  #: Share of the model's estimated time, at least
    scalars: bool  #: True: most of its machine code computes single values, not vectors


class Roofline(Data):
    """The least that a task's call takes on all cores, in operations of fp32 at their peak."""

    arithmetic: float  #: What it computes
    memory: float  #: What it reads and writes, from memory

    def said(self, time_ms: float, peak_gflops: float) -> str:
        """Say what share of the peak a call of this time reaches, and of what: that which takes
        longer."""
        share = max(self.arithmetic, self.memory) / (1e6 * time_ms * peak_gflops)
        return f"{share:.0%} of {'arithmetic' if self.arithmetic >= self.memory else 'memory'}"


class FileCheck(ChildAnswer):
    """The outcome that an import of a model's file would have."""

    obstacles: tuple[Obstacle, ...]  #: What is in the way of its import; empty: nothing
    assumed: str = ""  #: Options without which it is refused, and with which the rest was found
    inputs: tuple[ModelTensor, ...] = ()
    tasks: tuple[ManifestTask, ...] = ()
    without_kernel: tuple[PlainTask, ...] = ()
    rooflines: dict[str, Roofline] = {}  #: By the label of a task
    left_in_fp32: dict[str, int] = {}  #: see `Manifest.left_in_fp32`


class Estimates(ChildAnswer):
    """Estimated cycles of the best point of each solver, by task key and solver."""

    cycles: dict[str, dict[str, float]]


class Plan(ChildAnswer):
    """A planned model; its functions are those of the program that was written."""

    classes: dict[str, Class]  #: Source of each kernel, by task key
    functions: dict[str, str]  #: Task key of each function
    calls: dict[str, int]  #: Numbers of calls in `main`, by function
    #: Functions with other kernels of a task, by task key, then by function: the kernel's place
    #: among the task's records; None: the predicted kernel
    places: dict[str, dict[str, int | None]]
    refused_records: dict[str, str]  #: Why a record could not be applied, by task key
    operations: int  #: Floating-point operations of convolutions and products
    cpu_flags: list[str] = []  #: Flags of /proc/cpuinfo without which a CPU cannot run the code
    winograd: bool = False  #: True if a kernel is one of Winograd's, right to fewer digits

    def task_of(self, function: str) -> str:
        """Return the task key of a function; empty for one that belongs to no task."""
        return self.functions.get(function, "")

    def class_of(self, function: str) -> Class:
        """Return the source of the kernel of a function."""
        return self.classes.get(self.task_of(function), Class.DEFAULT)


class WrittenAnswers(ChildAnswer):
    """Right answers that were written into a file, or why there are none."""

    unanswered: str = ""  #: Why the reference or runtime has no answer; empty: it has one
    rule: str = ""  #: How a built model is compared with the answers, in one line
    tolerance: float = TOLERANCE  #: Largest relative error of floating-point outputs
    quantised: int = 0  #: Number of quantised tensors
    #: What keeps the error of a model in bf16; None: it was not measured
    promise: Promise | None = None


class Sentence(ChildAnswer):
    """A sentence for the user."""

    sentence: str


class LargestError(ChildAnswer):
    """Largest error of answers against others, relative to the largest magnitude."""

    error: float


class Contenders(ChildAnswer):
    """A built model, `tuna`, timed in turn with other runtimes."""

    errors: dict[str, float] = {}  #: Largest error against each runtime
    times_ms: dict[str, tuple[float, ...]] = {}  #: Milliseconds of each round, by contender
    wall_ms: dict[str, tuple[float, ...]] = {}  #: The same by the wall clock
    absent: dict[str, str] = {}  #: Why a runtime does not take part
