"""Layers for command lines to work on."""

from __future__ import annotations

from pathlib import Path

import pytest

LAYERS = """\
# two layers
./bin/MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1
./bin/MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 16 -y 1 -x 1 -F 1
"""


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """A file with two layers."""
    path = tmp_path / "layers.txt"
    path.write_text(LAYERS)
    return path
