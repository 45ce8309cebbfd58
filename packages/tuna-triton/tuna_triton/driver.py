"""The first visible NVIDIA device through its driver, `libcuda`, alone: memory, kernels, graphs and
events. Neither a toolkit nor another package is needed, and no program is started.

Numbers of attributes and errors are those of cuda.h; the functions are documented in NVIDIA's "CUDA
Driver API". Kernels are launched as Triton's own launcher does (triton/backends/nvidia/driver.py
and driver.c of 3.5, 3.6 and 3.8).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping
from ctypes import byref
from dataclasses import dataclass

import numpy as np

from tuna.libraries.kernels import DeviceLost, DeviceUnusable
from tuna_triton.artifact import GLOBAL_SCRATCH, PARAM_FORMATS, PROFILE_SCRATCH, Launch, Param

LIBRARY = "libcuda.so.1"
_V, _I, _U, _Z, _D = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_uint64,
)
#: The functions that are called, with the types of their arguments.
_FUNCTIONS: Mapping[str, tuple[type, ...]] = {
    "cuInit": (_U,),
    "cuGetErrorName": (_I, _V),
    "cuGetErrorString": (_I, _V),
    "cuDeviceGet": (_V, _I),
    "cuDeviceGetName": (_V, _I, _I),
    "cuDeviceGetAttribute": (_V, _I, _I),
    "cuDevicePrimaryCtxRetain": (_V, _I),
    "cuCtxSetCurrent": (_V,),
    "cuStreamCreate": (_V, _U),
    "cuStreamSynchronize": (_V,),
    "cuStreamBeginCapture_v2": (_V, _I),
    "cuStreamEndCapture": (_V, _V),
    "cuGraphInstantiateWithFlags": (_V, _V, ctypes.c_ulonglong),
    "cuGraphLaunch": (_V, _V),
    "cuGraphDestroy": (_V,),
    "cuGraphExecDestroy": (_V,),
    "cuEventCreate": (_V, _U),
    "cuEventRecord": (_V, _V),
    "cuEventSynchronize": (_V,),
    "cuEventElapsedTime": (_V, _V, _V),
    "cuMemAlloc_v2": (_V, _Z),
    "cuMemFree_v2": (_D,),
    "cuMemcpyHtoD_v2": (_D, _V, _Z),
    "cuMemcpy2D_v2": (_V,),
    "cuMemcpyDtoDAsync_v2": (_D, _D, _Z, _V),
    "cuMemsetD8Async": (_D, ctypes.c_ubyte, _Z, _V),
    "cuModuleLoadData": (_V, _V),
    "cuModuleUnload": (_V,),
    "cuModuleGetFunction": (_V, _V, ctypes.c_char_p),
    "cuFuncGetAttribute": (_V, _I, _V),
    "cuFuncSetAttribute": (_V, _I, _I),
    "cuFuncSetCacheConfig": (_V, _I),
    "cuLaunchKernel": (_V, _U, _U, _U, _U, _U, _U, _U, _V, _V, _V),
}
#: CU_DEVICE_ATTRIBUTE_*
_UNITS, _L2_BYTES, _MAJOR, _MINOR = 16, 38, 75, 76
_SHARED_BYTES = 97
#: CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, MAX_DYNAMIC_SHARED_SIZE_BYTES; CU_FUNC_CACHE_PREFER_SHARED
_STATIC_SHARED, _DYNAMIC_SHARED, _PREFER_SHARED = 1, 8, 1
#: Dynamic shared memory that a kernel has without asking for more.
_USUAL_SHARED_BYTES = 48 << 10
#: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_CAPTURE_THREAD = 1
#: Errors after which each later call of the process fails: contained memory error, illegal address,
#: timeout, context destroyed, assertion, stack, instruction, alignment, address space, program
#: counter, launch failure, tensor memory leak, unknown.
_STICKY = frozenset({226, 700, 702, 709, 710, *range(714, 720), 721, 999})
#: Errors of the device itself: driver shut down, unavailable, none, invalid, ECC, NVLink.
_LOST = frozenset({4, 46, 100, 101, 214, 220})
_HOST, _ON_DEVICE = 1, 2  #: CU_MEMORYTYPE_*


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D: of each side its place, kind of memory, address and bytes between rows."""

    _fields_ = [
        *(
            (f"{side}_{name}", kind)
            for side in ("source", "target")
            for name, kind in (
                *(("x", _Z), ("y", _Z), ("memory", _U), ("host", _V)),
                *(("device", _D), ("array", _V), ("pitch", _Z)),
            )
        ),
        ("width", _Z),
        ("height", _Z),
    ]


class CudaError(Exception):
    """A call of the driver failed; later calls may succeed."""


@dataclass(frozen=True)
class CudaFacts:
    """Properties of the device."""

    name: str
    arch: str  #: such as sm_90
    units: int  #: streaming multiprocessors
    l2_bytes: int
    shared_bytes: int  #: most that a block can ask for


class Cuda:
    """The device, opened for this process. Work goes to one stream, in order.

    What is raised: CudaError; DeviceUnusable where the process must end, because every later call
    would fail; DeviceLost where the device does not answer.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, types in _FUNCTIONS.items():
                getattr(self._library, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise DeviceLost(f"the NVIDIA driver cannot be used: {error}") from error
        try:
            self._call("cuInit", 0)
            self._device = ctypes.c_int()
            self._call("cuDeviceGet", byref(self._device), 0)
            context = _V()
            self._call("cuDevicePrimaryCtxRetain", byref(context), self._device)
            self._call("cuCtxSetCurrent", context)
            self._stream = _V()
            self._call("cuStreamCreate", byref(self._stream), 0)
            self._events = [_V(), _V()]
            for event in self._events:
                self._call("cuEventCreate", byref(event), 0)
        except (CudaError, DeviceUnusable) as error:
            raise DeviceLost(f"the device cannot be opened: {error}") from error

    @functools.cached_property
    def facts(self) -> CudaFacts:
        """The device's properties."""
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), self._device)
        return CudaFacts(
            name=name.value.decode(errors="replace"),
            arch=f"sm_{self._attribute(_MAJOR)}{self._attribute(_MINOR)}",
            units=self._attribute(_UNITS),
            l2_bytes=self._attribute(_L2_BYTES),
            shared_bytes=self._attribute(_SHARED_BYTES),
        )

    @property
    def stream(self) -> int:
        """The handle of the stream."""
        return self._stream.value or 0

    def allocate(self, size: int) -> int:
        """The address of `size` bytes, aligned to 256."""
        address = _D()
        self._call("cuMemAlloc_v2", byref(address), max(size, 1))
        return address.value

    def free(self, address: int) -> None:
        """Free what `allocate` returned; what fails here fails again in the next call."""
        self._library.cuMemFree_v2(address)

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the device."""
        self._call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)

    def download(self, address: int, pitch: int, rows: np.ndarray) -> None:
        """Copy into the rows of a contiguous array from every `pitch` bytes of the device."""
        height, width = len(rows), rows.nbytes // len(rows)
        copy = _Copy(
            source_memory=_ON_DEVICE,
            source_device=address,
            source_pitch=pitch,
            target_memory=_HOST,
            target_host=rows.ctypes.data,
            target_pitch=width,
            width=width,
            height=height,
        )
        self.synchronize()
        self._call("cuMemcpy2D_v2", byref(copy))

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device, in the stream."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, size, self._stream)

    def fill(self, address: int, byte: int, size: int) -> None:
        """Set each byte, in the stream."""
        self._call("cuMemsetD8Async", address, byte, size, self._stream)

    def synchronize(self) -> None:
        """Wait for the stream's work; raises what went wrong in it."""
        self._call("cuStreamSynchronize", self._stream)

    def load(self, binary: bytes) -> ctypes.c_void_p:
        """Load a cubin; to be given to `unload`."""
        module = _V()
        self._call("cuModuleLoadData", byref(module), ctypes.create_string_buffer(binary))
        return module

    def unload(self, module: ctypes.c_void_p) -> None:
        """Free a module; what fails here fails again in the next call."""
        self._library.cuModuleUnload(module)

    def kernel(self, module: ctypes.c_void_p, launch: Launch) -> ctypes.c_void_p:
        """The kernel of a launch, prepared for the shared memory that it asks for."""
        kernel = _V()
        self._call("cuModuleGetFunction", byref(kernel), module, launch.symbol.encode())
        self._allow_shared(kernel, launch.shared_bytes)
        return kernel

    def _allow_shared(self, kernel: ctypes.c_void_p, shared_bytes: int) -> None:
        most = self.facts.shared_bytes
        if shared_bytes <= _USUAL_SHARED_BYTES or most <= _USUAL_SHARED_BYTES:
            return
        static = ctypes.c_int()
        self._call("cuFuncSetCacheConfig", kernel, _PREFER_SHARED)
        self._call("cuFuncGetAttribute", byref(static), _STATIC_SHARED, kernel)
        self._call("cuFuncSetAttribute", kernel, _DYNAMIC_SHARED, most - static.value)

    def prepared(
        self, kernel: ctypes.c_void_p, launch: Launch, addresses: Mapping[str, int]
    ) -> Callable[[], None]:
        """A function that launches a kernel in the stream; `addresses` of its buffers by name."""
        values = [_slot(param, addresses) for param in launch.params]
        slots = ctypes.create_string_buffer(b"".join(values), 8 * len(values) or 1)
        start = ctypes.addressof(slots)
        arguments = (_V * len(values))(*(start + 8 * place for place in range(len(values))))
        sizes = (*launch.grid, launch.num_warps * launch.warp_size, 1, 1, launch.shared_bytes)

        def run(kept: object = slots) -> None:
            self._call("cuLaunchKernel", kernel, *sizes, self._stream, arguments, None)

        return run

    def graph(self, work: Callable[[], object]) -> ctypes.c_void_p:
        """A graph of what `work` puts into the stream; to be given to `destroy`."""
        graph, made = _V(), _V()
        self._call("cuStreamBeginCapture_v2", self._stream, _CAPTURE_THREAD)
        try:
            work()
        except BaseException:
            self._library.cuStreamEndCapture(self._stream, byref(graph))  # the first error counts
            raise
        self._call("cuStreamEndCapture", self._stream, byref(graph))
        self._call("cuGraphInstantiateWithFlags", byref(made), graph, 0)
        self._call("cuGraphDestroy", graph)
        return made

    def destroy(self, graph: ctypes.c_void_p) -> None:
        """Free a graph; what fails here fails again in the next call."""
        self._library.cuGraphExecDestroy(graph)

    def launch_graph(self, graph: ctypes.c_void_p) -> None:
        """Launch a graph in the stream."""
        self._call("cuGraphLaunch", graph, self._stream)

    def time_ms(self, work: Callable[[], object]) -> float:
        """Milliseconds that the device takes for what `work` puts into the stream."""
        begin, end = self._events
        self._call("cuEventRecord", begin, self._stream)
        work()
        self._call("cuEventRecord", end, self._stream)
        self._call("cuEventSynchronize", end)
        found = ctypes.c_float()
        self._call("cuEventElapsedTime", byref(found), begin, end)
        return found.value

    def _attribute(self, number: int) -> int:
        found = ctypes.c_int()
        self._call("cuDeviceGetAttribute", byref(found), number, self._device)
        return found.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> Exception:
        words = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            found = ctypes.c_char_p()
            if getattr(self._library, function)(code, byref(found)) == 0 and found.value:
                words.append(found.value.decode(errors="replace"))
        message = f"{name}: {': '.join(words) or 'unknown error'} ({code})"
        if code in _LOST:
            return DeviceLost(message)
        return DeviceUnusable(message) if code in _STICKY else CudaError(message)


def _slot(param: Param, addresses: Mapping[str, int]) -> bytes:
    """A parameter's bytes, in a slot of eight."""
    value = addresses[param.buffer] if param.type == "ptr" else param.value
    return struct.pack(PARAM_FORMATS[param.type], value).ljust(8, b"\0")


class DeviceMemory:
    """Memory of the device that is freed together."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._addresses: list[int] = []

    def __enter__(self) -> DeviceMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, size: int, alignment: int = 256) -> int:
        """The address of `size` bytes."""
        self._addresses.append(self._cuda.allocate(size + max(alignment - 256, 0)))
        return -(-self._addresses[-1] // alignment) * alignment

    def close(self) -> None:
        """Free all of it."""
        for address in self._addresses:
            self._cuda.free(address)
        self._addresses.clear()


def scratch(launch: Launch, memory: DeviceMemory) -> dict[str, int]:
    """Addresses of the scratch memory that a kernel of Triton's asks for, for all programs of its
    grid; a null pointer where it asks for none."""
    programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
    asked = {
        GLOBAL_SCRATCH: (launch.global_scratch_bytes, launch.global_scratch_align),
        PROFILE_SCRATCH: (launch.profile_scratch_bytes, launch.profile_scratch_align),
    }
    return {
        name: memory.allocate(programs * size, align) if size else 0
        for name, (size, align) in asked.items()
    }
