"""Values on a board: TVM's RPC carries some by value, others must be made there first, and some
cannot cross. Imports TVM.

By value go None, bool, int, float, str, bytes and data types. A tensor must lie on the board. Of
any other object the board makes its own, by its constructors `ffi.Shape`, `ffi.Array` and
`ffi.Map`, and the client has a handle. None of them may be given a tensor: TVM 0.27 would store a
bare pointer to it, which is read after it is freed. So a tuple of tensors is made by the tensor
cache of the virtual machine, and a dict of them by `runtime.LoadParams`.
`test_crossing.py` has each case.

After an error that reached the board its session cannot be used any more (the next call fails,
whatever it is): open another.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tuna.errors import BadInput

#: Maximum depth of nested arguments; deeper nesting is a loop, or not an argument of a model
_DEEPEST = 16
_INT64 = 1 << 63
#: Bytes of a handle and its bookkeeping on the board
_HANDLE_BYTES = 64


@dataclass(frozen=True)
class _Size:
    """Bytes on the board: of a value, and of what it takes while it is made."""

    kept: int = 0
    making: int = 0

    def __add__(self, other: _Size) -> _Size:
        return _Size(self.kept + other.kept, max(self.making, other.making))


class RemoteValues:
    """The values of a client on one board. Nothing is freed there before `release`, or the end of
    the session."""

    def __init__(self, session: Any, device: Any, memory_bytes: int | None = None) -> None:
        """`session` is a `tvm.rpc.RPCSession`, `device` one that it made.

        Values may take `memory_bytes`; by default what the device says is free, or its memory where
        it does not say that.
        """
        self._session, self._device, self._limit_bytes = session, device, memory_bytes
        self._functions: dict[str, Any] = {}
        self._held: list[Any] = []
        self._numbers = itertools.count()
        self.held_bytes = 0  #: bytes of the values that were sent and not released

    def function(self, name: str) -> Any:
        """The board's global function of this name."""
        if name not in self._functions:
            self._functions[name] = self._session.get_function(name)
        return self._functions[name]

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are free for more values; None: the board does not say."""
        found = None if self._limit_bytes is None else self._limit_bytes - self.held_bytes
        free = self._device.available_global_memory
        total = self._device.total_global_memory
        there = free if free is not None else None if total is None else total - self.held_bytes
        return min((one for one in (found, there) if one is not None), default=None)

    def check(self, needed_bytes: int, what: str) -> None:
        """Raise BadInput if `needed_bytes` more do not fit."""
        free = self.free_bytes
        if free is not None and needed_bytes > free:
            left = f"which has {_gb(max(free, 0))} left"
            raise BadInput(f"{what} needs {_gb(needed_bytes)} on the board, {left}.")

    def send(self, *args: Any, names: Sequence[str] = ()) -> list[Any]:
        """The arguments as they can be given to a remote function; `names` are theirs, if they have
        any.

        They are None, bool, int, float, str, bytes, data types, NumPy arrays, tensors,
        `tvm_ffi.Shape`, and lists, tuples and dicts of those; handles and tensors that are there
        already stay as they are. Before anything is sent, BadInput names the first that cannot
        cross, such as `args[2]["x"][0]`, or the one that does not fit into the board's memory.
        """
        places = list(names) or [f"args[{number}]" for number in range(len(args))]
        whole = _Size()
        for value, place in zip(args, places, strict=True):
            size = _size(value, place, 0)
            self.check(whole.kept + size.kept + size.making, place)
            whole += size
        made = [self._made(value) for value in args]
        self.held_bytes += whole.kept
        return made

    def release(self) -> None:
        """Free everything that was sent; what still uses it must be gone."""
        self._held.clear()
        self.held_bytes = 0

    def _made(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        if _is_array(value):
            return self._keep(self._tensor(value))
        if isinstance(value, tvm_ffi.Shape):
            return self._keep(self.function("ffi.Shape")(*map(int, value)))
        if isinstance(value, Mapping):
            if _all_arrays(value.values()):
                return self._keep(self._dict_of_arrays(value))
            entries = [self._made(one) for entry in value.items() for one in entry]
            return self._keep(self.function("ffi.Map")(*entries))
        if _is_sequence(value):
            if _all_arrays(value):
                return self._keep(self._tuple_of_arrays(value))
            return self._keep(self.function("ffi.Array")(*map(self._made, value)))
        return value

    def _keep(self, handle: Any) -> Any:
        self._held.append(handle)
        return handle

    def _tensor(self, value: Any) -> Any:
        return tvm.runtime.tensor(_array(value), self._device)

    def _tuple_of_arrays(self, values: Sequence[Any]) -> Any:
        """The cache copies each tensor, the array holds the copies, and the names are free
        again."""
        prefix = f"tuna_{next(self._numbers)}"
        names = [f"{prefix}_{number}" for number in range(len(values))]
        for name, value in zip(names, values, strict=True):
            self.function("vm.builtin.tensor_cache.update")(name, self._tensor(value), True)
        found = self.function("vm.builtin.param_array_from_cache")(prefix, len(values))
        for name in names:
            self.function("vm.builtin.tensor_cache.remove")(name)
        return found

    def _dict_of_arrays(self, values: Mapping[str, Any]) -> Any:
        params = {name: tvm.runtime.tensor(_array(value)) for name, value in values.items()}
        return self.function("runtime.LoadParams")(bytes(tvm.runtime.save_param_dict(params)))


def _size(value: Any, place: str, depth: int) -> _Size:
    """Return the bytes of a value on the board; raises BadInput, which names its place, for one
    that cannot be sent."""
    if depth > _DEEPEST:
        raise _refused(place, f"it is nested more than {_DEEPEST} deep")
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, bool | float):
        return _Size()
    if isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise _refused(place, "it has more than 64 bits")
        return _Size()
    if isinstance(value, np.dtype) and value.hasobject:
        raise _refused(place, "it is a type of Python objects")
    if isinstance(value, np.dtype | tvm_ffi.dtype):
        return _Size()
    if isinstance(value, str):
        if "\0" in value:
            raise _refused(place, "TVM would cut this text at its NUL")
        return _Size(len(value.encode(errors="surrogateescape")))
    if isinstance(value, bytes | bytearray | memoryview):
        return _Size(len(value))
    if _is_remote(value):
        return _Size()
    if _is_array(value):
        return _Size(_array_bytes(value, place))
    if isinstance(value, tvm_ffi.Shape):
        return _Size(_HANDLE_BYTES + 8 * len(value))
    if isinstance(value, Mapping):
        return _size_of_dict(value, place, depth)
    if _is_sequence(value):
        sizes = [_size(item, f"{place}[{number}]", depth + 1) for number, item in enumerate(value)]
        if _all_arrays(value):
            kept = [part.kept for part in sizes]
            return _Size(_HANDLE_BYTES + sum(kept), max(kept))
        return _of_objects(value, sizes, place, "tuple")
    raise _refused(place, f"it is of type {type(value).__name__}")


def _size_of_dict(value: Mapping[Any, Any], place: str, depth: int) -> _Size:
    sizes = []
    for key, one in value.items():
        at = f"{place}[{json.dumps(key) if isinstance(key, str) else repr(key)}]"
        if not isinstance(key, str | int):
            raise _refused(at, f"its key is of type {type(key).__name__}, not a text or number")
        sizes += [_size(key, at, depth + 1), _size(one, at, depth + 1)]
    if _all_arrays(value.values()):
        if wrong := next((key for key in value if not isinstance(key, str)), None):
            raise _refused(f"{place}[{wrong!r}]", "the key of an array is not a text")
        kept = sum(size.kept for size in sizes)
        return _Size(_HANDLE_BYTES + kept, kept)
    return _of_objects(value.values(), sizes, place, "dict")


def _of_objects(values: Any, sizes: Sequence[_Size], place: str, kind: str) -> _Size:
    if any(_is_array(value) or _is_remote_tensor(value) for value in values):
        why = f"TVM can make a {kind} of arrays alone, or one without any, on a board"
        raise _refused(place, why)
    return sum(sizes, _Size(_HANDLE_BYTES))


def _refused(place: str, why: str) -> BadInput:
    return BadInput(f"{place} cannot be sent to a board: {why}.")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | tvm_ffi.Array) and not isinstance(value, tvm_ffi.Shape)


def _all_arrays(values: Any) -> bool:
    """Whether there are any, and all are arrays to be sent."""
    found = list(values)
    return bool(found) and all(map(_is_array, found))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (
        isinstance(value, tvm.runtime.Tensor) and not _is_remote_tensor(value)
    )


def _is_remote_tensor(value: Any) -> bool:
    return isinstance(value, tvm.runtime.Tensor) and _is_remote_device(value.device)


def _is_remote_device(device: Any) -> bool:
    return bool(device.dlpack_device_type() >= tvm.rpc.base.RPC_SESS_MASK)


def _is_remote(value: Any) -> bool:
    """Whether it is on a board: a tensor, a handle, a module or a device."""
    if isinstance(value, tvm.runtime.Device):
        return _is_remote_device(value)
    if isinstance(value, tvm.runtime.Module):
        return bool(value.kind == "rpc")
    return _is_remote_tensor(value) or type(value).__name__ == "RPCObjectRef"


def _array(value: Any) -> Any:
    return np.ascontiguousarray(value if isinstance(value, np.ndarray) else value.numpy())


def _array_bytes(value: Any, place: str) -> int:
    if not isinstance(value, np.ndarray):
        return math.prod(map(int, value.shape)) * np.dtype(str(value.dtype)).itemsize
    if value.dtype.hasobject or value.dtype.kind not in "biuf":
        raise _refused(place, f"it is an array of {value.dtype}")
    return value.nbytes


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e7 else f"{size_bytes / 1e6:.3f} MB"
