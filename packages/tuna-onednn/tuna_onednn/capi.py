"""oneDNN's C API (version 3) by ctypes, as far as Tuna needs it. Loads foreign code: only children
of the sandbox import it.

Names and numbers are those of `dnnl.h`, `dnnl_types.h` and `dnnl_common_types.h`, which are stable
within a major version; another one is refused when the library is loaded.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from functools import cached_property

from tuna.errors import LibraryMissing

MAJOR = 3
#: Arguments of a primitive, DNNL_ARG_*.
SRC, DST, WEIGHTS, DIFF_SRC, DIFF_DST = 1, 17, 33, 129, 145
DATA_TYPES: Mapping[str, int] = {"float16": 1, "bfloat16": 2, "float32": 3, "int32": 4, "int8": 5}
_MAX_DIMS = 12
_SUCCESS, _UNIMPLEMENTED, _LAST_IMPL_REACHED = 0, 3, 4
_STATUS = (
    "success",
    "out of memory",
    "invalid arguments",
    "unimplemented",
    "last implementation reached",
    "runtime error",
)
_CPU, _STREAM_DEFAULT, _FORWARD_INFERENCE, _CONVOLUTION_AUTO, _TAG_ANY = 1, 1, 96, 3, 1
_QUERY_IMPL_INFO, _QUERY_EXEC_ARG_MD = 8, 255
_ALLOCATE = c_void_p(-1)
_RUNTIMES = {0: "none", 1: "sequential", 2: "omp", 4: "tbb", 8: "threadpool", 512: "dpcpp"}
_ISAS = {
    0x1: "sse41",
    0x3: "avx",
    0x7: "avx2",
    0xF: "avx2_vnni",
    0x1F: "avx2_vnni_2",
    0x27: "avx512_core",
    0x67: "avx512_core_vnni",
    0xE7: "avx512_core_bf16",
    0x1EF: "avx512_core_fp16",
    0xFEF: "avx512_core_amx",
    0x1FEF: "avx512_core_amx_fp16",
}
#: Bits of an instruction set with dot products of bytes, of AVX2 and of AVX-512.
_VNNI = 0x8 | 0x40
_Dims = c_int64 * _MAX_DIMS
_Out = POINTER(c_void_p)


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    )


class _ExecArg(ctypes.Structure):
    _fields_ = (("arg", c_int), ("memory", c_void_p))


#: Argument types; what a function returns is a status unless `_RESULTS` says otherwise.
_FUNCTIONS: Mapping[str, Sequence[object]] = {
    "dnnl_version": (),
    "dnnl_get_effective_cpu_isa": (),
    "dnnl_primitive_desc_query_md": (c_void_p, c_int, c_int),
    "dnnl_engine_create": (_Out, c_int, c_size_t),
    "dnnl_stream_create": (_Out, c_void_p, c_uint),
    "dnnl_stream_wait": (c_void_p,),
    "dnnl_memory_desc_create_with_strides": (_Out, c_int, _Dims, c_int, _Dims),
    "dnnl_memory_desc_create_with_tag": (_Out, c_int, _Dims, c_int, c_int),
    "dnnl_memory_desc_equal": (c_void_p, c_void_p),
    "dnnl_memory_desc_destroy": (c_void_p,),
    "dnnl_memory_create": (_Out, c_void_p, c_void_p, c_void_p),
    "dnnl_memory_destroy": (c_void_p,),
    "dnnl_convolution_forward_primitive_desc_create": (
        *(_Out, c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p),
        *(_Dims, _Dims, _Dims, _Dims, c_void_p),
    ),
    "dnnl_convolution_backward_data_primitive_desc_create": (
        *(_Out, c_void_p, c_int, c_void_p, c_void_p, c_void_p),
        *(_Dims, _Dims, _Dims, _Dims, c_void_p, c_void_p),
    ),
    "dnnl_matmul_primitive_desc_create": (_Out, *(c_void_p,) * 6),
    "dnnl_reorder_primitive_desc_create": (_Out, *(c_void_p,) * 5),
    "dnnl_primitive_desc_next_impl": (c_void_p,),
    "dnnl_primitive_desc_query": (c_void_p, c_int, c_int, c_void_p),
    "dnnl_primitive_desc_destroy": (c_void_p,),
    "dnnl_primitive_create": (_Out, c_void_p),
    "dnnl_primitive_destroy": (c_void_p,),
    "dnnl_primitive_execute": (c_void_p, c_void_p, c_int, POINTER(_ExecArg)),
}
_RESULTS = {
    "dnnl_version": POINTER(_Version),
    "dnnl_get_effective_cpu_isa": c_int,
    "dnnl_primitive_desc_query_md": c_void_p,
    "dnnl_memory_desc_equal": c_int,
}


class DnnlError(Exception):
    """A function of oneDNN's returned a status other than success."""

    def __init__(self, function: str, status: int) -> None:
        name = _STATUS[status] if 0 <= status < len(_STATUS) else f"status {status}"
        super().__init__(f"{function}: {name}")
        self.status = status


class Handle:
    """An object of oneDNN's, destroyed with this one unless it belongs to another; `needs` live as
    long."""

    def __init__(self, library: Dnnl, value: c_void_p, destroy: str, *needs: Handle) -> None:
        self.value = self._as_parameter_ = value
        self._needs = needs
        if destroy:
            weakref.finalize(self, getattr(library.functions, destroy), value)


class DnnlPrimitive(Handle):
    """A primitive with its arguments: what is executed."""

    def __init__(
        self, library: Dnnl, value: c_void_p, arguments: Mapping[int, Handle], *needs: Handle
    ) -> None:
        super().__init__(library, value, "dnnl_primitive_destroy", *arguments.values(), *needs)
        pairs = [_ExecArg(number, memory.value) for number, memory in arguments.items()]
        self._execute = library.functions.dnnl_primitive_execute
        self._wait, self._stream = library.functions.dnnl_stream_wait, library.stream
        self._count, self._arguments = len(pairs), (_ExecArg * len(pairs))(*pairs)

    def run(self) -> None:
        """Execute it once and wait for the end; raises DnnlError."""
        status = self._execute(self.value, self._stream, self._count, self._arguments)
        status = status or self._wait(self._stream)
        if status:
            raise DnnlError("dnnl_primitive_execute", status)

    def call_without_work(self) -> None:
        """The same calls through Python, refused by oneDNN at once: what they cost beside the
        work."""
        status = self._execute(None, self._stream, self._count, self._arguments)
        self._wait(self._stream)
        assert status, "a primitive that is not there was executed"


class Dnnl:
    """A loaded oneDNN with its CPU engine and one stream; raises LibraryMissing for what is none,
    or of another version."""

    def __init__(self, path: str) -> None:
        try:
            self.functions = ctypes.CDLL(path)
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self.functions, name)
                function.argtypes, function.restype = arguments, _RESULTS.get(name, c_int)
        except (OSError, AttributeError) as error:
            raise LibraryMissing(f"oneDNN cannot be loaded: {error}") from error
        found = self.functions.dnnl_version().contents
        if found.major != MAJOR:
            raise LibraryMissing(
                f"{path} is oneDNN {found.major}.{found.minor}; Tuna knows version {MAJOR}."
            )
        self.version = f"{found.major}.{found.minor}.{found.patch}"
        self.runtime = _RUNTIMES.get(found.cpu_runtime, str(found.cpu_runtime))
        self._engine = self._new("dnnl_engine_create", _CPU, 0)
        self.stream = self._new("dnnl_stream_create", self._engine, _STREAM_DEFAULT)

    @cached_property
    def isa(self) -> str:
        """The instruction set for which it generates code on this CPU."""
        value = self._isa()
        return _ISAS.get(value, f"isa_{value:#x}" if value else "generic")

    @property
    def has_vnni(self) -> bool:
        """Whether that set has dot products of bytes, without which int8 convolutions are not
        exact."""
        return bool(self._isa() & _VNNI)

    def _isa(self) -> int:
        return int(self.functions.dnnl_get_effective_cpu_isa())

    def _new(self, function: str, *arguments: object) -> c_void_p:
        value = c_void_p()
        status = getattr(self.functions, function)(byref(value), *arguments)
        if status != _SUCCESS:
            raise DnnlError(function, status)
        return value

    def strided(self, dims: Sequence[int], data_type: str, strides: Sequence[int]) -> Handle:
        """The description of a tensor in memory; strides are in elements."""
        return self._description("strides", dims, data_type, _dims(strides))

    def any(self, dims: Sequence[int], data_type: str) -> Handle:
        """The description of a tensor in the layout that the implementation chooses."""
        return self._description("tag", dims, data_type, _TAG_ANY)

    def _description(self, by: str, dims: Sequence[int], data_type: str, last: object) -> Handle:
        arguments = (len(dims), _dims(dims), DATA_TYPES[data_type], last)
        made = self._new(f"dnnl_memory_desc_create_with_{by}", *arguments)
        return Handle(self, made, "dnnl_memory_desc_destroy")

    def equal(self, one: Handle, other: Handle) -> bool:
        """Whether two descriptions are of the same layout."""
        return bool(self.functions.dnnl_memory_desc_equal(one, other))

    def memory(self, description: Handle, address: int | None = None) -> Handle:
        """Memory of oneDNN's own, or that at `address`."""
        place = _ALLOCATE if address is None else c_void_p(address)
        made = self._new("dnnl_memory_create", description, self._engine, place)
        return Handle(self, made, "dnnl_memory_destroy", description)

    def implementations(
        self, name: str, x: Handle, w: Handle, y: Handle, geometry: Sequence[Sequence[int]] = ()
    ) -> Implementations:
        """Return the implementations of `convolution_forward`, `convolution_backward_data` (x is
        dy, y is dx) or `matmul` (x, w, y are A, B, C).

        `geometry`: strides, dilations less 1, left and right padding, by spatial axis.
        """
        sizes = tuple(map(_dims, geometry))
        arguments = {
            "convolution_forward": (_FORWARD_INFERENCE, _CONVOLUTION_AUTO, x, w, None, y, *sizes),
            "convolution_backward_data": (_CONVOLUTION_AUTO, y, w, x, *sizes, None),
            "matmul": (x, w, None, y),
        }[name]
        function = f"dnnl_{name}_primitive_desc_create"
        try:
            made = self._new(function, self._engine, *arguments, None)
        except DnnlError as error:
            if error.status != _UNIMPLEMENTED:
                raise
            return Implementations(self, None)
        return Implementations(self, Handle(self, made, "dnnl_primitive_desc_destroy"))

    def reorder(self, source: Handle, source_md: Handle, target: Handle, target_md: Handle) -> None:
        """Copy a tensor from one memory to another, changing its layout."""
        function = "dnnl_reorder_primitive_desc_create"
        made = self._new(function, source_md, self._engine, target_md, self._engine, None)
        description = Handle(self, made, "dnnl_primitive_desc_destroy")
        value = self._new("dnnl_primitive_create", description)
        DnnlPrimitive(self, value, {SRC: source, DST: target}, description).run()


class Implementations:
    """The implementations that oneDNN lists for an operation, best first by its own judgement; one
    is current."""

    def __init__(self, library: Dnnl, description: Handle | None) -> None:
        self._library, self._description = library, description

    def __iter__(self) -> Iterator[str]:
        """The name of each, which is current until the next is asked for."""
        counts: dict[str, int] = {}
        while self._description is not None:
            name = c_char_p()
            query = self._library.functions.dnnl_primitive_desc_query
            status = query(self._description, _QUERY_IMPL_INFO, 0, byref(name))
            if status:
                raise DnnlError("dnnl_primitive_desc_query", status)
            text = (name.value or b"").decode()
            counts[text] = counts.get(text, 0) + 1
            yield text if counts[text] == 1 else f"{text} #{counts[text]}"
            status = self._library.functions.dnnl_primitive_desc_next_impl(self._description)
            if status == _LAST_IMPL_REACHED:
                return
            if status:
                raise DnnlError("dnnl_primitive_desc_next_impl", status)

    def choose(self, name: str) -> None:
        """Make the one of that name current; raises LookupError if oneDNN does not list it here."""
        if not any(name == found for found in self):
            raise LookupError(
                f"oneDNN {self._library.version} does not list {name} for this layer and layout"
            )

    def description_of(self, argument: int) -> Handle:
        """The layout that the current one wants for an argument; until another is current."""
        assert self._description is not None
        query = self._library.functions.dnnl_primitive_desc_query_md
        value = c_void_p(query(self._description, _QUERY_EXEC_ARG_MD, argument))
        return Handle(self._library, value, "", self._description)

    def primitive(self, arguments: Mapping[int, Handle]) -> DnnlPrimitive:
        """The current one, compiled; raises DnnlError."""
        assert self._description is not None
        made = self._library._new("dnnl_primitive_create", self._description)
        return DnnlPrimitive(self._library, made, arguments, self._description)


def _dims(values: Sequence[int]) -> ctypes.Array[c_int64]:
    return _Dims(*values)
