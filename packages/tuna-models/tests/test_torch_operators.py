"""Operators of PyTorch that TVM's importer computes otherwise. Without torch these tests are
skipped."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("PyTorch is not installed: pip install '.[torch]'", allow_module_level=True)

import numpy as np
import torch
from compiled import planned, run
from torch.nn import functional

from tuna.configs import ConvConfig
from tuna.errors import BadInput
from tuna_models.reading import importer
from tuna_models.reading.torch_importer import TorchModel


class Answers(torch.nn.Module):
    """A function of one tensor with many answers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Any) -> Any:
        return self._function(x)


def activations(x: Any) -> Any:
    return (
        functional.selu(x),
        functional.celu(x, 0.3),
        torch.ops.aten.elu(x, 0.7, 1.5, 2.0),
        torch.clamp(x, 0.5, -0.5),
        torch.clamp(x, max=0.3),
        torch.clamp((x * 9).to(torch.int64), min=-2),
    )


def pools(x: Any) -> Any:
    return (
        functional.avg_pool2d(x, 2, divisor_override=3),
        functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        functional.avg_pool2d(x, (3, 2), (2, 1), (1, 0), divisor_override=7),
        functional.avg_pool1d(x[0], 3, 2, 1),
        *functional.max_pool2d(x, 2, return_indices=True),
        functional.adaptive_avg_pool2d(x, (5, 7)),
        functional.adaptive_avg_pool2d(x, (3, 4)),
        functional.adaptive_max_pool2d(x, 4),
    )


def interpolations(x: Any) -> Any:
    ways = ({"scale_factor": 1.7}, {"size": (7, 19)}, {"scale_factor": (0.6, 1.3)})
    return (
        *(functional.interpolate(x, mode="nearest", **way) for way in ways),
        *(functional.interpolate(x, mode="nearest-exact", **way) for way in ways),
        *(functional.interpolate(x, mode="bilinear", **way) for way in ways),
        *(functional.interpolate(x, mode="bicubic", **way) for way in ways),
        *(functional.interpolate(x, mode="bilinear", align_corners=True, **way) for way in ways),
        functional.interpolate(x, size=(5, 9), mode="bilinear", antialias=True),
        functional.interpolate(x, size=(5, 19), mode="bicubic", antialias=True),
        functional.interpolate(x[0], scale_factor=1.7, mode="linear"),
        functional.interpolate(x[None], size=(4, 9, 5), mode="trilinear"),
        functional.interpolate(x, scale_factor=2, mode="nearest"),
    )


def samples(x: Any) -> Any:
    grid = torch.stack([x[:, 0, :5, :6], x[:, 1, :5, :6]], -1) * 0.8
    return (
        functional.grid_sample(x, grid, "bilinear", "zeros", False),
        functional.grid_sample(x, grid, "nearest", "border", False),
        functional.grid_sample(x, grid, "bilinear", "reflection", True),
        functional.grid_sample(x, grid, "bicubic", "border", True),
    )


def reductions(x: Any) -> Any:
    return (
        functional.group_norm(x, 4),
        functional.group_norm(x, 2, torch.linspace(0.5, 2, 8), None, 1e-3),
        functional.group_norm(x[:, :, 0, 0], 2),
        x.amax(1),
        x.amin((2, 3), keepdim=True),
        torch.logsumexp(x, 1),
        x.prod(1),
        (x > 0).to(torch.int32).prod(),
        *x.min(1),
        *torch.var_mean(x, (2, 3), correction=0),
        x.any(1),
        (x > 2).any(),
    )


def arithmetic(x: Any) -> Any:
    y, whole, places = x.flip(1), (x * 9).to(torch.int64), torch.tensor([3, 0, 1])
    return (
        torch.add(x, y, alpha=2.5),
        torch.sub(whole, whole.flip(2), alpha=3),
        torch.rsub(x, y, alpha=2),
        torch.add(x, 3, alpha=2),
        torch.pow(whole, whole.abs() % 3),
        torch.log1p(x.abs() * 1e-5),
        torch.log1p(x.abs()),
        torch.expm1(x * 1e-4),
        x[:, -2],
        x[0, places, :, places],
        x[:, places, :, places],
    )


def in_half(x: Any) -> Any:
    """Sums beyond the largest number of fp16, 65,504."""
    half = x.half()
    many = (half * 0 + 90).reshape(1, -1)
    return half.mean(), many.mean(), many.mean(1), many.sum(1) / 9, torch.softmax(half, -1)


@pytest.mark.parametrize(
    "function", [activations, pools, interpolations, samples, reductions, arithmetic, in_half]
)
def test_operators_answer_as_pytorch_does(function: Any) -> None:
    torch.manual_seed(1)
    x = torch.randn(1, 8, 12, 12)
    model = TorchModel(torch.export.export(Answers(function), (x,)), {})
    answers = run(planned(model), x.numpy())
    near = 2e-3 if function is in_half else 2e-5
    for number, (ours, right) in enumerate(
        zip(answers, model.reference({"x": x.numpy()}), strict=True)
    ):
        assert ours.dtype == right.dtype, number
        np.testing.assert_allclose(ours, right, near, near, err_msg=str(number))


def shapes(x: Any) -> Any:
    batch, channels, height, _ = x.shape
    return (
        x.view(batch * channels, -1),
        x.reshape(batch, channels // 2, 2 * height, -1) + torch.arange(batch)[:, None, None, None],
        functional.max_pool2d(x, 2),
        functional.interpolate(x, scale_factor=1.5),
        functional.interpolate(x, size=(height + 1, 9), mode="bilinear"),
    )


def test_operators_of_open_extents_get_those_that_are_chosen() -> None:
    extents = {
        "x": {0: torch.export.Dim("n", min=1, max=8), 2: torch.export.Dim("h", min=4, max=64)}
    }
    program = torch.export.export(
        Answers(shapes), (torch.randn(2, 8, 12, 12),), dynamic_shapes=extents
    )
    open_extents = [
        str(extent)
        for node in program.graph.nodes
        if node.op == "placeholder"
        for extent in node.meta["val"].shape
        if not isinstance(extent, int)
    ]
    model = TorchModel(program, dict(zip(open_extents, (3, 10), strict=True)))
    x = np.random.default_rng(1).normal(size=(3, 8, 10, 12)).astype(np.float32)
    for ours, right in zip(run(planned(model), x), model.reference({"x": x}), strict=True):
        np.testing.assert_allclose(ours, right, 2e-5, 2e-5)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda x: functional.interpolate(x, size=(5, 9), mode="bilinear", antialias=True,
                                    align_corners=True),
            r"aten\._upsample_bilinear2d_aa.*: antialias with align_corners is not supported",
        ),
        (
            lambda x: functional.adaptive_max_pool2d(x, 5),
            r"aten\.adaptive_max_pool2d.*: its windows, from \(12, 12\) to \(5, 5\), are of",
        ),
    ],
)  # fmt: skip
def test_what_is_not_converted_is_refused_with_operator_and_reason(
    function: Any, reason: str
) -> None:
    program = torch.export.export(Answers(function), (torch.randn(1, 8, 12, 12),))
    with pytest.raises(BadInput, match=f"net cannot be imported: the operator {reason}"):
        importer.to_relax(TorchModel(program, {}), "net")


class Half(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Conv2d(8, 16, 3), torch.nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.first(x)).mean((2, 3)))


def test_convolutions_of_fp16_have_kernels_that_sum_in_fp32() -> None:
    program = torch.export.export(Half().half().eval(), (torch.randn(1, 8, 12, 12).half(),))
    tasks = [task for task, _ in planned(TorchModel(program, {})).tasks() if task.core]
    assert [isinstance(task.core, ConvConfig) for task in tasks] == [True, False]
    assert all(task.epilogue[-1] == "to_fp16" for task in tasks)
