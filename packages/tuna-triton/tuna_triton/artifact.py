"""The artifact of a Triton candidate: one file with a header and the GPU code that it launches.

Layout: 8 bytes `MAGIC`, 4 bytes length of the header (little endian), the header (JSON, UTF-8, keys
sorted, no spaces), then the binaries (cubin for `sm_*`, hsaco for `gfx*`), one after the other in
the order of the header's `binaries`, which gives their sizes. Equal candidates give equal bytes.

One run of a candidate is its `launches` in order, all on one stream. Every argument is known when
the candidate is built but for the addresses of its `buffers`: whoever measures allocates and fills
those by name, as `tuna_triton.device_problems` says. This module needs neither Triton nor
NumPy.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

MAGIC = b"TUNATRI1"
#: Triton's element types by name, with their bytes.
ELEMENT_BYTES = {
    **{"fp32": 4, "fp16": 2, "bf16": 2, "i64": 8, "i32": 4, "i8": 1},
    **{"fp8e4nv": 1, "fp8e5": 1, "fp8e4b8": 1, "fp8e5b16": 1},
}
#: Form of a launch argument by its type, as `struct` has it, and its bytes; `ptr` is a device
#: address.
PARAM_FORMATS = {
    **{"ptr": "<Q", "i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q"},
    **{"fp32": "<f", "fp64": "<d"},
    **{"i1": "<b", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H"},
}
PARAM_BYTES = {name: struct.calcsize(form) for name, form in PARAM_FORMATS.items()}
ROLES = ("input", "output", "scratch")
#: Names of buffers that Triton itself asks for: their bytes are stated by the launch, and the
#: argument is a null pointer where these are 0.
GLOBAL_SCRATCH, PROFILE_SCRATCH = "global_scratch", "profile_scratch"
_HEADER_MAX_BYTES = 1 << 20
_ARCH = re.compile(r"sm_[0-9]{2,3}|gfx[0-9a-f]{3,4}")


class BadArtifact(ValueError):
    """The file is not an artifact of this library, or is damaged."""


@dataclass(frozen=True)
class Buffer:
    """An array in device memory; addresses are aligned to 16 bytes or more."""

    name: str
    element: str  #: a key of ELEMENT_BYTES
    shape: tuple[int, ...]
    #: input: filled before the first run and only read; output: poisoned with NaN before a checked
    #: run; scratch: of any content
    role: str

    @property
    def bytes(self) -> int:
        """Size of the packed array."""
        return ELEMENT_BYTES[self.element] * math.prod(self.shape)


@dataclass(frozen=True)
class Param:
    """One argument of a kernel, in the order of the binary's parameter list."""

    name: str
    type: str  #: a key of PARAM_BYTES
    buffer: str = ""  #: buffer's name, GLOBAL_SCRATCH or PROFILE_SCRATCH; empty unless a pointer
    value: float | int = 0  #: value of an argument that is not a pointer


@dataclass(frozen=True)
class Launch:
    """One kernel launch: blocks of `num_warps * warp_size` threads in one dimension."""

    binary: int  #: index of its code in `Artifact.binaries`
    symbol: str  #: name of the function in that code
    grid: tuple[int, int, int]
    num_warps: int  #: number of the build, which may exceed what the candidate asked for
    warp_size: int
    shared_bytes: int  #: dynamic shared memory; above 48 KiB CUDA wants a function attribute
    #: Triton's own scratch: bytes for each program of the grid, 0 for none, and their alignment.
    global_scratch_bytes: int
    global_scratch_align: int
    profile_scratch_bytes: int
    profile_scratch_align: int
    params: tuple[Param, ...]


@dataclass(frozen=True)
class SampledAnswer:
    """The right answer in some places of an output, where whoever measures cannot compute it."""

    buffer: str
    #: Rows of the output, seen as a matrix whose columns are its last dimension.
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    #: Right values: a tuple for each row, a number for each column.
    values: tuple[tuple[float, ...], ...]
    tolerance: float  #: largest error, relative to the largest magnitude of the values


@dataclass(frozen=True)
class Artifact:
    """A built candidate."""

    arch: str  #: sm_80, sm_90, gfx90a, gfx942
    triton: str  #: version of Triton that compiled it
    kernel_file: str  #: SHA-256 of the kernel file
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    binaries: tuple[bytes, ...]
    #: An answer for each output; empty unless the kernel came in a file.
    answers: tuple[SampledAnswer, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the file's content, equal for equal artifacts."""
        header = {
            "arch": self.arch,
            "triton": self.triton,
            "kernel_file": self.kernel_file,
            "buffers": [asdict(one) for one in self.buffers],
            "launches": [asdict(one) for one in self.launches],
            "binaries": [
                {"bytes": len(one), "sha256": hashlib.sha256(one).hexdigest()}
                for one in self.binaries
            ],
        }
        if self.answers:
            header["answers"] = [asdict(one) for one in self.answers]
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        return b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *self.binaries])


def from_bytes(data: bytes) -> Artifact:
    """Return the artifact in a file's content; raises BadArtifact unless all of it is sound."""
    start = len(MAGIC) + 4
    if data[: len(MAGIC)] != MAGIC or len(data) < start:
        raise BadArtifact("the file does not begin as a Triton artifact of Tuna")
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    if length > min(_HEADER_MAX_BYTES, len(data) - start):
        raise BadArtifact("the header is longer than the file or the limit")
    try:
        header = json.loads(data[start : start + length])
        binaries = _binaries(header["binaries"], data[start + length :])
        artifact = Artifact(
            arch=header["arch"],
            triton=header["triton"],
            kernel_file=header["kernel_file"],
            buffers=tuple(_buffer(facts) for facts in header["buffers"]),
            launches=tuple(_launch(facts) for facts in header["launches"]),
            binaries=binaries,
            answers=tuple(_answer(facts) for facts in header.get("answers", ())),
        )
        _check(artifact)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadArtifact(f"the header is not sound: {error}") from None
    return artifact


def _binaries(facts: Sequence[Mapping[str, Any]], data: bytes) -> tuple[bytes, ...]:
    found, at = [], 0
    for one in facts:
        size = one["bytes"]
        if type(size) is not int or size <= 0:
            raise ValueError("a binary has no size")
        part = data[at : at + size]
        if hashlib.sha256(part).hexdigest() != one["sha256"]:
            raise ValueError("a binary is damaged")
        found.append(part)
        at += size
    if at != len(data):
        raise ValueError("the file's length is not that of its binaries")
    return tuple(found)


def _buffer(facts: Mapping[str, Any]) -> Buffer:
    return Buffer(**{**facts, "shape": tuple(facts["shape"])})


def _launch(facts: Mapping[str, Any]) -> Launch:
    params = tuple(Param(**one) for one in facts["params"])
    return Launch(**{**facts, "grid": tuple(facts["grid"]), "params": params})


def _answer(facts: Mapping[str, Any]) -> SampledAnswer:
    return SampledAnswer(
        buffer=str(facts["buffer"]),
        rows=tuple(facts["rows"]),
        columns=tuple(facts["columns"]),
        values=tuple(tuple(map(float, row)) for row in facts["values"]),
        tolerance=float(facts["tolerance"]),
    )


def _check(artifact: Artifact) -> None:
    """Raise ValueError for values that a launch could not use."""
    if not _ARCH.fullmatch(artifact.arch):
        raise ValueError(f"unknown architecture {artifact.arch!r}")
    names = {buffer.name for buffer in artifact.buffers}
    if len(names) != len(artifact.buffers) or names & {GLOBAL_SCRATCH, PROFILE_SCRATCH}:
        raise ValueError("names of buffers are not unique")
    for buffer in artifact.buffers:
        if buffer.element not in ELEMENT_BYTES or buffer.role not in ROLES:
            raise ValueError(f"buffer {buffer.name} has an unknown element or role")
        _check_counts(f"the shape of {buffer.name}", buffer.shape, 1, 2**40)
    for answer in artifact.answers:
        if answer.buffer not in {b.name for b in artifact.buffers if b.role == "output"}:
            raise ValueError(f"{answer.buffer} has an answer and is not an output")
        wide = {len(row) for row in answer.values} | {len(answer.columns)}
        if len(answer.values) != len(answer.rows) or len(wide) > 1 or not answer.values:
            raise ValueError(f"the answer for {answer.buffer} does not fit its rows and columns")
        if not all(map(math.isfinite, (answer.tolerance, *chain(*answer.values)))):
            raise ValueError(f"the answer for {answer.buffer} is not finite")
        _check_counts("rows", (*answer.rows, *answer.columns), 0, 2**40)
    if not artifact.launches:
        raise ValueError("launches is empty")
    for launch in artifact.launches:
        if type(launch.binary) is not int or not 0 <= launch.binary < len(artifact.binaries):
            raise ValueError("a launch has no binary")
        if len(launch.grid) != 3:
            raise ValueError("a grid has three dimensions")
        _check_counts("the grid", launch.grid, 1, 2**31 - 1)
        _check_counts("warps", (launch.num_warps, launch.warp_size), 1, 64)
        sizes = launch.shared_bytes, launch.global_scratch_bytes, launch.profile_scratch_bytes
        _check_counts("memory", sizes, 0, 2**31 - 1)
        aligned = launch.global_scratch_align, launch.profile_scratch_align
        _check_counts("alignment", aligned, 1, 4096)
        for param in launch.params:
            if param.type not in PARAM_BYTES:
                raise ValueError(f"argument {param.name} has an unknown type")
            if (param.type == "ptr") != bool(param.buffer):
                raise ValueError(f"argument {param.name} is neither a pointer nor a value")
            if param.buffer and param.buffer not in names | {GLOBAL_SCRATCH, PROFILE_SCRATCH}:
                raise ValueError(f"argument {param.name} points to no buffer")


def _check_counts(name: str, values: Sequence[int], lowest: int, highest: int) -> None:
    for value in values:
        if type(value) is not int or not lowest <= value <= highest:
            raise ValueError(f"{name} must be whole numbers from {lowest}, got {value!r}")
