"""One call of an operator of a PyTorch program that becomes Relax: its arguments, and the writer of
Relax. Imports TVM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.relax.frontend.onnx import onnx_frontend

from tuna_models.operators.conversion import Conversion
from tuna_models.reading import converters

#: The version of ONNX's operators that are used
OPSET = 20


@dataclass(frozen=True)
class TorchOperator:
    """A call of an operator that becomes Relax."""

    node: Any
    importer: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by their names in the operator's schema; tensors are Relax variables."""
        declared = self.node.target._schema.arguments
        given = dict(zip((each.name for each in declared), self.node.args, strict=False))
        return {
            each.name: self.importer._retrieve_args(
                given.get(each.name, self.node.kwargs.get(each.name, each.default_value))
            )
            for each in declared
        }

    @property
    def first(self) -> Any:
        """The first argument."""
        return self.importer._retrieve_args(self.node.args[0])

    def emit(self, value: Any) -> Any:
        """A variable for the value."""
        return self.importer.block_builder.emit(value)

    def conversion(self, operator: str, inputs: Sequence[Any], **attributes: Any) -> Conversion:
        """The call as one of an operator of ONNX."""
        attributes["tvm_custom"] = {"num_outputs": 1, "name": str(self.node.name)}
        given = onnx_frontend.onnx_input(list(inputs))
        return Conversion(operator, given, attributes, OPSET, self.importer.block_builder)

    def onnx(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        """The answer of an operator of ONNX."""
        conversion: Any = self.conversion(operator, inputs, **attributes)
        return self.emit(converters.OWN[operator](conversion))
