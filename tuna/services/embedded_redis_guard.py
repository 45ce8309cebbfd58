"""Parent of the embedded Redis server, which it ends after the last process that uses it, and not
at a signal that was sent to all: results are still to be drained then.

`main` with LOCK_FD USERS_FILE PROGRAM ARG... starts the program, which inherits the locked file
LOCK_FD and gets what this process reads from its standard input, waits until no process has a lock
on USERS_FILE, and kills the program. If this process is killed, so is the program; if the program
ends, so does this process.

Only the standard library is imported here, so that a start costs what Python costs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from tuna.common.lifetime import end_with_parent


def main(argv: list[str]) -> None:
    """Run the server until its last user has ended."""
    lock, users_file, command = int(argv[0]), argv[1], argv[2:]
    # the server inherits what is blocked, and has a handler in place of what is ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    users = os.open(users_file, os.O_RDWR | os.O_CLOEXEC)
    run_dir, folder = Path(users_file).parent, None
    with contextlib.suppress(OSError):  # the socket lies in `run_dir`
        folder = (run_dir / "socket").readlink()
    configuration = sys.stdin.buffer.read()
    if not configuration:  # our parent was killed before it wrote the password
        return
    server = _start(command, configuration)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{server} on {socket.gethostname()}\n".encode(), 0)
    os.close(lock)  # from here on it is the server's alone
    threading.Thread(target=_kill_after, args=(users, server), daemon=True).start()
    os.waitpid(server, 0)
    if folder:
        _remove(folder, run_dir / "redis.lock")


def _remove(folder: Path, lock_file: Path) -> None:
    """Remove the folder of the socket in TMPDIR, unless another server is being started there."""
    with contextlib.suppress(OSError):  # TUNA_HOME was removed meanwhile
        lock = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    with contextlib.suppress(OSError):
        (folder / "redis.sock").unlink(missing_ok=True)
        folder.rmdir()


def _kill_after(users: int, server: int) -> None:
    fcntl.flock(users, fcntl.LOCK_EX)
    # it has nothing to save, and may be too busy for another signal
    os.kill(server, signal.SIGKILL)


def _start(command: list[str], configuration: bytes) -> int:
    read, write = os.pipe()
    os.write(write, configuration)
    os.close(write)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(read)
        return pid
    try:
        end_with_parent(parent)
        os.dup2(read, 0)
        os.execv(command[0], command)
    finally:
        os._exit(1)
