"""Something for command lines to work on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_lines import Ended


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
