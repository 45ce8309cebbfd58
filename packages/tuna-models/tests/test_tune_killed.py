"""kill -9 in the middle of tuning a model: the next call goes on, and nothing that is known is
measured again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import sqlalchemy as sa
from jobs_builder import accepted, states
from nets import Net
from shared_data import DRILLS

from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.db.models import Job, TrialRow
from tuna_models import api

_KILLS = 2 if DRILLS == 1 else 10
_TUNE = f"from tuna_models import api; api.tune_model('net', candidates={min(DRILLS, 2)})"


def measured() -> dict[tuple[int, int], object]:
    """When each trial of a finished job was measured."""
    with reading(open_database()) as connection:
        rows = connection.execute(
            sa.select(TrialRow.job_id, TrialRow.number, TrialRow.measured_at)
            .join(Job)
            .where(Job.state == "evaluated")
        )
        return {(row.job_id, row.number): row.measured_at for row in rows}


def kill_when(reached: Callable[[], bool]) -> int | None:
    """Tune in another process and kill it then; the exit code if it ends before."""
    process = subprocess.Popen([sys.executable, "-c", _TUNE])
    try:
        while process.poll() is None and not reached():
            time.sleep(0.1)
    finally:
        process.kill()
    return process.wait() if process.returncode is None else process.returncode


@pytest.mark.drill(only=True)
@pytest.mark.usefixtures("forked", "quick_timing")
@pytest.mark.usefixtures("home")
@pytest.mark.timeout(600)
def test_tuning_goes_on_after_kills_and_measures_nothing_twice(tmp_path: Path) -> None:
    net, path = Net((1, 16, 6, 6)), tmp_path / "net.onnx"
    # Whole vectors of any CPU, so that no two of these become the same task.
    x = net.relu(net.conv(net.relu(net.conv("x", 16, 16, 1)), 16, 32, 1))
    onnx.save(net.model(net.conv(x, 32, 16, 1, norm=False)), path)
    api.import_model("net", path)
    for number in range(_KILLS):
        before = measured()
        if number % 2:
            kill_when(lambda before=before: len(measured()) > len(before))
        else:
            kill_when(lambda: "compiling" in states(open_database()))
        assert before.items() <= measured().items()
    before = measured()
    assert subprocess.run([sys.executable, "-c", _TUNE], timeout=500, check=False).returncode == 0
    assert before.items() <= measured().items()
    assert states(open_database()) == {"evaluated": 3}
    good = accepted(open_database())
    assert sorted((job, step) for job, step, _ in good) == [
        (job, step) for job in (1, 2, 3) for step in ("compile", "eval")
    ]
    assert all(count == 1 for *_, count in good)
