"""The order of the compiler's passes, and the reasons why operators have no kernel."""

from __future__ import annotations

import re
from pathlib import Path

import tvm
from compiled import TARGET
from nets import Net

from tuna_models.compiler import passes
from tuna_models.reading import importer


def test_passes_of_the_compiler_are_documented_in_their_order() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    names = re.search(r"The passes, in order: ([^.]*)\.", text)
    assert names is not None
    assert re.findall(r"\*(\w+)\*", names[1]) == [each.name for each in passes.PASSES]


def test_an_operator_without_a_kernel_has_a_reason() -> None:
    net = Net((1, 8, 6, 6))
    y = net.conv("x", 8, 8, 1, norm=False)
    summed = net.add("Add", y, net.constant(net.random.normal(size=(1, 8, 6, 6))))
    model = net.model(net.add("MatMul", summed, net.constant([1.0] * 6)))
    module = importer.to_relax(model, "net")
    assert passes.analyse(module, tvm.target.Target(TARGET)).reasons == {
        "add of 1x8x6x6 and 1x8x6x6": "its constant has several values for a channel",
        "matmul of 1x8x6x6 and 6": "a factor is a vector",
    }
