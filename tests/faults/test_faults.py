"""2,000 jobs on a cluster while processes, servers, disks and clocks fail: no result lost, duplicated or invented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import drill
import pytest
from shared_data import DRILLS


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(1, DRILLS + 1))
def test_a_session_survives_the_faults_of_a_seed(
    seed: int, tmp_path: Path, knows_machine: Callable[[Path], None]
) -> None:
    knows_machine(tmp_path / "home")
    report = drill.run(seed, tmp_path)
    assert report.ok, "\n".join([*report.objections[:20], *report.happened, f"repeat: {drill.repeat(seed)}"])
