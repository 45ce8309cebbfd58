"""Logs as JSON objects under logstash's names, from structlog and from the standard library."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, structlog
from tuna import logs
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
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, second, third = map(json.loads, done.stderr.splitlines())
    assert (first["message"], first["session"], first["job"]) == ("work was taken back", 3, 41207)
    assert (first["level"], first["@version"], first["logger_name"]) == ("WARNING", "1", "tuna.x")
    assert first["@timestamp"].endswith("Z")
    assert second["message"] == 'it said no "quotes"'
    assert "ZeroDivisionError" in third["exception"]


def test_lines_for_people() -> None:
    program = PROGRAM.replace('"json"', '"text"')
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "work was taken back" in done.stderr
    assert "job=41207" in done.stderr
