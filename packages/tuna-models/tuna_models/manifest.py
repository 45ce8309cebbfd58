"""An imported model as data: its file, inputs and tasks with their counts. Imports no TVM."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from tuna.configs import TaskConfig, from_json
from tuna.configs.values import DataType
from tuna.errors import BadInput

#: Version of the JSON form.
VERSION = 1


class Class(str, enum.Enum):
    """Source of a task's kernel."""

    EXACT = "exact"  #: measured for this task on such a machine
    NEAREST = "nearest"  #: the params of the same core and epilogue with another shape
    PREDICTED = "predicted"  #: the best by estimate, or by a rule, not measured
    DEFAULT = "default"  #: TVM's without tuning; also pooling and changes of layout

    __str__ = str.__str__


class Precision(str, enum.Enum):
    """The type of convolutions and products, and of the tensors between them."""

    FP32 = "fp32"  #: the types of the file
    BF16 = "bf16"  #: bfloat16 with sums in fp32, for CPUs with avx512_bf16

    __str__ = str.__str__


#: Later fields, left out where they are empty, so that imports keep their versions.
_LATER = {"bounds", "parameter", "data", "values", "left_in_fp32", "precision", "promise"}


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = dump(self)
        if values.get("precision") == Precision.FP32:
            del values["precision"]
        return {name: value for name, value in values.items() if value or name not in _LATER}


class ModelTensor(_Data):
    """An input or output of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bounds: tuple[int, int] | None = None  #: smallest and largest index or length; None: any value
    parameter: str = ""  #: name in the built library; empty: `name`


class ManifestTask(_Data):
    """A function of the model."""

    config: dict[str, Any]  #: `TaskConfig.to_json()`
    count: int  #: Number of its calls in the model

    @cached_property
    def task(self) -> TaskConfig:
        """The config."""
        found = from_json(self.config)
        assert isinstance(found, TaskConfig)
        return found


class LeftInFp32(_Data):
    """A convolution, product or attention of a model in bf16 that stays in fp32."""

    place: int  #: Number of convolutions and products before it in the model
    label: str  #: Its task in fp32
    cost: float  #: Estimated time beside that in bf16, of the time of the model in bf16


class Promise(_Data):
    """What keeps the error of a model in bf16."""

    max_error: float  #: Largest error of its answers, of the largest value of each
    error: float  #: Its error as it is, in fp32 that is rounded as bf16 is
    whole_error: float  #: The same with everything in bf16
    left: tuple[LeftInFp32, ...] = ()  #: What stays in fp32

    @property
    def places(self) -> tuple[int, ...]:
        """The places of what stays in fp32."""
        return tuple(each.place for each in self.left)


class Manifest(_Data):
    """Outcome of `tuna model import`; equal imports have equal manifests."""

    version: int = VERSION
    file: str  #: SHA-256 of the model file, which is in the artifact store
    data: dict[str, str] = {}  #: SHA-256 of files with its weights, by their places in its folder
    size_bytes: int  #: Bytes of all these files
    opset: str  #: ONNX's; else the framework and its version, such as `torch 2.13.0`
    shapes: dict[str, tuple[int, ...]]  #: Shapes of the inputs, as they were chosen
    values: dict[str, tuple[float, ...]] = {}  #: Values of inputs that became constants
    target: str  #: JSON of the target that it was planned for
    tvm: str  #: version of TVM
    inputs: tuple[ModelTensor, ...]
    tasks: tuple[ManifestTask, ...]
    text: str  #: SHA-256 of the module's text, in the artifact store
    #: reasons why convolutions and products of quantised tensors are computed in fp32, with numbers
    left_in_fp32: dict[str, int] = {}
    precision: Precision = Precision.FP32
    promise: Promise | None = None  #: What stays in fp32 of a model in bf16; None: nothing

    def to_bytes(self) -> bytes:
        """The JSON form."""
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")
        ).encode()

    @property
    def digest(self) -> str:
        """SHA-256 of the JSON form, hex: the version of the model."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse the JSON form; raises BadInput."""
        try:
            found = cls.model_validate_json(data)
        except ValueError as error:
            raise BadInput(
                f"The model cannot be read: {str(error).splitlines()[0]}", hint="import it again"
            ) from None
        if found.version != VERSION:
            raise BadInput(
                "The model was imported by another version of Tuna.", hint="import it again"
            )
        return found

    @property
    def of_torch(self) -> bool:
        """Whether it is a program of PyTorch."""
        return " " in self.opset

    @property
    def cores(self) -> int:
        """The cores of the target."""
        return int(json.loads(self.target).get("num-cores", 1))

    @property
    def whole_numbers(self) -> int:
        """Number of calls of convolutions and products that sum whole numbers."""
        return whole_numbers(self.tasks)

    @property
    def source(self) -> dict[str, Any]:
        """What the right answers depend on, and nothing of its kernels."""
        fields = {"file", "data", "opset", "shapes", "values", "inputs", "precision"}
        return {
            name: value for name, value in self.model_dump(mode="json").items() if name in fields
        }

    @property
    def in_fp32(self) -> tuple[int, ...]:
        """Places of what a model in bf16 leaves in fp32."""
        return () if self.promise is None else self.promise.places

    def weights(self) -> Mapping[str, int]:
        """The number of calls of each task, by its key."""
        return {entry.task.key: entry.count for entry in self.tasks}


def whole_numbers(tasks: Iterable[ManifestTask]) -> int:
    """Number of calls of convolutions and products that sum whole numbers."""
    cores = ((entry.task.core, entry.count) for entry in tasks)
    return sum(count for core, count in cores if core and core.data_type is DataType.INT8)
