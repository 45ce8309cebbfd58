"""Rewrites the functions of a fused module, and the calls of them in `main`. Imports TVM.

Functions that compute in fp32 read bfloat16 themselves, instead of tensors that are converted
before: TVM fuses a conversion into operators on single values, but not into softmax,
normalisations and several readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import TensorLoad, TensorRegion

from tuna_models.compiler.blocked import BF16, FP32
from tuna_models.names import MAX_CHARS, bounded

#: What a call of a function, with the variable of its answer and its arguments, becomes: another
#: function and arguments; None: it stays
Replacement = Callable[[Any, Any, Sequence[Any]], tuple[Any, Sequence[Any]] | None]


def called(value: Any) -> Any:
    """The global variable of the function that a `call_tir` calls, None for anything else."""
    is_call = isinstance(value, tvm.ir.Call)
    return value.args[0] if is_call and str(getattr(value.op, "name", "")) == _CALL else None


_CALL = "relax.call_tir"


def calls(function: Any) -> Counter[str]:
    """Count the calls of each TIR function, in the order of the first call."""
    values = (binding.value for block in function.body.blocks for binding in block.bindings)
    return Counter(str(name.name_hint) for name in map(called, values) if name is not None)


def with_bounded_names(module: tvm.IRModule) -> tvm.IRModule:
    """The module in which no function that `main` calls has a longer name than `MAX_CHARS`."""
    short = {name: bounded(name) for name in calls(module["main"]) if len(name) > MAX_CHARS}
    if not short:
        return module
    builder = relax.BlockBuilder(module)
    renamed = {
        name: builder.add_func(module[name].with_attr("global_symbol", new), new)
        for name, new in short.items()
    }

    def replacement(_: Any, function: Any, args: Sequence[Any]) -> Any:
        new = renamed.get(str(function.name_hint))
        return None if new is None else (new, args)

    return _with_calls(module, builder, replacement)


def absorbed(module: tvm.IRModule, own: Set[str]) -> tvm.IRModule:
    """Return a fused module in which no function but the `own` ones, by name, reads what another
    has converted from bfloat16 to fp32."""
    builder = relax.BlockBuilder(module)
    sources: dict[Any, Any] = {}  #: the tensor of bfloat16 that a variable has the values of
    made: dict[tuple[Any, tuple[int, ...]], Any] = {}

    def replacement(var: Any, function: Any, args: Sequence[Any]) -> Any:
        if _converts(module[function]):
            sources[var] = args[0]
            return None
        places = tuple(place for place, arg in enumerate(args) if arg in sources)
        if not places or str(function.name_hint) in own:
            return None
        if (function, places) not in made:
            new = _converting(module[function], places)
            made[function, places] = builder.add_func(new, str(function.name_hint))
        return made[function, places], [sources.get(arg, arg) for arg in args]

    return _with_calls(module, builder, replacement)


def _with_calls(module: tvm.IRModule, builder: Any, replacement: Replacement) -> tvm.IRModule:
    """The builder's module, with other calls in `main`."""
    main = module["main"]

    def replaced(binding: Any) -> Any:
        value, function = binding.value, called(binding.value)
        if function is None:
            return binding
        new = replacement(binding.var, function, list(value.args[1].fields))
        if new is None:
            return binding
        args = [new[0], relax.Tuple(new[1]), *value.args[2:]]
        call = tvm.ir.Call(value.op, args, value.attrs, value.ty_args)
        return relax.VarBinding(binding.var, call)

    blocks = [type(block)([*map(replaced, block.bindings)]) for block in main.body.blocks]
    body = relax.SeqExpr(blocks, main.body.body)
    function = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    rewritten = builder.get()
    rewritten.update_func(module.get_global_var("main"), function)
    return relax.transform.DeadCodeElimination()(relax.transform.Normalize()(rewritten))


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
    def load(read: Any) -> Any:
        if not read.source.same_as(old):
            return read
        return tirx.Cast(FP32, tirx.BufferLoad(new, read.indices))

    def region(read: Any) -> Any:
        return tirx.BufferRegion(new, read.region) if read.source.same_as(old) else read

    return tvm_ffi.structural_map(body, [(TensorLoad, load), (TensorRegion, region)])
