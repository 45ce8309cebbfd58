"""Reads a program of `torch.export` (a .pt2 file) into Relax. Imports TVM and torch."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from tuna.common.messages import install_extra, last_line, one_line
from tuna.errors import BadInput, LibraryMissing
from tuna_models.arguments import chosen_extents, refuse_obstacles
from tuna_models.compiler import segments
from tuna_models.reading import (
    file_kinds,
    torch_operators,
    torch_packages,
    torch_quantised,
    torch_recurrent,
    torch_types,
)
from tuna_models.reading.torch_calls import TorchCall, TorchProgram, operator_of
from tuna_models.refusals import (
    CHANGE_HINT,
    REASON_CHARS,
    Refusal,
    Unsupported,
    refusals_of,
    tvm_reason,
)


@dataclass(frozen=True)
class TorchModel:
    """An exported program, and the values of the extents that it leaves open, by their names."""

    program: Any
    sizes: Mapping[str, int]

    @property
    def version(self) -> str:
        """The version of torch that imports the program."""
        import torch

        return f"torch {torch.__version__}"

    def inputs(self) -> list[dict[str, Any]]:
        """Name, shape and NumPy's name of the type of each input."""
        return [
            {
                "name": name,
                "shape": [
                    self.sizes[extent] if isinstance(extent, str) else extent for extent in extents
                ],
                "dtype": str(kind).removeprefix("torch."),
            }
            for name, extents, kind in _inputs(self.program)
        ]

    def reference(self, inputs: Mapping[str, Any]) -> list[Any]:
        """PyTorch's own answers."""
        import torch

        with torch.no_grad():
            answer = self.program.module()(*(torch.from_numpy(array) for array in inputs.values()))
        return [part.numpy() for part in ([answer] if isinstance(answer, torch.Tensor) else answer)]

    def quantised(self, inputs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """PyTorch's own values of the quantised tensors by their names, and the real ones before
        they were rounded, in steps."""
        import torch

        module, pairs = self.program.module(), list[tuple[Any, Any]]()
        nodes = set(torch_quantised.rounding(module.graph))
        names = [str(node.name) for node in torch_quantised.rounding(self.program.graph)]
        if not nodes:
            return {}

        interpreter = torch.fx.Interpreter(module)
        run = interpreter.run_node

        def recorded(node: Any) -> Any:
            answer = run(node)
            if node in nodes:
                given = interpreter.fetch_args_kwargs_from_env(node)
                pairs.append((answer.numpy(), torch_quantised.real_values(node, *given)))
            return answer

        interpreter.run_node = recorded
        with torch.no_grad():
            interpreter.run(*(torch.from_numpy(array) for array in inputs.values()))
        return dict(zip(names, pairs, strict=True))

    def to_relax(self, name: str) -> tvm.IRModule:
        """Convert to Relax; raises BadInput with every operator that cannot be imported.

        The last results of a quantised one are its quantised tensors (`segments.py`).
        """
        program = _returning(_decomposed(self.program, name))
        refuse_obstacles(name, _unsupported(program), {})
        self._fix_extents(program)
        shared = TorchProgram.of(program)

        def convert(node: Any, importer: Any) -> Any:
            return torch_operators.CONVERTERS[operator_of(node)](
                TorchCall.of(shared, node, importer)
            )

        own = dict.fromkeys(torch_operators.CONVERTERS, convert)
        with refusals_of(name):
            module = _importer().from_exported_program(program, False, True, False, own)
        names = [str(node.name) for node in torch_quantised.rounding(self.program.graph)]
        return shared.facts.on(segments.named(module, names))

    def _fix_extents(self, program: Any) -> None:
        """Give the inputs of a decomposed program their shapes, of which TVM infers all others."""
        import torch

        shapes = {given["name"]: given["shape"] for given in self.inputs()}
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in shapes:
                value = node.meta["val"]
                fixed = torch.empty(shapes[node.name], dtype=value.dtype, device="meta")
                node.meta = {**node.meta, "val": fixed, "tensor_meta": fixed}


def read(path: Path, shapes: Mapping[str, Sequence[int]], batch: int | None = None) -> TorchModel:
    """Load a program with inputs of these shapes; `batch` is the first extent of the others.

    Only extents that were exported as dynamic can be chosen, also by their names. Raises BadInput,
    in one message for all extents that stay open and all operators that cannot be imported.
    """
    name, data = path.name, path.read_bytes()
    if not file_kinds.is_program(data):
        raise file_kinds.refusal(name, io.BytesIO(data))
    try:
        import torch
    except ImportError:
        raise LibraryMissing(
            "Programs of torch.export need PyTorch.", hint=install_extra("tvm", "onnx", "torch")
        ) from None
    torch_packages.register(name, data)
    with torch_packages.LoadWarnings() as warnings:
        try:
            program = torch.export.load(io.BytesIO(data))
        except Exception as error:  # torch and zipfile each have their own
            reason = torch_packages.damage(data)
            if reason:
                raise BadInput(f"{name} is damaged: {reason}.", hint=file_kinds.AGAIN) from error
            raise BadInput(
                f"{name} is a program that torch {torch.__version__} does not load:"
                f" {torch_packages.version_fault(data) or warnings.reason(error)}.",
                hint="export it again with this version, or install the one that wrote it",
            ) from error
    _check_tensors(name, program)
    exported = {label: extents for label, extents, _ in _inputs(program)}
    sizes, chosen = chosen_extents(name, exported, shapes, batch, fixed=True)
    if any(isinstance(extent, str) for extents in chosen.values() for extent in extents):
        refuse_obstacles(name, _unsupported(_decomposed(program, name)), chosen)
    return TorchModel(program, sizes)


def _check_tensors(name: str, program: Any) -> None:
    """Raise BadInput for inputs and outputs that are no tensors."""
    from torch.export.graph_signature import InputKind, TensorArgument

    (output,) = program.graph.find_nodes(op="output")
    others = [
        f"input {spec.arg.name} is {getattr(spec.arg, 'value', 'a number')}"
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT and not isinstance(spec.arg, TensorArgument)
    ]
    others += [
        f"output {place} is {argument}"
        for place, argument in enumerate(output.args[0])
        if argument is not None and not hasattr(argument, "meta")
    ]
    if others:
        raise BadInput(
            f"{name} cannot be imported: its {one_line(others[0], REASON_CHARS)}, not a tensor.",
            hint="export a module that takes and returns tensors alone",
        )


def _decomposed(program: Any, name: str) -> Any:
    try:
        return torch_types.written_out(
            torch_recurrent.decomposed(program, torch_operators.CONVERTERS)
        )
    except Exception as error:  # torch raises whatever its decompositions do
        said = str(error).strip() or type(error).__name__
        reason = last_line(said, REASON_CHARS).rstrip(".")
        raise BadInput(
            f"{name} cannot be imported: torch does not write out its operators by simpler ones:"
            f" {reason}.",
            hint=CHANGE_HINT,
        ) from error


def _importer() -> Any:
    """TVM's importer, whose errors name the operator."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    def named(convert: Callable[..., Any]) -> Callable[..., Any]:
        def converted(node: Any, *importer: Any) -> Any:
            try:
                return convert(node, *importer)
            except Unsupported as error:
                raise _refusal(node, str(error)) from error
            except Refusal:  # of an operator inside of this one
                raise
            except Exception as error:  # TVM raises whatever its converters do
                said = tvm_reason(error)
                why = f"TVM's importer {f'does not take it so: {said}' if said else 'fails at it'}"
                raise _refusal(node, f"{why}; {_described(node)}") from error

        return converted

    class Importer(ExportedProgramImporter):  # type: ignore[misc]
        def update_convert_map(self, custom_convert_map: dict[str, Any]) -> None:
            super().update_convert_map(custom_convert_map)
            converters = self.__dict__["convert_map"]
            converters.update({name: named(each) for name, each in converters.items()})

    return Importer()


def _refusal(node: Any, reason: str) -> Refusal:
    return Refusal(reason, CHANGE_HINT, str(node.target), str(node.name))


def _described(node: Any) -> str:
    """The arguments of a call, for messages."""
    parts = []
    for argument in (*node.args, *node.kwargs.values()):
        value = getattr(argument, "meta", {}).get("val")
        if value is None:
            parts.append(str(argument))
        else:
            kind = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
            parts.append(f"{argument} {kind}{list(getattr(value, 'shape', ()))}")
    return one_line(f"its arguments are {', '.join(parts)}", 2 * REASON_CHARS)


def _returning(program: Any) -> Any:
    """The decomposed program, which returns its quantised tensors after its own answers."""
    from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

    tensors = torch_quantised.rounding(program.graph)
    (output,) = program.graph.find_nodes(op="output")
    output.args = ((*output.args[0], *tensors),)
    program.graph_signature.output_specs.extend(
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=str(node.name)), None)
        for node in tensors
    )
    return program


def _inputs(program: Any) -> list[tuple[str, list[int | str], Any]]:
    """Name, extents (a name for one that is open) and type of each input but the weights."""
    wanted = set(program.graph_signature.user_inputs)
    found = []
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in wanted:
            value = node.meta["val"]
            extents = [extent if isinstance(extent, int) else str(extent) for extent in value.shape]
            found.append((str(node.name), extents, value.dtype))
    return found


def _unsupported(program: Any) -> dict[str, list[str]]:
    """The calls of each operator that TVM's importer does not know."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    known = {*ExportedProgramImporter().convert_map, *torch_operators.CONVERTERS}
    found: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and operator_of(node) not in known:
            found.setdefault(str(node.target), []).append(str(node.name))
    return found
