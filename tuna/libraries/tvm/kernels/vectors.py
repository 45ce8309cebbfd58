"""Functions of all lanes of a vector, as LLVM's text: TE has sums over an axis alone, which make no
vectors of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx

#: Text of the functions that make one value of two, half of a vector each
_HALVES = {
    "max": """\
  %c{n} = fcmp ogt <{n} x float> %l{n}, %h{n}
  %v{n} = select <{n} x i1> %c{n}, <{n} x float> %l{n}, <{n} x float> %h{n}""",
    "sum": "  %v{n} = fadd <{n} x float> %l{n}, %h{n}",
}


def in_one(name: str, first: Any) -> Any:
    """The function `name` of the lanes of a vector, given by its `first` lane."""
    return tirx.call_pure_extern("float32", f"tuna_{name}", first)


def of_rows(function: Any, names: Mapping[str, str], size: int) -> Any:
    """Return `function`, where each block of `names` has the function of `size` lanes that it is
    given there."""
    zero, one = tirx.const(0, "int64"), tirx.const(1, "int64")

    def replaced(block: Any) -> Any:
        name = names.get(block.name_hint)
        if name is None:
            return block

        def called(call: Any) -> Any:
            if call.op.name != "tirx.call_pure_extern" or call.args[0].value != f"tuna_{name}":
                return call
            load = call.args[1]
            lanes = [*load.indices[:-1], tirx.Ramp(zero, one, size)]
            vector = tirx.BufferLoad(load.source, lanes)
            return tirx.call_pure_extern("float32", f"tuna_{name}{size}", vector)

        body = tvm_ffi.structural_map(block.body, (ir.Call, called))
        (read,) = block.reads
        whole = [*read.region[:-1], ir.Range.from_min_extent(zero, tirx.const(size, "int64"))]
        return s_tir.SBlock(
            block.iter_vars,
            [ir.TensorRegion(read.source, whole, read.ty)],
            block.writes,
            block.name_hint,
            tirx.AttrStmt(zero, "pragma_import_llvm", _text(name, size), body),
            annotations=block.annotations,
        )

    return function.with_body(tvm_ffi.structural_map(function.body, (s_tir.SBlock, replaced)))


def _text(name: str, size: int) -> str:
    """A function of a vector that halves it until one value is left."""
    lines = [f"define linkonce_odr float @tuna_{name}{size}(<{size} x float> %v{size})"]
    lines.append("  alwaysinline nounwind memory(none) {")
    n = size
    while n > 1:
        half = n // 2
        for letter, first in (("l", 0), ("h", half)):
            order = ", ".join(f"i32 {first + lane}" for lane in range(half))
            lines.append(
                f"  %{letter}{half} = shufflevector <{n} x float> %v{n}, <{n} x float> poison,"
                f" <{half} x i32> <{order}>"
            )
        lines.append(_HALVES[name].format(n=half))
        n = half
    return "\n".join(
        [*lines, "  %r = extractelement <1 x float> %v1, i32 0", "  ret float %r", "}"]
    )
