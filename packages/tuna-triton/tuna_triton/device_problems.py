"""Contents of a candidate's input buffers, the same for a seed, and the right answer wherever it is
asked for.

A large array repeats one block of random values whose length is a prime number: the host draws a
few megabytes, a device fills gigabytes by copies, and every value is known without either. Rows
that a kernel multiplies differ all the same, for no length of a row is a multiple of the block's.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tuna.configs import Config, GemmConfig
from tuna.errors import BadInput
from tuna_triton.artifact import ELEMENT_BYTES, Buffer, SampledAnswer
from tuna_triton.kernel_arguments import block_sizes
from tuna_triton.moe import MoeConfig
from tuna_triton.triton_kernel import TritonKernelConfig

Floats = NDArray[np.float64]
IntArray = NDArray[np.int64]
#: Length of the block that large arrays repeat: the largest prime below 2^22.
BLOCK = 4_194_301
#: Largest error, relative to the largest magnitude of the answer, for each element type; the same
#: values as in `tuna.libraries.reference`. Products of 8-bit floats are summed with fewer bits; of
#: such a float, half a unit in its last place, and as much for what comes before.
_TOLERANCES = {
    **{"fp32": 1e-4, "fp16": 2e-3, "bf16": 1.6e-2, "i64": 0.0, "i32": 0.0, "i8": 0.0},
    **{"fp8e4nv": 2**-3, "fp8e4b8": 2**-3, "fp8e5": 2**-2, "fp8e5b16": 2**-2},
}
_FP8_TOLERANCE = 1.6e-2
#: Values of an output that are read back for one check, and rows and columns of them whose right
#: answer is known.
_READ, _ROWS, _COLUMNS = 1 << 20, 32, 64
#: Blocks of values, and routings, that a process keeps: the configs of a search take turns.
_KEPT = 32
#: Inputs of a mixture of experts that list its rows by expert.
_HIGHEST_TILE = 256
_ROUTED = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
#: NumPy's types of elements: its own, and those of `ml_dtypes`
_FP8: Mapping[str, Any] = {
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp8e4b8": ml_dtypes.float8_e4m3fnuz,
    "fp8e5b16": ml_dtypes.float8_e5m2fnuz,
}
_DTYPES: Mapping[str, Any] = {
    **{"fp32": "f4", "fp16": "f2", "bf16": ml_dtypes.bfloat16, **_FP8},
    **{"i64": "i8", "i32": "i4", "i8": "i1"},
}
#: AMD's 8-bit floats, whose only special value is 0x80
_FNUZ = ("fp8e4b8", "fp8e5b16")


def decode(element: str, raw: NDArray[np.generic]) -> Floats:
    """Return the values of an array of `raw` bits."""
    values: Floats = np.ascontiguousarray(raw).view(_DTYPES[element]).astype(np.float64)
    return values


def poison_byte(element: str) -> int:
    """The byte that fills memory with NaN, or with integers that no kernel writes by chance."""
    return 0x80 if element[0] == "i" or element in _FNUZ else 0xFF


@dataclass(frozen=True)
class Content:
    """The bits of a packed array: `block`, again and again."""

    buffer: Buffer
    block: NDArray[np.generic]

    def at(self, *index: Any) -> Floats:
        """The values at an index of each dimension, which are broadcast."""
        flat = np.asarray(0, dtype=np.int64)
        for size, one in zip(self.buffer.shape, index, strict=True):
            flat = flat * size + one
        return decode(self.buffer.element, self.block[flat % len(self.block)]).reshape(flat.shape)

    def values(self) -> Floats | IntArray:
        """All values, as doubles or as whole numbers."""
        buffer = self.buffer
        found = np.resize(decode(buffer.element, self.block), buffer.shape)
        return found.astype(np.int64) if buffer.element[0] == "i" else found


class Places:
    """Places of an output that are read, and those of them whose right answer is known."""

    def __init__(self, shape: Sequence[int], *, is_known: bool = False) -> None:
        """`is_known`: the whole answer is, so that few rows are checked in more columns."""
        *heights, width = shape
        height = math.prod(heights)
        generator = np.random.default_rng(height * width)
        #: rows from one that is read to the next: odd, so that they lie at any place of a tile
        self.step = math.ceil(height * width / _READ) // 2 * 2 + 1
        #: Rows that are read back.
        self.rows = np.arange((height - 1) % self.step, height, self.step)
        checked = _spread(generator, len(self.rows), _ROWS)
        most = _ROWS * _COLUMNS // len(checked) if is_known else _COLUMNS
        self.columns = _spread(generator, width, most)
        self.checked_rows = self.rows[checked]
        self.checked = np.ix_(checked, self.columns)  #: index into the rows that are read


def _spread(generator: np.random.Generator, size: int, count: int) -> IntArray:
    """Numbers below `size` in order, `count` at most: one of each of as many equal parts, the first
    and the last."""
    if size <= count:
        return np.arange(size)
    starts = np.linspace(0, size, count + 1)
    found = (starts[:-1] + generator.random(count) * np.diff(starts)).astype(np.int64)
    found[0], found[-1] = 0, size - 1
    return np.unique(found)


class DeviceProblem:
    """Inputs and answers of one config for the buffers of a candidate, by their names."""

    def __init__(
        self, config: Config, buffers: Mapping[str, Buffer], answers: Sequence[SampledAnswer] = ()
    ) -> None:
        """`answers`: of a kernel that came in a file, as its artifacts have them."""
        if not isinstance(config, GemmConfig | MoeConfig | TritonKernelConfig):
            raise BadInput(f"{config.label} has no reference on a device")
        self._config, self._buffers = config, buffers
        self._answers = {one.buffer: one for one in answers}

    def tile_rows(self, name: str) -> int:
        """Rows of the candidate's tile if an input depends on them; else 0."""
        if name not in _ROUTED or _ROUTED[0] not in self._buffers:
            return 0
        ids, owners = (self._buffers[one] for one in _ROUTED[:2])
        return ids.shape[0] // owners.shape[0]

    @functools.cached_property
    def inputs(self) -> dict[str, Content]:
        """The content of each input buffer."""
        given = [one for one in self._buffers.values() if one.role == "input"]
        routed: dict[str, NDArray[np.int32]] = {}
        if isinstance(self._config, MoeConfig):
            tiles = self._buffers["expert_ids"].shape[0]
            routed = _tiles(self._config, self.tile_rows("expert_ids"), tiles)
        return {
            one.name: Content(one, routed[one.name].view(np.uint32))
            if one.name in routed
            else Content(one, _random(one.name, one.element, min(BLOCK, math.prod(one.shape))))
            for one in given
        }

    @functools.cached_property
    def touched_bytes(self) -> int:
        """Bytes that one run reads and writes; of experts' weights those of experts that are
        met."""
        met = 1.0
        if isinstance(self._config, MoeConfig):
            met = len(np.unique(_routing(self._config))) / self._config.experts
        kept = [one for one in self._buffers.values() if one.role != "scratch"]
        return sum(int(one.bytes * (met if one.name.endswith("_b") else 1)) for one in kept)

    def rotated(self, name: str, place: int, places: int) -> NDArray[np.generic]:
        """The bits of an input that the run at this place of a rotation reads, to be repeated: the
        same, but that tokens go to other experts."""
        block = self.inputs[name].block
        if not isinstance(self._config, MoeConfig) or name != "expert_ids" or not place:
            return block
        step = max(1, self._config.experts // places)
        return ((block + place * step) % self._config.experts).astype(block.dtype)

    def places(self, output: str) -> Places:
        """Where an output is checked."""
        known = isinstance(self._config, TritonKernelConfig)
        return Places(self._buffers[output].shape, is_known=known)

    def expected(self, output: str, rows: IntArray, columns: IntArray) -> Floats:
        """The right answer in these rows and columns of an output buffer."""
        if isinstance(self._config, TritonKernelConfig):
            answer = self._answers[output]
            if (answer.rows, answer.columns) != (tuple(rows), tuple(columns)):
                raise BadInput(f"the artifact's answer for {output} has other rows or columns")
            return np.asarray(answer.values, np.float64)
        if isinstance(self._config, MoeConfig):
            return _moe(self._config, self.inputs, output.removesuffix("_c"), rows, columns)
        assert isinstance(self._config, GemmConfig)
        return _gemm(self._config, self.inputs, rows, columns)

    def tolerance(self, output: str) -> float:
        """The largest error that is rounding, relative to the largest magnitude of the answer."""
        if output in self._answers:
            return self._answers[output].tolerance
        element = self._buffers[output].element
        eight_bits = any(one.buffer.element in _FP8 for one in self.inputs.values())
        usual = _TOLERANCES[element]
        return max(usual, _FP8_TOLERANCE) if eight_bits else usual


class OutputSample:
    """The right answer in some places of an output, and what the first right candidate wrote."""

    def __init__(self, output: Buffer, problem: DeviceProblem) -> None:
        places = problem.places(output.name)
        self.step, self.rows, self._checked = places.step, places.rows, places.checked
        self._expected = problem.expected(output.name, places.checked_rows, places.columns)
        self._scale = float(np.max(np.abs(self._expected))) or 1.0
        self._element, self._kind = output.element, f"u{ELEMENT_BYTES[output.element]}"
        #: bits of what the first right candidate wrote in all rows
        self._first: NDArray[np.generic] | None = None
        self.tolerance = problem.tolerance(output.name)

    def error(self, rows: NDArray[np.uint8]) -> float:
        """The largest error relative to the largest magnitude; infinite where a row was not
        written.

        Beside the right answer in some places, what was read is compared with the first right
        candidate in all: of that difference half counts, since each of the two may be off by the
        tolerance. Sums in another order differ in few bits, and only these values are decoded.
        """
        found = rows.view(self._kind)
        error = self._largest(found[self._checked], self._expected)
        if self._first is not None:
            differs = found != self._first
            return max(
                error, self._largest(found[differs], self._decoded(self._first[differs])) / 2
            )
        if not np.all(np.isfinite(self._decoded(found))):
            return math.inf
        if error <= self.tolerance:
            self._first = found
        return error

    def _largest(self, found: NDArray[np.generic], right: Floats) -> float:
        errors = np.abs(self._decoded(found) - right)
        return (
            float(np.max(errors, initial=0.0)) / self._scale
            if np.all(errors < np.inf)
            else math.inf
        )

    def _decoded(self, bits: NDArray[np.generic]) -> Floats:
        return decode(self._element, bits).reshape(bits.shape)


def _generator(*words: object) -> np.random.Generator:
    """The same for equal words, in every process and on every machine."""
    digest = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


@functools.lru_cache(maxsize=_KEPT)
def _random(name: str, element: str, size: int) -> NDArray[np.generic]:
    """The bits of values from -1 to 1, of factors from 1/2 to 1, or of whole numbers from -8 to
    7."""
    generator = _generator(name, element)
    if element in _FP8:
        magnitude = np.abs(decode(element, np.arange(256, dtype=np.uint8)))
        bits = np.flatnonzero((magnitude >= 1 / 16) & (magnitude <= 1))
        return generator.choice(bits, size).astype(np.uint8)
    if element[0] == "i":
        return np.asarray(generator.integers(-8, 8, size, dtype=f"i{ELEMENT_BYTES[element]}"))
    lowest = 0.5 if name.endswith(("scale", "weights")) else -1.0
    values = generator.uniform(lowest, 1.0, size).astype(np.float32)
    if element == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if element == "fp16" else values


def _gemm(
    config: GemmConfig, inputs: Mapping[str, Content], rows: IntArray, columns: IntArray
) -> Floats:
    depth = np.arange(config.k)
    a = inputs["a"].at(rows[:, None], depth)
    of_b = (columns[:, None], depth) if config.trans_b else (depth, columns[:, None])
    b = inputs["b"].at(*of_b)
    if config.scale_b:
        blocks = block_sizes(config)
        assert blocks is not None
        block_n, block_k = blocks
        a = a * inputs["a_scale"].at(rows[:, None], depth // block_k)
        b = b * inputs["b_scale"].at(columns[:, None] // block_n, depth // block_k)
    product: Floats = a @ b.T
    return product


@functools.lru_cache(maxsize=_KEPT)
def _routing(config: MoeConfig) -> IntArray:
    """The experts of each token: different ones, at random."""
    generator = _generator("routing", config.experts, config.topk)
    chances = generator.random((config.tokens, config.experts))
    return np.argsort(chances, axis=1)[:, : config.topk].astype(np.int64)


def _tiles(config: MoeConfig, height: int, tiles: int) -> dict[str, NDArray[np.int32]]:
    """The rows of each product by expert, padded to whole tiles of `height`, as consumers'
    `moe_align_block_size` does; where that is 0, each row has a tile of its own."""
    experts = _routing(config).ravel()
    if not height:
        owners, ids = experts.astype(np.int32), np.empty(0, np.int32)
        padded = np.asarray([tiles * _HIGHEST_TILE], np.int32)
        return dict(zip(_ROUTED, (ids, owners, padded), strict=True))
    ids = np.full(tiles * height, experts.size, np.int32)
    owners, at = np.zeros(tiles, np.int32), 0
    for expert in np.unique(experts):
        rows = np.flatnonzero(experts == expert)
        ids[at * height : at * height + rows.size] = rows
        used = math.ceil(rows.size / height)
        owners[at : at + used] = expert
        at += used
    padded = np.asarray([at * height], np.int32)
    return dict(zip(_ROUTED, (ids, owners, padded), strict=True))


def _moe(
    config: MoeConfig,
    inputs: Mapping[str, Content],
    product: str,
    rows: IntArray,
    columns: IntArray,
) -> Floats:
    a, b = inputs[f"{product}_a"], inputs[f"{product}_b"]
    a_scale, b_scale = inputs.get(f"{product}_a_scale"), inputs.get(f"{product}_b_scale")
    depth, experts = np.arange(a.buffer.shape[1]), _routing(config).ravel()
    answer = np.empty((len(rows), len(columns)))
    for place, row in enumerate(rows):
        expert, token = experts[row], row // config.topk if product == "up" else row
        left, right = a.at(token, depth), b.at(expert, columns[:, None], depth)
        if config.block_n and a_scale is not None and b_scale is not None:
            left = left * a_scale.at(token, depth // config.block_k)
            blocks = columns[:, None] // config.block_n, depth // config.block_k
            right = right * b_scale.at(expert, *blocks)
        elif a_scale is not None and b_scale is not None:
            left, right = left * a_scale.at(0), right * b_scale.at(expert)
        elif b_scale is not None:
            right = right * b_scale.at(expert, columns[:, None])
        answer[place] = right @ left
        if product == "down":
            answer[place] *= inputs["topk_weights"].at(row)
    return answer
