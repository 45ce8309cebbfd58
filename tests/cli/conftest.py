"""Something for command lines to work on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended

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


@pytest.fixture
def loaded(type_in: Callable[..., Ended], layers: Path) -> Callable[..., Ended]:
    """A session of the library that does nothing, with 20 jobs."""
    for words in (
        ("go_fish", "noop", "--init_session", "-l", "test"),
        ("go_fish", "noop", "import_configs", "-t", "small", "-f", layers),
        ("go_fish", "noop", "--update_solvers"),
        ("go_fish", "noop", "--update_applicability", "--session_id", 1),
        (
            "load_job",
            "--session_id",
            1,
            "-t",
            "small",
            "--fin_steps",
            "build,measure",
            "-o",
            "-l",
            "test",
        ),
    ):
        ended = type_in(*words)
        assert ended.code == 0, ended
    return type_in
