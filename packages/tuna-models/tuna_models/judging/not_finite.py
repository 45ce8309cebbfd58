"""Right answers without a finite value, with which every model agrees: refused with the operator or
the constant that they come from. Imports onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import numpy_helper

from tuna.errors import BadInput
from tuna.libraries.tvm.model_answers import RightOutput
from tuna_models.judging.inputs import is_real
from tuna_models.names import quoted, title
from tuna_models.reading import onnx_reference
from tuna_models.reading.bodies import constants_of
from tuna_models.reading.onnx_graph import MOVING
from tuna_models.reading.torch_importer import TorchModel


def refuse(
    name: str, model: Any, inputs: Mapping[str, Any], answers: Sequence[RightOutput], titles: str
) -> None:
    """Raise BadInput for answers to these inputs of which no floating-point value is finite."""
    real = [each.values for each in answers if is_real(each.values) and np.size(each.values)]
    if not real or any(np.isfinite(values).any() for values in real):
        return
    origin, weights = _origin(model, inputs)
    if weights or origin:
        word = "NaN" if any(np.isnan(values).any() for values in real) else "infinite"
        hint = "give inputs that it is made for: --input FILE.npz, of numpy.savez"
        if weights:
            hint = "the weights are damaged, or training went wrong: export it again"
        raise BadInput(
            f"All answers of {name} are {word}, on {titles}, and agree with whatever is built:"
            f" {weights or origin}.",
            hint=hint,
        )


def _origin(model: Any, inputs: Mapping[str, Any]) -> tuple[str, str]:
    """The first operator that makes NaN, or infinite values, of finite ones, and the first constant
    that has some, in words; empty where there is none."""
    if isinstance(model, TorchModel):
        tensors = model.program.state_dict.items()
        arrays = ((key, value.detach().float().numpy()) for key, value in tensors)
        weights = next(filter(None, (_faults(key, values) for key, values in arrays)), "")
        return "its operators make them of finite numbers", weights
    tensors = constants_of(model.graph)
    constants = {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items()}
    names = list(dict.fromkeys(name for node in model.graph.node for name in node.output if name))
    with np.errstate(all="ignore"):
        made = dict(zip(names, onnx_reference.run(model, inputs, names), strict=True))
    known = {**constants, **inputs, **made}
    for check in (np.isnan, np.isinf):
        for node in model.graph.node:
            given = [name for name in node.input if name in known]
            bad = [name for name in given if _any(check, known[name])]
            if node.op_type in MOVING or not any(
                _any(check, made[name]) for name in node.output if name
            ):
                continue
            faults = (_faults(name, constants[name]) for name in given if name in constants)
            if fault := next(filter(None, faults), ""):
                return "", f"{title(node)} reads {fault}"
            if not bad:
                word = "NaN" if check is np.isnan else "infinite values"
                return f"{title(node)} makes {word} of finite numbers", ""
    return "", ""


def _faults(name: str, values: Any) -> str:
    """The number of a constant's values that are not finite, in words; empty without any."""
    if not is_real(values) or np.isfinite(values).all():
        return ""
    count, word = int(np.isnan(values).sum()), "NaN"
    if not count:
        count, word = int(np.isinf(values).sum()), "infinite"
    return f"the constant {quoted(name)}, of which {count} of {values.size} values are {word}"


def _any(check: Any, values: Any) -> bool:
    return is_real(values) and bool(check(values).any())
