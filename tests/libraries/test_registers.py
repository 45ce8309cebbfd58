"""The code that LLVM makes of a kernel keeps the sums of a tile in registers."""

from __future__ import annotations

import re

import pytest
from test_kernels import target_of

tvm = pytest.importorskip("tvm", reason="TVM is not installed: pip install '.[tvm]'")

from tuna.configs import GemmConfig, TaskConfig
from tuna.configs.task import BIAS, GELU, HARD_SWISH, SILU
from tuna.libraries.tvm import problems
from tuna.libraries.tvm.kernels.shape import Mode

#: Moves between vector registers and the stack
_STACK = re.compile(r"\bvmov\w+\s.*\(%r[sb]p")


def inner_loops(assembly: str) -> list[str]:
    """The text of each loop that has no loop in it."""
    lines, places, loops = assembly.splitlines(), dict[str, int](), list[str]()
    begin = 0
    for number, line in enumerate(lines):
        if label := re.match(r"(\.\w+):", line):
            places[label[1]] = number
        jump = re.match(r"\s+j\w+\s+(\.\w+)$", line)
        if jump and places.get(jump[1], -1) >= begin:
            loops.append("\n".join(lines[places[jump[1]] : number]))
            begin = number
    return loops


@pytest.mark.parametrize("k", [384, 768])
@pytest.mark.parametrize("activation", [GELU, SILU, HARD_SWISH])
def test_sums_of_a_product_stay_in_registers_before_an_activation(activation: str, k: int) -> None:
    target = target_of("znver4", **{"num-cores": 2, "opt-level": 3})
    core = GemmConfig(m=128, n=3072, k=k)
    task = TaskConfig(core=core, layouts="native", epilogue=(BIAS, activation))
    problem = problems.with_family(task, "gemm", Mode.NATIVE, target)
    library = tvm.tirx.build(problem.candidate(0).mod, target=target)
    loops = inner_loops(library.inspect_source("s"))
    products = max(loops, key=lambda text: text.count("vfmadd"))
    assert products.count("vfmadd") >= 24
    assert "prefetch" in products, "the next panels are asked for"
    assert not _STACK.findall(products)
