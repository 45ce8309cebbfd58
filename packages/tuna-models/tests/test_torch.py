"""A module of PyTorch goes through `torch.export`. Without torch these tests are skipped: it is too
large for most machines."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("PyTorch is not installed: pip install '.[torch]'", allow_module_level=True)

import numpy as np
import torch
from compiled import error_of, planned, run

from tuna.configs import ConvConfig
from tuna.errors import BadInput
from tuna_models.judging import inputs
from tuna_models.reading import importer


class BasicBlock(torch.nn.Module):
    """A block of ResNet-18 (He et al. 2016)."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.first_norm = torch.nn.BatchNorm2d(outs)
        self.second = torch.nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.second_norm = torch.nn.BatchNorm2d(outs)
        shortcut = torch.nn.Conv2d(ins, outs, 1, stride, bias=False), torch.nn.BatchNorm2d(outs)
        self.shortcut = torch.nn.Sequential(*(shortcut if stride > 1 else ()))

    def forward(self, x: Any) -> Any:
        y = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(y + self.shortcut(x))


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = (
            torch.nn.Conv2d(3, 16, 7, 2, 3, bias=False),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
        )
        blocks = BasicBlock(16, 16, 1), BasicBlock(16, 32, 2)
        self.body = torch.nn.Sequential(*stem, torch.nn.MaxPool2d(3, 2, 1), *blocks)
        self.classifier = torch.nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        return self.classifier(torch.nn.functional.gelu(self.body(x).mean((2, 3))))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network, exported with an open batch."""
    torch.manual_seed(1)
    batch = {"x": {0: torch.export.Dim("n", min=1, max=64)}}
    program = torch.export.export(
        Network().eval(), (torch.randn(2, 3, 16, 16),), dynamic_shapes=batch
    )
    path = tmp_path_factory.mktemp("torch") / "net.pt2"
    torch.export.save(program, path)
    return path


def test_a_module_is_planned_in_blocks_and_answers_as_pytorch(file: Path) -> None:
    model = importer.read(file, {}, batch=2)
    assert importer.inputs_of(model) == [{"name": "x", "shape": [2, 3, 16, 16], "dtype": "float32"}]
    found = planned(model)
    tasks = [
        task
        for task, count in found.tasks()
        for _ in range(count)
        if isinstance(task.core, ConvConfig)
    ]
    assert len(tasks) == 6
    assert all("bias" in task.epilogue for task in tasks), "batch normalisation is in the weights"
    assert error_of(model, found, inputs.values(importer.inputs_of(model), seed=3)) < 1e-5


def test_an_open_extent_has_to_be_given_and_a_fixed_one_cannot_be_changed(file: Path) -> None:
    with pytest.raises(
        BadInput, match=r"net\.pt2 has open extents in the shape of its input x=(\w+),3,16,16"
    ) as refused:
        importer.read(file, {})
    name = refused.value.hint.removeprefix("give them: --shape ").partition("=N; --batch N")[0]
    assert importer.inputs_of(importer.read(file, {name: [3]}))[0]["shape"][0] == 3
    with pytest.raises(BadInput, match="exported with an extent of 16, not 32"):
        importer.read(file, {"x": [1, 3, 32, 32]})
    with pytest.raises(BadInput, match="no input z"):
        importer.read(file, {"z": [1]})
    with pytest.raises(BadInput, match="has 4 dimensions, not 1"):
        importer.read(file, {"x": [1]})


class Odd(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.linalg.eigvalsh(torch.special.i1(x)) + torch.special.i1e(x).sum()


def test_all_operators_that_cannot_be_imported_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt2"
    torch.export.save(torch.export.export(Odd(), (torch.eye(3),)), path)
    with pytest.raises(
        BadInput, match=r"net has operators that cannot be imported: .*\(1: \w+\), .*\(1: \w+\)"
    ):
        importer.to_relax(importer.read(path, {}), "net")


class Masked(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[x > 0]


class Scaled(torch.nn.Module):
    def forward(self, x: Any, factor: int) -> Any:
        return x * factor


def rewritten(data: bytes, part: str, change: Callable[[bytes], bytes]) -> bytes:
    """A program with another file in the place of one of its archive."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            text = old.read(name)
            new.writestr(name, change(text) if name.endswith(part) else text)
    return stream.getvalue()


def of_schema(text: bytes) -> bytes:
    return json.dumps({**json.loads(text), "schema_version": {"major": 99, "minor": 1}}).encode()


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("models/model.json", of_schema, "does not load: it is of version 99 of the format, and"),
        ("archive_version", lambda _: b"99", "does not load: Saved archive version 99 does not"),
        ("models/model.json", lambda _: b"{}", "does not load: its description is of another form"),
        ("models/model.json", lambda text: text[:-9], "is damaged: its part net/models/model.json"),
    ],
)
def test_a_program_that_torch_does_not_load_is_refused_with_its_version_or_part(
    tmp_path: Path, part: str, change: Callable[[bytes], bytes], reason: str
) -> None:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(3),)), path)
    path.write_bytes(rewritten(path.read_bytes(), part, change))
    with pytest.raises(BadInput) as refused:
        importer.read(path, {})
    assert reason in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("module", "given", "reason"),
    [
        (Masked(), (torch.ones(3),), "the operator aten.index.Tensor (index): TVM's importer does"),
        (Scaled(), (torch.ones(3), 3), r"3, not a tensor."),
    ],
)
def test_a_call_that_is_not_converted_is_named_with_its_arguments(
    tmp_path: Path, module: Any, given: tuple[Any, ...], reason: str
) -> None:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module, given), path)
    with pytest.raises(BadInput, match=re.escape(reason)) as refused:
        importer.to_relax(importer.read(path, {}), "net")
    assert refused.value.hint


class Recurrent(torch.nn.Module):
    """All answers of a recurrent layer."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(5, 7, **options)

    def forward(self, x: Any) -> Any:
        y, ends = self.layer(x)
        return (y, *(ends if isinstance(ends, tuple) else (ends,)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        (torch.nn.LSTM, {"bias": False}),
        (torch.nn.LSTM, {"proj_size": 3}),
        (torch.nn.GRU, {"num_layers": 2}),
        (torch.nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
        (torch.nn.RNN, {}),
    ],
)
def test_a_recurrent_layer_is_one_function_for_all_its_steps(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    module, path = Recurrent(kind, **options).eval(), tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module, (torch.randn(6, 2, 5),)), path)
    model = importer.read(path, {})
    found = planned(model)
    assert error_of(model, found, inputs.values(importer.inputs_of(model), seed=3)) < 1e-5
    steps = sum(count for task, count in found.tasks() if task.name == kind.__name__.lower())
    assert steps == (0 if "proj_size" in options else options.get("num_layers", 1))


class Numbers(torch.nn.Module):
    """Operators that convert what they compute with."""

    def forward(self, x: Any) -> Any:
        positive, large, whole = x > 0, x > 1, (x * 4).to(torch.int64)
        short = (x * 3).to(torch.int32)
        return (
            positive.cumsum(-1),
            torch.diff(whole).ne(1).cumsum(-1) * large[:, 1:],
            short.cumsum(-1),
            positive + large,
            positive * 2,
            positive / 2,
            positive == large,
            positive < 1,
            torch.exp(positive),
            whole * 0.5,
            whole / 2,
            whole // 3,
            1.5 - short,
            whole < 1.5,
            short + whole,
            torch.where(positive, whole, x),
            torch.cat([short, x]),
            torch.sin(whole),
        )


def test_operators_convert_types_as_pytorch_does(tmp_path: Path) -> None:
    path, x = tmp_path / "net.pt2", np.random.default_rng(1).normal(size=(4, 16))
    given = {"x": x.astype(np.float32)}
    torch.export.save(torch.export.export(Numbers(), (torch.randn(4, 16),)), path)
    model = importer.read(path, {})
    found = run(planned(model), *given.values())
    for ours, right in zip(found, model.reference(given), strict=True):
        assert ours.dtype == right.dtype
        np.testing.assert_allclose(ours, right, rtol=1e-5)
