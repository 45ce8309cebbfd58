"""These tests need TVM and onnx."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from shared_data import need

collect_ignore: list[str] = []
for package in ("tvm", "onnx"):
    if find_spec(package) is None:
        need(None, f"{package} (pip install '.[tvm,onnx]')")


@pytest.fixture(scope="module", autouse=True)
def _forked(forked_children: None) -> None:
    """No test here is about how the process with TVM starts."""
