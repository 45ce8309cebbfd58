"""Quantised programs of PyTorch. Without torch these tests are skipped."""

from __future__ import annotations

import io
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("PyTorch is not installed: pip install '.[torch]'", allow_module_level=True)

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from compiled import planned, run
from torch.nn import functional

from tuna.configs.values import DataType
from tuna.errors import BadInput
from tuna_models.judging import right_answers
from tuna_models.reading import importer
from tuna_models.reading.torch_importer import TorchModel

OPS = torch.ops.quantized_decomposed


class Static(torch.nn.Module):
    """A convolution and a product as PT2E writes them; activations have limits of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.randint(-127, 128, (16, 8, 3, 3), dtype=torch.int8))
        self.register_buffer("kernel_scales", torch.rand(16) * 1e-3 + 1e-3)
        self.register_buffer("kernel_zeros", torch.zeros(16, dtype=torch.int64))
        self.register_buffer("matrix", torch.randint(-127, 128, (10, 16), dtype=torch.int8))

    def forward(self, x: Any) -> Any:
        x = self.rounded(x, 0.03, 120, 0, 255)
        zeros = self.kernel_zeros, 0, -128, 127, torch.int8
        kernel = OPS.dequantize_per_channel(self.kernel, self.kernel_scales, *zeros)
        y = self.rounded(torch.relu(functional.conv2d(x, kernel, padding=1)), 0.02, 0, 0, 127)
        y = self.rounded(y.mean((2, 3)), 0.01, 0, 0, 255)
        matrix = OPS.dequantize_per_tensor(self.matrix, 0.01, 0, -128, 127, torch.int8)
        return functional.linear(y, matrix)

    @staticmethod
    def rounded(x: Any, scale: float, zero: int, low: int, high: int) -> Any:
        form = scale, zero, low, high, torch.uint8
        return OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *form), *form)


class Dynamic(torch.nn.Module):
    """A product whose input is quantised by its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.randint(-127, 128, (10, 64), dtype=torch.int8))

    def forward(self, x: Any) -> Any:
        scale, zero = OPS.choose_qparams.tensor(x, 0, 255, 2.0**-12, torch.uint8)
        form = scale, zero, 0, 255, torch.uint8
        x = OPS.dequantize_per_tensor.tensor(OPS.quantize_per_tensor.tensor(x, *form), *form)
        matrix = OPS.dequantize_per_tensor(self.matrix, 0.01, 0, -128, 127, torch.int8)
        return functional.linear(x, matrix)


@pytest.mark.parametrize(
    ("module", "shape", "cores", "tensors"),
    [(Static, (1, 8, 6, 6), [DataType.INT8] * 2, 3), (Dynamic, (4, 64), [DataType.FP32], 1)],
)
def test_a_quantised_program_answers_as_pytorch_and_is_cut_where_it_rounds(
    module: Any, shape: tuple[int, ...], cores: list[DataType], tensors: int, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    path, x = tmp_path / "net.pt2", torch.randn(shape)
    torch.export.save(torch.export.export(module().eval(), (x,)), path)
    model = importer.read(path, {})
    found = planned(model)
    assert [task.core.data_type for task, _ in found.tasks() if task.core] == cores
    given = {"x": x.numpy()}
    right = right_answers.of(model, given, 1e-3)
    assert [cut.name for cut in found.cuts] == [answer.name for answer in right.quantised]
    assert len(right.quantised) == tensors
    assert all(np.all(each.low <= each.high) for each in right.quantised)
    (answer,) = run(found, x.numpy())
    np.testing.assert_allclose(answer, right.outputs[0].values, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("space", "hint"),
    [("torchao", "pip install torchao"), ("of_nobody", "export the model without")],
)
def test_operators_that_no_package_registers_are_named(
    space: str, hint: str, tmp_path: Path
) -> None:
    path, buffer = tmp_path / "net.pt2", io.BytesIO()
    torch.export.save(torch.export.export(Dynamic().eval(), (torch.randn(4, 64),)), buffer)
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(path, "w") as changed:
        for member in archive.namelist():
            data = archive.read(member)
            changed.writestr(member, data.replace(b"quantized_decomposed.", f"{space}.".encode()))
    with pytest.raises(BadInput, match=rf"no installed package registers: {space}\.choose_") as no:
        importer.read(path, {})
    assert no.value.hint.startswith(hint)


def test_scales_of_blocks_are_refused_with_operator_and_reason() -> None:
    class Grouped(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            scales = torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int64)
            return OPS.quantize_per_channel(x, *scales, 0, 0, 127, torch.uint8)

    program = torch.export.export(Grouped(), (torch.randn(6, 4),))
    with pytest.raises(BadInput, match=r"quantize_per_channel.*: limits of 0 and 127 need one"):
        importer.to_relax(TorchModel(program, {}), "net")
