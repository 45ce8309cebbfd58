"""Whether a model can be planned in another precision than that of its file. Imports TVM."""

from __future__ import annotations

from typing import Any

from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna.libraries.tvm.kernels import machine
from tuna_models.compiler.build import Planned
from tuna_models.manifest import Precision

_WITHOUT = "without --precision bf16 it is tuned in the types of the file"


def check_target(precision: Precision, target: Any) -> None:
    """Raise BadInput for a target that has no instruction for the precision."""
    if precision is Precision.BF16 and "bf16" not in machine.from_target(target).words:
        cpu = target.attrs.get("mcpu", "the target")
        raise BadInput(
            f"bf16 needs a CPU with avx512_bf16, which {cpu} does not have.", hint=_WITHOUT
        )


def check_plan(precision: Precision, planned: Planned, name: str) -> None:
    """Raise BadInput for a plan of the model `name` that has nothing in the precision."""
    if precision is not Precision.BF16:
        return
    cores = (task.core for task, _ in planned.tasks())
    if not any(core and core.data_type is DataType.BF16 for core in cores):
        raise BadInput(
            f"{name} has no convolution or product in fp32 that bf16 would make faster.",
            hint=_WITHOUT,
        )
