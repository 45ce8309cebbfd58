"""Kernels of one's own, with the functions of their file: candidates, arguments and the right
answer. Only children of the sandbox import this, for it runs what a user wrote."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuna.configs import Config, from_json
from tuna.errors import BadInput
from tuna_triton.artifact import (
    ELEMENT_BYTES,
    GLOBAL_SCRATCH,
    PROFILE_SCRATCH,
    ROLES,
    Buffer,
    SampledAnswer,
)
from tuna_triton.descriptions import KernelSpace, TunedKernel
from tuna_triton.device_problems import DeviceProblem
from tuna_triton.kernel_file import KernelFile
from tuna_triton.tiles import KernelCall, Plan, Target, Tile, Value
from tuna_triton.triton_kernel import TritonKernelConfig
from tuna_triton.user_file import PROVIDED, UserFile, default_tile, parse

#: Elements of all inputs and outputs: what the reference computes in doubles takes some GiB.
_MAX_ELEMENTS = 1 << 28
_MAX_OUTPUTS, _MAX_DIMENSIONS = 8, 16
#: Largest grid of CUDA, by dimension.
_MAX_GRID = (2**31 - 1, 65535, 65535)
#: Significant digits of a right answer: below what any tolerance tells, and the same wherever
#: NumPy sums in another order.
_DIGITS = 9
_KEPT = 64


class _Shape(dict[str, Any]):
    """A shape that says which size it lacks."""

    def __missing__(self, name: str) -> None:
        raise BadInput(f"the shape has no {name}")


@dataclass(frozen=True)
class _Given:
    """The answer of `arguments`."""

    buffers: tuple[Buffer, ...]
    values: Mapping[str, Value]

    def outputs(self) -> list[Buffer]:
        """The buffers that the kernel writes and the reference computes."""
        return [one for one in self.buffers if one.role == "output"]


class UserKernel(TunedKernel):
    """A file's kernel with its functions ready to run; they raise BadInput that names what is
    wrong."""

    def __init__(self, file: UserFile) -> None:
        self.file, self.name = file, file.name
        namespace: dict[str, Any] = {"__name__": file.kernel.function, **_provided()}
        try:
            exec(compile(file.functions, file.name, "exec"), namespace)  # noqa: S102
        except Exception as error:
            raise BadInput(f"{file.name} fails: {_told(error)}") from error
        self._functions: dict[str, Callable[..., Any]] = {}
        for name in ("arguments", "grid", "reference", "valid"):
            if name in namespace and not callable(namespace[name]):
                raise BadInput(f"{name} in {file.name} is not a function.")
            self._functions |= {name: namespace[name]} if name in namespace else {}
        self._given = functools.lru_cache(_KEPT)(self._arguments)
        self._answers = functools.lru_cache(_KEPT)(self._reference)

    def kernel(self) -> KernelFile:
        """Return the kernel."""
        return self.file.kernel

    @property
    def tile_names(self) -> Sequence[str]:
        """The names that a tile has."""
        return self.file.tile_names

    def space(self, config: Config, target: Target) -> KernelSpace:
        """Return all points of the axes that are valid, and DEFAULT, or the first valid one."""
        tiles = self._tiles(_layer(config))
        default = default_tile(self.file)
        first = default if default in tiles else next(iter(tiles), None)
        return KernelSpace(tiles, first, size=len(tiles), same=0, too_large=0)

    def plan(self, config: Config, tile: Tile, target: Target) -> Plan:
        """Return the launch of a candidate."""
        layer = _layer(config)
        given = self._given(layer)
        arguments = {**given.values, **tile}
        return Plan(given.buffers, (KernelCall(arguments, self._grid(layer, tile)),))

    def answers(self, config: Config) -> tuple[SampledAnswer, ...]:
        """Return the right answer in some places of each output, computed once."""
        return self._answers(_layer(config))

    def check(self, config: TritonKernelConfig) -> None:
        """Raise BadInput unless all of a shape can be tuned."""
        self._given(config)
        tiles = self._tiles(config)
        if not tiles:
            raise BadInput(f"valid in {self.name} leaves no candidate for {config.label}.")
        for tile in tiles:
            self._grid(config, tile)
        self.answers(config)

    def _tiles(self, config: TritonKernelConfig) -> list[Tile]:
        values = (one for _, one in self.file.axes)
        points = itertools.product(*values)
        tiles = (dict(zip(self.tile_names, point, strict=True)) for point in points)
        return [tile for tile in tiles if self._is_valid(config, tile)]

    def _call(self, function: str, config: TritonKernelConfig, *more: object) -> Any:
        """The answer of a function of the file."""
        try:
            return self._functions[function](_Shape(config.shape), *more)
        except Exception as error:
            raise BadInput(
                f"{function} in {self.name} fails for {config.label}: {_told(error)}"
            ) from error

    def _fault(self, function: str, config: TritonKernelConfig, what: str) -> BadInput:
        return BadInput(f"{function} in {self.name} gives {what} for {config.label}.")

    def _is_valid(self, config: TritonKernelConfig, tile: Tile) -> bool:
        if "valid" not in self._functions:
            return True
        found = self._call("valid", config, dict(tile))
        if not isinstance(found, bool | np.bool_):
            raise self._fault("valid", config, f"{found!r:.60} instead of True or False")
        return bool(found)

    def _grid(self, config: TritonKernelConfig, tile: Tile) -> tuple[int, int, int]:
        found = self._call("grid", config, dict(tile))
        sizes = [_whole(one) for one in found] if isinstance(found, tuple | list) else []
        most = _MAX_GRID[: len(sizes)]
        if not 1 <= len(sizes) <= 3 or not all(
            one is not None and 1 <= one <= highest
            for one, highest in zip(sizes, most, strict=True)
        ):
            told = f"{found!r}"[:80]
            raise self._fault(
                "grid", config, f"{told} instead of one to three positive numbers at {dict(tile)}"
            )
        first, second, third = (*(one or 1 for one in sizes), 1, 1)[:3]
        return first, second, third

    def _arguments(self, config: TritonKernelConfig) -> _Given:
        arguments = self._call("arguments", config)
        kernel = self.file.kernel
        if not isinstance(arguments, Mapping):
            raise self._fault("arguments", config, f"{arguments!r:.60} instead of a dictionary")
        buffers, values = [], dict[str, Value]()
        for name, value in arguments.items():
            if name not in kernel.arguments:
                raise self._fault(
                    "arguments", config, f"{name!s:.80}, which {kernel.function} does not take,"
                )
            if name in self.tile_names:
                raise self._fault("arguments", config, f"{name}, which is an axis,")
            if isinstance(value, tuple | list):
                buffers.append(self._buffer(config, name, value))
                values[name] = name
            else:
                values[name] = self._value(config, name, value)
        provided = {*arguments, *self.tile_names, *dict(kernel.defaults)}
        missing = [name for name in kernel.arguments if name not in provided]
        if missing:
            raise BadInput(
                f"{kernel.function} in {self.name} takes {missing[0]}, which neither arguments nor"
                f" AXES gives for {config.label}."
            )
        all_of_it = _Given(tuple(buffers), values)
        if not 1 <= len(all_of_it.outputs()) <= _MAX_OUTPUTS:
            raise self._fault("arguments", config, f"not 1 to {_MAX_OUTPUTS} outputs")
        elements = sum(math.prod(buffer.shape) for buffer in buffers if buffer.role != "scratch")
        if elements > _MAX_ELEMENTS:
            raise BadInput(
                f"{config.label} has {elements} elements in its inputs and outputs, more than"
                f" {_MAX_ELEMENTS}: reference in {self.name} is computed in full."
            )
        return all_of_it

    def _buffer(self, config: TritonKernelConfig, name: str, value: Sequence[Any]) -> Buffer:
        form = '("input", "fp32", (4096, 1024))'
        if len(value) != 3 or not isinstance(value[2], tuple | list):
            raise self._fault("arguments", config, f"{name} as {value!r:.80} instead of {form}")
        role, element, shape = value
        sizes = [_whole(one) for one in shape]
        if role not in ROLES:
            raise self._fault("arguments", config, f"{name} as {role!r:.40}, none of {ROLES},")
        if element not in ELEMENT_BYTES:
            known = ", ".join(ELEMENT_BYTES)
            raise self._fault("arguments", config, f"{name} of {element!r:.40}, none of {known},")
        if not 1 <= len(sizes) <= _MAX_DIMENSIONS or not all(
            one is not None and 1 <= one < 2**40 for one in sizes
        ):
            raise self._fault("arguments", config, f"{name} with the shape {shape!r:.80}")
        if name in self.file.kernel.constants or name in (GLOBAL_SCRATCH, PROFILE_SCRATCH):
            raise self._fault("arguments", config, f"{name} as a buffer, which it cannot be,")
        return Buffer(name, str(element), tuple(one or 0 for one in sizes), str(role))

    def _value(self, config: TritonKernelConfig, name: str, value: Any) -> Value:
        """Return the value of an argument that is not a buffer."""
        constant = name in self.file.kernel.constants
        whole, plain = _whole(value), value.item() if isinstance(value, np.generic) else value
        if value is None or (constant and isinstance(plain, bool | str)):
            return plain  # type: ignore[no-any-return]
        if whole is not None and -(2**63) <= whole < 2**64:
            return whole
        if isinstance(plain, float) and math.isfinite(plain):
            return plain
        less = "" if constant or not isinstance(plain, bool | str) else " without tl.constexpr"
        raise self._fault("arguments", config, f"{name} as {value!r:.80}{less}")

    def _reference(self, config: TritonKernelConfig) -> tuple[SampledAnswer, ...]:
        given = self._given(config)
        outputs = given.outputs()
        problem = DeviceProblem(config, {one.name: one for one in given.buffers})
        inputs = {name: content.values() for name, content in problem.inputs.items()}
        found = self._call("reference", config, inputs)
        if not isinstance(found, Mapping):
            found = {outputs[0].name: found} if len(outputs) == 1 else {}
        if found.keys() != {one.name for one in outputs}:
            names = ", ".join(one.name for one in outputs)
            raise self._fault("reference", config, f"not the outputs {names}")
        return tuple(self._answer(config, one, found[one.name], problem) for one in outputs)

    def _answer(
        self, config: TritonKernelConfig, output: Buffer, answer: Any, problem: DeviceProblem
    ) -> SampledAnswer:
        array = np.asarray(answer)
        kinds = "iub" if output.element[0] == "i" else "iubf"
        if array.shape != output.shape or array.dtype.kind not in kinds:
            raise self._fault(
                "reference",
                config,
                f"{output.name} as {array.dtype} of shape {array.shape}, and it is"
                f" {output.element} of shape {output.shape},",
            )
        if not np.all(np.isfinite(array)):
            raise self._fault("reference", config, f"{output.name} with values that are not finite")
        places = problem.places(output.name)
        rows, columns = places.checked_rows, places.columns
        chosen = array.reshape(-1, output.shape[-1])[np.ix_(rows, columns)].astype(np.float64)
        values = tuple(tuple(float(f"{value:.{_DIGITS}g}") for value in row) for row in chosen)
        tolerance = self.file.tolerance
        usual = problem.tolerance(output.name) if tolerance is None else tolerance
        return SampledAnswer(
            output.name, tuple(map(int, rows)), tuple(map(int, columns)), values, usual
        )


def _provided() -> dict[str, types.SimpleNamespace]:
    """Triton as far as functions beside a kernel may use it."""
    made: dict[str, Callable[..., object]] = {
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda number: 1 << (number - 1).bit_length() if number > 0 else 0,
        "constexpr": lambda value: value,
    }
    return {
        module: types.SimpleNamespace(**{name: made[name] for name in names})
        for module, names in PROVIDED.items()
    }


def _layer(config: Config) -> TritonKernelConfig:
    assert isinstance(config, TritonKernelConfig)
    return config


def _whole(value: object) -> int | None:
    """A whole number, NumPy's too; None for anything else."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _told(error: Exception) -> str:
    """An exception as the end of a sentence."""
    words = str(error).splitlines()[:1] or [""]
    name = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
    return f"{name}{words[0][:200]}".rstrip(" .:") + "."


@functools.lru_cache(8)
def user_kernel(text: str, name: str = "the kernel's file") -> UserKernel:
    """Return the kernel in a file's text; raises BadInput."""
    return UserKernel(parse(text, name))


def check(text: str, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return why a shape cannot be tuned, as `fault`; empty where it can."""
    try:
        user_kernel(text, name).check(_layer(from_json(config)))
    except BadInput as error:
        return {"fault": str(error)}
    return {"fault": ""}


HANDLERS: Mapping[str, Callable[..., dict[str, Any]]] = {"check": check}
