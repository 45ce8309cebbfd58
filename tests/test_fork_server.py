"""A fork is the process that `subprocess.Popen` would have started, but for the time of its
imports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import ForkServer
from shared_data import DRILLS

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(DRILLS > 1, reason="in drills nothing is forked"),
]
SHOW = """\
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[:2], "cwd": os.getcwd(), "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(), "env": dict(os.environ), "in": sys.stdin.read(),
    "fds": sorted(map(int, os.listdir("/proc/self/fd"))),
    "imported": "sqlalchemy" in sys.modules,
}))
print("said", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("session", [False, True])
def test_a_fork_has_the_arguments_variables_files_and_parent_that_were_given(
    tmp_path: Path, session: bool
) -> None:
    read, write = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", SHOW, "a b"], input="given", capture_output=True, text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": "/elsewhere", "ONE": "1"}, pass_fds=[read], start_new_session=session,
        check=False, timeout=60,
    )  # fmt: skip
    os.close(write)
    os.close(read)
    assert (done.returncode, done.stderr) == (7, "said\n")
    shown = json.loads(done.stdout)
    assert shown["imported"], "it is a fork"
    assert (shown["argv"], shown["path"]) == (["-c", "a b"], ["", "/elsewhere"])
    assert (shown["cwd"], shown["in"], shown["parent"]) == (str(tmp_path), "given", os.getpid())
    assert shown["env"] == {"PYTHONPATH": "/elsewhere", "ONE": "1"}
    assert shown["leads"] is session
    assert {0, 1, 2, read} <= set(shown["fds"])
    assert write not in shown["fds"]


def test_a_fork_whose_parent_is_no_more_ends(tuna_forks: ForkServer) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    asked = json.dumps({"parent": ended.pid}).encode()
    socket.send_fds(tuna_forks._socket, [asked], [])  # nobody may be left after this test
    assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0


@pytest.mark.parametrize(
    ("end", "code", "error"), [("", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "no\n")]
)
def test_it_ends_as_a_program_does(end: str, code: int, error: str) -> None:
    """It writes what is buffered, waits for its threads, and does what is registered for its end,
    though it frees no objects."""
    text = (
        "import atexit, sys, threading, time; atexit.register(print, 'registered');"
        "threading.Timer(0.05, print, ['thread']).start(); sys.stdout.write('buffered ');" + end
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        code,
        "buffered thread\nregistered\n",
        error,
    )
