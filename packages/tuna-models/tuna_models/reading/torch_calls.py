"""One call of an operator of a PyTorch program that becomes Relax: its arguments, and the writer of
Relax. Imports TVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm.relax.frontend.onnx import onnx_frontend

from tuna_models.compiler.graph import Facts, constant
from tuna_models.operators.conversion import Conversion
from tuna_models.operators.quantised import QuantisedConversion
from tuna_models.reading import converters

#: The version of ONNX's operators that are used
OPSET = 20


@dataclass
class TorchProgram:
    """A decomposed program, and the facts that its calls share."""

    exported: Any
    constants: Mapping[str, Any]  #: weights and other constants, by the names of their nodes
    facts: Facts = field(default_factory=Facts)

    @classmethod
    def of(cls, exported: Any) -> TorchProgram:
        """Return the program with its constants."""
        import torch

        values = {**exported.constants, **exported.state_dict}
        constants = {
            spec.arg.name: values[spec.target].detach()
            for spec in exported.graph_signature.input_specs
            if isinstance(values.get(spec.target), torch.Tensor)
        }
        return cls(exported, constants)


@dataclass(frozen=True)
class TorchCall(Conversion):
    """A call of an operator; `attributes` are its arguments by their names in the operator's
    schema: weights are constants, other tensors are Relax variables."""

    node: Any
    importer: Any
    program: TorchProgram

    @classmethod
    def of(cls, program: TorchProgram, node: Any, importer: Any) -> TorchCall:
        """Return the call at a node, which TVM's importer converts."""
        arguments = {
            name: importer._retrieve_args(value)
            if (known := program.constants.get(getattr(value, "name", ""))) is None
            else constant(known.numpy())
            for name, value in by_name(node, node.args, node.kwargs).items()
        }
        return cls(
            *(operator_of(node), (), arguments, OPSET, importer.block_builder),
            *(node, importer, program),
        )

    @property
    def first(self) -> Any:
        """The first argument."""
        return next(iter(self.attributes.values()))

    def conversion(
        self, operator: str, inputs: Sequence[Any], **attributes: Any
    ) -> QuantisedConversion:
        """The call as one of an operator of ONNX."""
        attributes["tvm_custom"] = {"num_outputs": 1, "name": str(self.node.name)}
        given, facts = onnx_frontend.onnx_input(list(inputs)), self.program.facts
        return QuantisedConversion(operator, given, attributes, OPSET, self.builder, facts)

    def onnx(self, operator: str, *inputs: Any, **attributes: Any) -> Any:
        """The answer of an operator of ONNX."""
        return converters.OWN[operator](self.conversion(operator, inputs, **attributes))


#: Converters by the names of operators.
TorchConverters = Mapping[str, Callable[[TorchCall], Any]]


def operator_of(node: Any) -> str:
    """The name of the operator that a node calls; empty for another node."""
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def by_name(node: Any, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """These arguments of a call, and the defaults of others, by their names in the schema."""
    declared = node.target._schema.arguments
    defaults = {each.name: each.default_value for each in declared}
    return defaults | dict(zip(defaults, args, strict=False)) | dict(options)
