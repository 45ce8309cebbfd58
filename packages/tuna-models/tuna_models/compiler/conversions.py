"""Reads bfloat16 in the functions that compute in fp32, instead of converting whole tensors before.
Imports TVM.

TVM itself fuses a conversion into operators on single values, but not into softmax, normalisations
and several readers.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import TensorLoad, TensorRegion

from tuna_models.compiler.blocked import BF16, FP32


def absorbed(module: tvm.IRModule, own: Set[str]) -> tvm.IRModule:
    """Return a fused module in which no function but the `own` ones, by name, reads what another
    has converted from bfloat16 to fp32."""
    builder, main = relax.BlockBuilder(module), module["main"]
    sources: dict[Any, Any] = {}  #: the tensor of bfloat16 that a variable has the values of
    made: dict[tuple[Any, tuple[int, ...]], Any] = {}

    def replaced(binding: Any) -> Any:
        value, called = binding.value, _called(binding.value)
        if called is None:
            return binding
        given = list(value.args[1].fields)
        if _converts(module[called]):
            sources[binding.var] = given[0]
            return binding
        if str(called.name_hint) in own:
            return binding
        places = tuple(place for place, arg in enumerate(given) if arg in sources)
        if not places:
            return binding
        if (called, places) not in made:
            function = _converting(module[called], places)
            made[called, places] = builder.add_func(function, str(called.name_hint))
        args = [made[called, places], relax.Tuple([sources.get(arg, arg) for arg in given])]
        call = tvm.ir.Call(value.op, [*args, *value.args[2:]], value.attrs, value.ty_args)
        return relax.VarBinding(binding.var, call)

    blocks = [
        type(block)([replaced(binding) for binding in block.bindings]) for block in main.body.blocks
    ]
    body = relax.SeqExpr(blocks, main.body.body)
    found = builder.get()
    function = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    found.update_func(module.get_global_var("main"), function)
    return relax.transform.DeadCodeElimination()(relax.transform.Normalize()(found))


def _called(value: Any) -> Any:
    """The global variable of the function that a `call_tir` calls, None for anything else."""
    is_call = isinstance(value, tvm.ir.Call)
    return value.args[0] if is_call and str(getattr(value.op, "name", "")) == _CALL else None


_CALL = "relax.call_tir"


def _converts(function: Any) -> bool:
    """Whether the function does nothing but convert a tensor from bfloat16 to fp32."""
    if [_kind(param) for param in function.params] != [BF16, FP32]:
        return False
    stores = list[Any]()
    tvm_ffi.structural_walk(function.body, (tirx.BufferStore, stores.append))
    if len(stores) != 1 or not isinstance(cast := stores[0].value, tirx.Cast):
        return False
    load = cast.value
    return isinstance(load, TensorLoad) and [*map(str, load.indices)] == [
        *map(str, stores[0].indices)
    ]


def _kind(param: Any) -> str:
    return str(param.ty.dtype)


def _converting(function: Any, places: Sequence[int]) -> Any:
    """The function with parameters of bfloat16 in these places, converted where it reads them."""
    params = list(function.params)
    for place in places:
        old = params[place]
        new = tirx.decl_buffer(list(old.shape), BF16, old.name)
        function = function.with_body(_rewritten(function.body, old, new))
        params[place] = new
    return tirx.PrimFunc(params, function.body, function.ret_type, function.attrs, function.span)


def _rewritten(body: Any, old: Any, new: Any) -> Any:
    def load(found: Any) -> Any:
        if not found.source.same_as(old):
            return found
        return tirx.Cast(FP32, tirx.BufferLoad(new, found.indices))

    def region(found: Any) -> Any:
        return tirx.BufferRegion(new, found.region) if found.source.same_as(old) else found

    return tvm_ffi.structural_map(body, [(TensorLoad, load), (TensorRegion, region)])
