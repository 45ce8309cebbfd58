"""One operator of an ONNX model that becomes Relax: its arguments, and the writer of Relax. Imports
TVM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tuna_models.compiler.graph import constant, constant_of, extents
from tuna_models.refusals import Unsupported

#: ONNX's operators whose work TVM's converter of another one does.
_DONE_BY = {"ConvInteger": "Conv", "QLinearConv": "Conv"}


#: TVM's own converters by ONNX's names; it makes the table anew for each operator.
converters_of_tvm = functools.cache(onnx_frontend._get_convert_map)


@dataclass(frozen=True)
class Conversion:
    """One operator of the model: its arguments, and the writer of Relax."""

    operator: str
    inputs: Any  #: variables; an index beyond the last gives None
    attributes: dict[str, Any]
    opset: int
    builder: Any

    def emit(self, value: Any) -> Any:
        """A variable for the value."""
        return self.builder.emit(value)

    def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A variable for what a function of TVM's tensor expressions computes."""
        name = self.operator.lower()
        return self.builder.emit_te(function, *arguments, primfunc_name_hint=name)

    def of_tvm(self, inputs: list[Any]) -> Any:
        """Convert the operator with other inputs by TVM's importer."""
        operator = _DONE_BY.get(self.operator, self.operator)
        converter = converters_of_tvm()[operator].get_converter(self.opset)
        return self.emit(
            converter(self.builder, onnx_frontend.onnx_input(inputs), self.attributes, [{}, {}])
        )

    def text(self, name: str, default: str) -> str:
        """An attribute that is a text."""
        found = self.attributes.get(name, default)
        return found.decode() if isinstance(found, bytes) else str(found)

    def flag(self, name: str, default: int = 0) -> bool:
        """An attribute that is 0 or 1."""
        return bool(self.attributes.get(name, default))

    def axis(self, default: int) -> int:
        """The attribute `axis` as a number of the first input's axes."""
        return int(self.attributes.get("axis", default)) % len(shape_of(self.inputs[0]))

    def known(self, place: int) -> np.ndarray | None:
        """The values of an input, None if it is absent; raises Unsupported for unknown ones."""
        value = self.inputs[place]
        if value is None:
            return None
        found = constant_of(value)
        if found is None:
            raise Unsupported(f"the values of its input {place} depend on the model's input")
        return found

    def number(self, place: int, default: int) -> int:
        """The one value of an input."""
        found = self.known(place)
        return default if found is None else int(found.reshape(()))

    def shaped(self, value: Any, shape: tuple[int, ...]) -> Any:
        """The values in another shape."""
        known = constant_of(value)
        return (
            self.emit(relax.op.reshape(value, shape))
            if known is None
            else constant(known.reshape(shape))
        )

    def cast(self, value: Any, kind: str) -> Any:
        """The values as another type."""
        known = constant_of(value)
        if kind_of(value) == kind:
            return value
        if known is not None:
            return constant(known.astype(kind))
        return self.emit(relax.op.astype(value, kind))


#: Writers of operators by ONNX's names.
Converters = Mapping[str, Callable[[Conversion], Any]]


def kind_of(value: Any) -> str:
    """The type of a tensor's values."""
    known = constant_of(value)
    return str(value.ty.dtype if known is None else known.dtype)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor; raises Unsupported if it is not known when compiling."""
    known = constant_of(value)
    found = extents(value) if known is None else known.shape
    if found is None:
        raise Unsupported("its shape is not known")
    return tuple(found)
