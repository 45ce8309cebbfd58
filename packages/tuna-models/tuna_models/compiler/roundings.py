"""Writes a model in fp32 whose convolutions and products round as those in bf16 do, each if its
flag says so. Imports TVM.

So one compiled model measures the error that each of them makes at the outputs, alone or with
others. The flags are parameters behind the model's own: fp32 tensors of one value, 1 where the
tensors that the kernel in bf16 reads and writes in bfloat16 are rounded, 0 where they are not. The
flag of the part of the inputs in a recurrent layer's sums is that of its weights, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import relax, te, tirx

from tuna.libraries.tvm.kernels import epilogue, stages
from tuna_models.compiler.blocked import BF16, FP32, opaque
from tuna_models.compiler.emit import Emitter
from tuna_models.compiler.graph import extents
from tuna_models.compiler.kernel_arguments import Chosen, Group
from tuna_models.compiler.passes import Analysis

#: Types of what a kernel reads and writes in bfloat16: weights are packed in pairs
_NARROW = (BF16, "int32")


class RoundingEmitter(Emitter):
    """A model in fp32 with flags, written once by `run`."""

    def __init__(self, analysis: Analysis, kernel: Callable[..., Chosen | None]):
        super().__init__(analysis, kernel)
        storage = analysis.storage
        assert storage is not None
        #: types of what the kernel in bf16 reads and writes, by the answer of its group
        self._kinds = dict[Any, list[str]]()
        for group in analysis.groups:
            in_bf16 = storage.in_bf16(group)
            chosen = None if in_bf16 is None else kernel(in_bf16.task, exact=in_bf16.exact)
            if chosen is not None:
                kinds = [str(param.ty.dtype) for param in chosen.function.params]
                self._kinds[group.answer] = kinds
        self._flags = {
            answer: relax.Var(f"flag{place}", relax.TensorType((1,), FP32))
            for place, answer in enumerate(self._kinds)
        }
        self._storage = None  # everything is in fp32 but where a flag says otherwise
        self.sites = [group for group in analysis.groups if group.answer in self._kinds]

    def _taken(self) -> list[Any]:
        return list(self._flags.values())

    def _with_kernel(self, group: Group) -> tuple[Group, Chosen | None]:
        return group, self._kernel(group.task, exact=True)

    def _called(self, group: Group, function: Any, args: list[Any], *answer: Any) -> Any:
        kinds = self._kinds.get(group.answer, [FP32] * (len(args) + 1))
        read = [
            self._rounded(group, arg) if kind in _NARROW else arg
            for arg, kind in zip(args, kinds, strict=False)
        ]
        value = super()._called(group, function, read, *answer)
        return self._rounded(group, value) if kinds[-1] in _NARROW else value

    def _steps(
        self, function: Any, product: Any, operands: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        if product in self._kinds:
            value, weights, *others = operands
            operands = [value, self._rounded(self._groups[product], weights), *others]
        return super()._steps(function, product, operands)

    def _rounded(self, group: Group, value: Any) -> Any:
        """The tensor, in bfloat16 if the group's flag says so."""
        shape = extents(value)
        assert shape is not None
        count = math.prod(shape)
        function = self._writer.add(("rounding", count), partial(_rounding, count), "rounding")
        flat = self._writer.shaped(value, (count,))
        args = [flat, self._flags[group.answer]]
        return self._writer.shaped(self._writer.call(function, args, (count,)), shape)


def _rounding(count: int) -> Any:
    """Round `count` values to bfloat16 if the flag is not 0."""
    x, flag = te.placeholder((count,), FP32, "X"), te.placeholder((1,), FP32, "F")

    def value(i: Any) -> Any:
        narrow = epilogue.in_fp32(epilogue.rounded(x[i], BF16))
        return tirx.Select(flag[0] > tirx.const(0.0, FP32), narrow, x[i])

    return opaque(stages.module_of([x, flag, te.compute((count,), value, name="out")])["main"])
