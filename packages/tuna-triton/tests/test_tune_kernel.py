"""`tuna tune kernel.py` and `tuna import kernel.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuna.cli import tuned

TypeIn = Callable[..., Any]


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sessions that were run: here only noted."""
    ran: list[int] = []
    monkeypatch.setattr(tuned, "work_through", lambda number, **_: ran.append(number) or 0)
    return ran


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers.txt"
    path.write_text("MIOpenDriver conv -n 1 -c 4 -H 8 -W 8 -k 4 -F 1\n")
    return path


EXAMPLES = Path(__file__).parents[3] / "examples" / "triton_kernels"
SHAPES = ("--shapes", EXAMPLES / "shapes.json")


def test_a_kernel_is_imported_with_its_shapes(type_in: TypeIn) -> None:
    for added in (2, 0):
        ended = type_in("tuna", "import", EXAMPLES / "softmax.py", *SHAPES, "-t", "mine")
        assert f"2 layers: {added} added" in ended.out, ended
    listed = type_in("tuna", "configs", "-t", "mine").out
    assert "softmax columns=1024 rows=32" in listed
    (first, _) = map(
        json.loads, type_in("tuna", "configs", "-t", "mine", "--json").out.splitlines()
    )
    again = type_in("tuna", "import", EXAMPLES / "layer_norm.py", *SHAPES, "-t", "other")
    assert "2 layers: 2 added" in again.out
    assert first["shape"] == {"columns": 700, "rows": 48}


@pytest.mark.parametrize("command", ["tune", "import"])
@pytest.mark.parametrize(
    ("old", "new", "words", "said"),
    [
        ("@triton.jit", "", SHAPES, "softmax.py has no kernel"),
        ("return raised /", "return raised.sum() * ", SHAPES, "y_ptr as float64 of shape (48, 1)"),
        ("", "", (), "nothing says for which shapes"),
        ("", "", ("--shapes", EXAMPLES / "softmax.py"), "is not JSON"),
    ],
    ids=range(4),
)
def test_a_kernel_that_is_refused_leaves_nothing(
    type_in: TypeIn,
    tmp_path: Path,
    worked: list[int],
    command: str,
    old: str,
    new: str,
    words: tuple[object, ...],
    said: str,
) -> None:
    path = tmp_path / "softmax.py"
    path.write_text((EXAMPLES / "softmax.py").read_text().replace(old or "\0", new))
    ended = type_in("tuna", command, path, *words, "-t", "mine")
    assert (ended.code, said in ended.err) == (2, True), ended
    assert type_in("tuna", "configs", "-t", "mine").code == 3
    assert worked == []


def test_options_of_layers_are_none_of_a_kernel(type_in: TypeIn, layers: Path) -> None:
    ended = type_in("tuna", "tune", EXAMPLES / "softmax.py", *SHAPES, "--library", "tvm")
    assert "--library is for layers, and FILE is a kernel" in ended.err
    ended = type_in("tuna", "tune", layers, "-t", "small", *SHAPES)
    assert "--shapes is for kernels, and FILE is a list of layers" in ended.err
    ended = type_in("tuna", "import", layers, "-t", "small", *SHAPES)
    assert "is a list of layers: leave --shapes out" in ended.err
