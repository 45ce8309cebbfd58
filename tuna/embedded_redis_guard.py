"""The parent of the embedded Redis server: ends it when the last process that uses it has ended, in whatever way.

`main` with LOCK_FD USERS_FILE PROGRAM ARG... starts the program, which inherits the locked file LOCK_FD, waits until no
process has a lock on USERS_FILE, and kills the program. If this process is killed, so is the program.

Only the standard library is imported here, so that a start costs what Python costs.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket

from tuna.sandbox.parent import end_with_parent


def main(argv: list[str]) -> None:
    """Run the server until its last user has ended."""
    lock, users_file, command = int(argv[0]), argv[1], argv[2:]
    users = os.open(users_file, os.O_RDWR | os.O_CLOEXEC)
    server = _start(command)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{server} on {socket.gethostname()}\n".encode(), 0)
    os.close(lock)  # from here on it is the server's alone
    fcntl.flock(users, fcntl.LOCK_EX)
    os.kill(server, signal.SIGKILL)  # it has nothing to save, and may be too busy for another signal
    os.waitpid(server, 0)


def _start(command: list[str]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        if end_with_parent(parent=parent):
            os.execv(command[0], command)
    finally:
        os._exit(1)
