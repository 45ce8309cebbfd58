"""Logs as JSON objects under logstash's names, from structlog and from the standard library."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import logging, structlog
from tuna.common import logs
logs.configure("INFO", "json")
structlog.get_logger("tuna.x").warning("work was taken back", session=3, job=41207)
logging.getLogger("celery").error("it said %s", 'no "quotes"')
structlog.get_logger("tuna.x").debug("not shown")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("x").exception("bad")
"""


def test_json_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    first, second, third = map(json.loads, done.stderr.splitlines())
    assert (first["message"], first["session"], first["job"]) == ("work was taken back", 3, 41207)
    assert (first["level"], first["@version"], first["logger_name"]) == ("WARNING", "1", "tuna.x")
    assert first["@timestamp"].endswith("Z")
    assert second["message"] == 'it said no "quotes"'
    assert "ZeroDivisionError" in third["exception"]


def test_lines_for_people() -> None:
    program = PROGRAM.replace('"json"', '"text"')
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "work was taken back" in done.stderr
    assert "job=41207" in done.stderr


SIMULATED = {**os.environ, "TUNA_SIMULATED": "1"}
WORKER = """
import redis, tempfile
from tuna.artifacts.store import Artifacts
from pathlib import Path
from tuna.common import logs
from tuna.libraries.items import WorkItem
from tuna.libraries.context import RunContext
from tuna.libraries.registry import get_library
from tuna.workers.runner import Runner
from tuna.queue.messages import Chunk

logs.configure("INFO", "json")
library = get_library("noop")

def fails(*_):
    raise RuntimeError("no luck")

folder = Path(tempfile.gettempdir())
store = Artifacts(folder.as_uri(), folder)

class Link:
    def lease(self, *_): return self
    def elsewhere(self, *_): return Elsewhere()
    def __getattr__(self, name): return lambda *_: True

from tuna.workers.link import Elsewhere
library.run = fails
item = dict(attempt=1, session_id=3, library="noop", step="build", solver="Noop1", config={})
item |= dict(target="", seed=0)
item["config"] = {"kind": "gemm", "m": 1, "n": 1, "k": 1}
for ids in ([41], [42, 43]):
    items = tuple(WorkItem(job_id=number, **item) for number in ids)
    names = dict(id="c", namespace="n", library="noop", step="build", environment="", toolchain="")
    chunk = Chunk(items=items, **names)
    Runner(Link(), RunContext(store, folder, ())).run(chunk, library)
"""


def test_a_worker_s_lines_say_which_work_they_are_about() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, check=True, env=SIMULATED
    )
    one, two = [json.loads(line) for line in done.stderr.splitlines() if "library failed" in line]
    assert (one["session"], one["job"], one["step"], one["chunk"]) == (3, 41, "build", "c")
    assert ":" in one["worker"]
    assert two["jobs"] == [42, 43]
