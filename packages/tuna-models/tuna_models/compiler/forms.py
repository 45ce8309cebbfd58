"""The forms of a model's tensors, and the functions that convert from one to another. Imports TVM.

A form is a layout and a type. A tensor has the forms that its readers have asked for, each made
once; those of whole numbers belong to their base (`integers.py`), as several variables stand for
the same bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from tvm import relax

from tuna.configs.task import TaskConfig
from tuna_models.compiler import blocked, sharing, small_functions
from tuna_models.compiler.blocked import BF16, BYTE, FP32
from tuna_models.compiler.graph import constant_of, extents
from tuna_models.compiler.integers import Integers

OWN = ""  #: the variable's own type


class TensorForm(NamedTuple):
    """The layout and type in which a tensor lies in memory."""

    in_blocks: bool  #: in blocks of channels, else in the model's own layout
    type: str = OWN


PLAIN, BLOCKS = TensorForm(False), TensorForm(True)
BYTES, BYTE_BLOCKS = TensorForm(False, BYTE), TensorForm(True, BYTE)
NARROW, NARROW_BLOCKS = TensorForm(False, BF16), TensorForm(True, BF16)


class Writer:
    """A module that is being written."""

    def __init__(self, made: dict[Any, Any], cores: int) -> None:
        """`made` are functions for as many `cores` that other modules have too, by their keys."""
        self.builder = relax.BlockBuilder()
        self.emit = self.builder.emit
        #: name and task of each function that is not TVM's own
        self.calls: list[tuple[str, TaskConfig | None]] = []
        self._made, self._functions, self._cores = made, dict[Any, Any](), cores
        self._reshaped: dict[Any, Any] = {}  #: the source of each reshaped variable

    def add(
        self, key: Any, make: Callable[[], Any], name: str, task: TaskConfig | None = None
    ) -> Any:
        """The function of this key, made once, which is called next."""
        function = self.function(key, make, name)
        self.calls.append((str(function.name_hint), task))
        return function

    def function(self, key: Any, make: Callable[[], Any], name: str) -> Any:
        """The function of this key, made once; one of TVM's own, unless `add` returns it."""
        if key not in self._functions:
            if key not in self._made:
                self._made[key] = blocked.opaque(sharing.in_parallel(make(), self._cores))
            self._functions[key] = self.builder.add_func(self._made[key], name)
        return self._functions[key]

    def call(
        self, function: Any, args: list[Any], shape: tuple[int, ...] | None, kind: str = FP32
    ) -> Any:
        """The answer of a function, of this shape and type."""
        assert shape is not None
        return self.emit(relax.call_tir(function, args, relax.TensorType(shape, kind)))

    def shaped(self, value: Any, shape: tuple[int, ...]) -> Any:
        """Reshape the value, once for a chain of reshapes."""
        value = self._reshaped.get(value, value)
        if extents(value) == shape:
            return value
        reshaped = self.emit(relax.op.reshape(value, shape))
        self._reshaped[reshaped] = value
        return reshaped

    def fenced(self, value: Any) -> Any:
        """The values of a product, rounded."""
        key = "fence", extents(value), str(value.ty.dtype)
        if key not in self._functions:
            self._functions[key] = self.builder.call_te(small_functions.fence, value).args[0]
        return self.emit(relax.call_tir(self._functions[key], [value], value.ty))


class Forms:
    """The tensors of a model that is being written, by variable and form."""

    def __init__(
        self,
        writer: Writer,
        block: int,
        integers: Integers,
        may_round: Callable[[Any], bool],
    ) -> None:
        """`may_round` says whether a variable may be read as bfloat16 where it is there in its own
        type."""
        self.writer, self.block, self.integers = writer, block, integers
        self.may_round = may_round
        #: of whole numbers by their base
        self.values: dict[tuple[Any, TensorForm], Any] = {}
        self.bounds: dict[Any, float] = {}  #: of values beyond the channels, by variable
        self.derived = set[Any]()  #: variables whose values are made from bytes
        #: sums of windows of bytes (`window_sums.py`), by what they read
        self.window_sums = dict[Any, Any]()
        self._aliases = defaultdict[Any, list[Any]](list)
        for var, base in integers.bases.items():
            self._aliases[base].append(var)

    def get(self, var: Any, form: TensorForm) -> Any:
        """The tensor in a form, which is made for its first reader and kept."""
        if form.type == BYTE:
            var = self.integers.bases[var]
        if (var, form) not in self.values:
            self.values[var, form] = self.converted(var, self._source(var, form), form)
        return self.values[var, form]

    def read(self, var: Any, form: TensorForm) -> Any:
        """The tensor in a form, of bytes for this reader alone: what lies in memory are bytes."""
        if var in self.derived and (var, form) not in self.values:
            return self.converted(var, form._replace(type=BYTE), form)
        return self.get(var, form)

    def converted(self, var: Any, source: TensorForm, to: TensorForm) -> Any:
        """The tensor in a form, made from the one in another."""
        return CONVERSIONS[source, to](self, var, self.get(var, source), source, to)

    def leaf(self, leaf: Any, kind: str = OWN) -> Any:
        """A variable in the model's layout, or a constant; of a type that a kernel reads.

        A constant without values is made when the model runs, because TVM would write a library
        that it refuses to load, unless the first extent is zero.
        """
        values = constant_of(leaf)
        if values is None:
            return self.get(leaf, TensorForm(False, kind))
        if not values.size:
            leaf = self.writer.emit(relax.op.zeros(values.shape, str(values.dtype)))
        return relax.op.astype(leaf, kind) if kind else leaf

    def in_blocks(self, var: Any) -> bool:
        """Whether a tensor is in blocks of channels in any type."""
        if (var, BLOCKS) in self.values or (var, NARROW_BLOCKS) in self.values:
            return True
        return self.has_byte_blocks(var)

    def has_byte_blocks(self, var: Any) -> bool:
        """Whether values in fp32 are made from bytes in blocks of channels."""
        if var not in self.derived or str(var.ty.dtype) != FP32:
            return False
        return (self.integers.bases[var], BYTE_BLOCKS) in self.values

    def _source(self, var: Any, to: TensorForm) -> TensorForm:
        """The form that another is made from."""
        sources = [source for source, each in CONVERSIONS if each == to]
        sources = [source for source in sources if self._has(var, source, to)]
        if to.type == OWN and not self.may_round(var):
            sources.sort(key=lambda source: source.type == BF16)
        return sources[0] if sources else _THROUGH[to]

    def _has(self, var: Any, source: TensorForm, to: TensorForm) -> bool:
        if source.type == BYTE and to.type != BYTE:
            return var in self.derived
        return (var, source) in self.values

    def derive(self, base: Any, but: Any = None) -> None:
        """Make all other forms of a base's bytes from these, but those of one variable."""
        for var in self._aliases[base]:
            if but is not None and var.same_as(but):
                self.derived.discard(var)
                continue
            self.values.pop((var, PLAIN), None)
            self.values.pop((var, BLOCKS), None)
            self.derived.add(var)
            grid = self.integers.grids.get(var)
            self.bounds[var] = 256.0 * max(1.0, grid.scale if grid else 1.0)

    def store(self, base: Any) -> None:
        """Make bytes of whole numbers that operators in fp32 have computed, if there are any."""
        form = next((form for form in (BLOCKS, PLAIN) if (base, form) in self.values), None)
        if form is not None:
            as_bytes = form._replace(type=BYTE)
            self.values[base, as_bytes] = self.converted(base, form, as_bytes)
            self.derive(base)

    def replace(self, var: Any, value: Any) -> None:
        """Let readers have another value of a variable, in blocks if it was there."""
        was_in_blocks = self.values.pop((var, BLOCKS), None) is not None
        for form in (NARROW, NARROW_BLOCKS):
            self.values.pop((var, form), None)
        self.values[var, PLAIN] = value
        if was_in_blocks:
            self.get(var, BLOCKS)

    def replace_bytes(self, var: Any, value: Any, *, in_blocks: bool) -> None:
        """Let readers of all that stands for the same bytes have those of another value, which is
        that of `var` itself."""
        op, emit, integers = relax.op, self.writer.emit, self.integers
        base, grid = integers.bases[var], integers.grids.get(var)
        self.derived.discard(var)
        if in_blocks:
            self.values.pop((var, BLOCKS), None)
            self.get(var, BLOCKS)
        if grid is not None:
            value = emit(op.round(emit(op.divide(value, relax.const(grid.scale, FP32)))))
        offset = grid.stored_zero if grid else 128.0 * integers.signed[base]
        value = emit(op.astype(emit(op.add(value, relax.const(offset, FP32))), BYTE))
        was_in_blocks = self.values.pop((base, BYTE_BLOCKS), None) is not None
        self.values[base, BYTES] = value
        if was_in_blocks:
            self.values[base, BYTE_BLOCKS] = self.converted(base, BYTES, BYTE_BLOCKS)
        self.derive(base, but=var)


Convert = Callable[[Forms, Any, Any, TensorForm, TensorForm], Any]


def _relaid(forms: Forms, var: Any, value: Any, source: TensorForm, to: TensorForm) -> Any:
    """The tensor in the other layout."""
    shape, kinds = extents(var), [form.type or str(var.ty.dtype) for form in (source, to)]
    assert shape is not None
    name = "to_blocks" if to.in_blocks else "from_blocks"
    make = partial(getattr(blocked, name), shape, forms.block, *kinds)
    function = forms.writer.add((name, shape, *kinds), make, name)
    if to.in_blocks:
        shape = blocked.blocked_extents(shape, forms.block)
    return forms.writer.call(function, [value], shape, kinds[1])


def _widened(forms: Forms, _var: Any, value: Any, *_: TensorForm) -> Any:
    """The bfloat16 in fp32, by a function that its readers can do without (`fused.absorbed`)."""
    writer, shape = forms.writer, extents(value)
    assert shape is not None
    make = partial(small_functions.widening, shape)
    return writer.call(writer.function(("widened", shape), make, "to_fp32"), [value], shape)


def _narrowed(forms: Forms, _var: Any, value: Any, *_: TensorForm) -> Any:
    return forms.writer.emit(relax.op.astype(value, BF16))


def as_bytes(forms: Forms, base: Any, value: Any, *_: TensorForm) -> Any:
    """Bytes of whole numbers in fp32, or of a type of eight bits."""
    op, emit, kind = relax.op, forms.writer.emit, str(base.ty.dtype)
    if kind == BYTE:
        return value
    if kind == "int8":
        value = emit(op.astype(value, FP32))
    if forms.integers.signed[base]:
        value = emit(op.add(value, relax.const(128.0, FP32)))
    return emit(op.astype(value, BYTE))


def _real(forms: Forms, var: Any, value: Any, *_: TensorForm) -> Any:
    """The values of a variable, in its own type, from bytes in either layout."""
    op, emit, integers = relax.op, forms.writer.emit, forms.integers
    kind, grid = str(var.ty.dtype), integers.grids.get(var)
    if kind != BYTE:
        value = emit(op.astype(value, FP32))
        zero = 128.0 * integers.signed[integers.bases[var]] if grid is None else grid.stored_zero
        value = emit(op.subtract(value, relax.const(zero, FP32))) if zero else value
    if grid is not None:
        multiplied = emit(op.multiply(value, relax.const(grid.scale, FP32)))
        value = forms.writer.fenced(multiplied)
    return value if kind in (BYTE, FP32) else emit(op.astype(value, kind))


def _real_narrow(forms: Forms, var: Any, value: Any, *at: TensorForm) -> Any:
    return _narrowed(forms, var, _real(forms, var, value, *at))


#: How a form is made from another; of those that are there, the first in this order is taken.
CONVERSIONS: Mapping[tuple[TensorForm, TensorForm], Convert] = {
    (BYTES, PLAIN): _real,
    (BLOCKS, PLAIN): _relaid,
    (NARROW, PLAIN): _widened,
    (NARROW_BLOCKS, PLAIN): _relaid,
    (BYTE_BLOCKS, BLOCKS): _real,
    (NARROW_BLOCKS, BLOCKS): _widened,
    (PLAIN, BLOCKS): _relaid,
    (BYTES, NARROW): _real_narrow,
    (PLAIN, NARROW): _narrowed,
    (NARROW_BLOCKS, NARROW): _relaid,
    (BLOCKS, NARROW): _relaid,
    (BYTE_BLOCKS, NARROW_BLOCKS): _real_narrow,
    (BLOCKS, NARROW_BLOCKS): _narrowed,
    (NARROW, NARROW_BLOCKS): _relaid,
    (PLAIN, NARROW_BLOCKS): _relaid,
    (BYTE_BLOCKS, BYTES): _relaid,
    (PLAIN, BYTES): as_bytes,
    (BLOCKS, BYTE_BLOCKS): as_bytes,
    (BYTES, BYTE_BLOCKS): _relaid,
}
#: The form that is made first where none of those is there
_THROUGH = {BLOCKS: PLAIN, BYTES: PLAIN, BYTE_BLOCKS: BYTES}
