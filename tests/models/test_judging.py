"""A model is checked against onnxruntime where ONNX's reference has no answer or a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from nets import Net
from test_plan import TARGET, planned

from tuna.api.model_building import judge
from tuna.models import build, onnx_reference, runtimes, timing


def small() -> Any:
    net = Net((4, 9))
    return net.model(net.relu("x"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("judging") / "net.so"
    build.compile_to(planned(small()), tvm.target.Target(TARGET), path)
    return path


def fail(*_: Any) -> Any:
    raise np.exceptions.AxisError(3, 3)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (fail, "ONNX's reference evaluator cannot compute the model (AxisError: axis 3"),
        (lambda _, inputs: [inputs["x"] + 1], "ONNX's reference evaluator is wrong here"),
    ],
)
def test_the_rival_is_asked_though_none_is_to_be_timed(
    reference: Callable[..., Any], said: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"x": np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)}
    right = onnx_reference.run(small(), given)
    monkeypatch.setattr(onnx_reference, "run", reference)
    monkeypatch.setattr(runtimes, "onnxruntime", lambda *_: [lambda: right])
    found = timing.compare(small(), library, given, rivals=False)
    assert found["errors"]["onnxruntime"] < 1e-6
    assert set(found["times_ms"]) == {"tuna"}
    assert judge("17", found, False).startswith(said)


def test_the_rival_is_not_asked_where_the_reference_agrees(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "onnxruntime", fail)
    given = {"x": np.zeros((4, 9), np.float32)}
    found = timing.compare(small(), library, given, rivals=False)
    assert (set(found["errors"]), found["unanswered"]) == ({"reference"}, "")
