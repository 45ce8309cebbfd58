"""What `benchmarks.gpu` and `triton.testing.do_bench` ask of torch, on the stand-in of NVIDIA's
driver. Times are a thousand times too long, so that few repeats fill their milliseconds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

__version__ = "0.double"
bfloat16, float32, int = "bfloat16", "float32", "int"
_STREAM = ctypes.c_void_p(2)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Tensor:
    """Memory of the device."""

    def __init__(self, shape: Sequence[Any] | Any) -> None:
        self.shape = shape if isinstance(shape, Sequence) else [shape]
        self.bytes = 4 * math.prod(self.shape)
        self.address = ctypes.c_uint64()
        assert not _driver().cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(self.bytes))

    def __rmul__(self, other: float) -> Tensor:
        return self

    def __sub__(self, other: float) -> Tensor:
        return self

    def to(self, dtype: str) -> Tensor:
        """The same."""
        return self

    def zero_(self) -> Tensor:
        """Fill it, in the stream."""
        assert not _driver().cuMemsetD8Async(self.address, 0, ctypes.c_size_t(self.bytes), _STREAM)
        return self


class Generator:
    """Numbers that nobody looks at."""

    def __init__(self, device: str) -> None:
        assert device == "cuda"

    def manual_seed(self, seed: Any) -> Generator:
        """The same."""
        return self


def rand(shape: Sequence[Any], device: str, generator: Generator) -> Tensor:
    """A tensor of any content."""
    return Tensor(shape)


def empty(shape: Sequence[Any] | Any, dtype: str, device: str) -> Tensor:
    """A tensor that is smaller than it should be: the stand-in has little memory."""
    return Tensor(1024)


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self._event = ctypes.c_void_p()
        assert not _driver().cuEventCreate(ctypes.byref(self._event), 0)

    def record(self, stream: Any = None) -> None:
        """In the one stream that there is."""
        assert not _driver().cuEventRecord(self._event, _STREAM)

    def synchronize(self) -> None:
        """Wait for it."""
        assert not _driver().cuEventSynchronize(self._event)

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds, a thousand times too many."""
        found = ctypes.c_float()
        assert not _driver().cuEventElapsedTime(ctypes.byref(found), self._event, end._event)
        return 1000 * found.value


class _Stream:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class cuda:  # noqa: N801
    """The module of that name."""

    Event, ExternalStream = _Event, _Stream

    @staticmethod
    def stream(given: _Stream) -> _Stream:
        """Make a stream the current one."""
        return given

    @staticmethod
    def synchronize() -> None:
        """Wait for the device."""
        assert not _driver().cuStreamSynchronize(_STREAM)
