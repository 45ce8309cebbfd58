"""The parent of the embedded Redis server: ends it when the last process that uses it has ended, in whatever way.

`python -I -S embedded_redis_guard.py LOCK_FD USERS_FILE PROGRAM ARG...` starts the program, which inherits the locked file
LOCK_FD, waits until no process has a lock on USERS_FILE, and kills the program. If this process is killed, so is the program.

Only the standard library is imported here, so that a start costs what Python costs.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def main(lock: int, users_file: str, command: list[str]) -> None:
    """Run the server until its last user has ended."""
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
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() == parent:
            os.execv(command[0], command)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
