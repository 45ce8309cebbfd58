"""A fault: another conversion of one ONNX operator of a small model, as an importer, a compiler or
a kernel may have it. Imports TVM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import numpy_helper, parser
from tvm import relax

from tuna_models.compiler.graph import constant_of
from tuna_models.manifest import Precision
from tuna_models.operators.conversion import Conversion, kind_of
from tuna_models.reading.converters import Importer

FLOAT_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Planted(Conversion):
    """An operator that is converted with a fault."""

    convert: Callable[..., Any]  #: the right converter

    def right(self, *inputs: Any, **attributes: Any) -> Any:
        """The answer of the right converter, with other inputs and attributes where some are
        given."""
        changed = self.inputs if not inputs else onnx_inputs(inputs)
        return self.convert(changed, {**self.attributes, **attributes})

    def op(self, name: str, *values: Any, **more: Any) -> Any:
        """A variable for an operator of Relax; Python's numbers are constants of the first value's
        type."""
        module: Any = relax.op
        for part in name.split("."):
            module = getattr(module, part)
        first = next(value for value in values if not isinstance(value, float))
        given = [
            relax.const(value, kind_of(first)) if isinstance(value, float) else value
            for value in values
        ]
        return self.emit(module(*given, **more))

    def in_bf16(self, value: Any) -> Any:
        """Values that were rounded to bf16 on their way."""
        return self.cast(self.cast(value, "bfloat16"), "float32")


def known(value: Any) -> Any:
    """The values of a constant; None for a variable."""
    return constant_of(value)


def onnx_inputs(inputs: Any) -> Any:
    """Inputs as TVM's converters take them: an index beyond the last gives None."""
    from tvm.relax.frontend.onnx import onnx_frontend

    return onnx_frontend.onnx_input(list(inputs))


@dataclass(frozen=True)
class Fault:
    """A fault with a model that shows it."""

    name: str
    kind: str
    model: Callable[[], Any]
    operator: str  #: the operator of the model that is converted otherwise
    convert: Callable[[Planted], Any]
    precision: Precision = Precision.FP32  #: type by whose rules answers are compared

    def importer(self) -> type[Importer]:
        """An importer with this fault."""
        fault = self

        class Faulty(Importer):
            def _convert_operator(self, op_name: str, inputs: Any, attrs: Any, opset: int) -> Any:
                def right(given: Any, attributes: Any) -> Any:
                    return super(Faulty, self)._convert_operator(op_name, given, attributes, opset)

                if op_name != fault.operator:
                    return right(inputs, attrs)
                node = Planted(op_name, inputs, attrs, opset, self.bb, right)
                return self.bb.normalize(fault.convert(node))

        return Faulty


#: All faults; modules that define some add them here.
FAULTS: list[Fault] = []


def fault(
    kind: str,
    model: Callable[[], Any],
    operator: str,
    precision: Precision = Precision.FP32,
) -> Callable[[Callable[[Planted], Any]], Callable[[Planted], Any]]:
    """Add a fault that has the name of its converter."""

    def add(convert: Callable[[Planted], Any]) -> Callable[[Planted], Any]:
        name = convert.__name__.strip("_").replace("_", " ")
        FAULTS.append(Fault(name, kind, model, operator, convert, precision))
        return convert

    return add


def net(given: str, made: str, nodes: str, **constants: Any) -> Callable[[], Any]:
    """A model in ONNX's textual form, with constants by name."""

    def make() -> Any:
        text = f"net ({given}) => ({made}) {{ {nodes} }}"
        model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 19]> {text}')
        model.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
        )
        return model

    return make


def normal(*shape: int, scale: float = 1.0, kind: Any = np.float32) -> Any:
    return (np.random.default_rng(len(shape)).standard_normal(shape) * scale).astype(kind)


def signed_bytes(*shape: int, low: int = -127) -> Any:
    return np.random.default_rng(3).integers(low, 128, shape).astype(np.int8)


#: An input of a few rows.
ROWS = "float[4,9] x"
