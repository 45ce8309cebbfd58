"""What the child of the sandbox's tests can do, most of it bad."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import termios
import time
from typing import Any


def echo(value: Any) -> dict[str, Any]:
    return {
        "value": value,
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "env": dict(os.environ),
    }


def fail() -> dict[str, Any]:
    raise ValueError("no such luck")


class Unusable(Exception):
    """As a loader raises it."""

    ends = "process"


def give_up() -> dict[str, Any]:
    raise Unusable("no context")


def crash() -> dict[str, Any]:
    print("last words", flush=True)
    ctypes.string_at(0)
    return {}


def leave(code: int) -> dict[str, Any]:
    os._exit(code)


def hang() -> dict[str, Any]:
    """Never answer, together with a process that was started to help."""
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"helper {helper.pid}", flush=True)
    time.sleep(600)
    return {}


def chatter(megabytes: int) -> dict[str, Any]:
    for _ in range(megabytes):
        os.write(1, b"x" * (1 << 20))
    os.write(1, b"the end")
    return {"done": True}


def allocate(megabytes: int) -> dict[str, Any]:
    return {"bytes": len(bytearray(megabytes << 20))}


def garbage(text: str) -> dict[str, Any]:
    """Write `text` where the answers go, as a stray file descriptor would."""
    for fd in range(3, 4096):
        try:
            if os.fstat(fd).st_mode & 0o170000 == 0o010000:
                os.write(fd, text.encode())
        except OSError:
            continue
    time.sleep(600)
    return {}


def answer_twice(text: str) -> dict[str, Any]:
    """After the next answer, once it has been read, write `text` where it went."""
    main = sys.modules["__main__"]
    answer = main._answer

    def twice(handlers: Any, request: Any, answers: Any) -> None:
        answer(handlers, request, answers)
        unread = bytearray(4)
        while (
            unread and fcntl.ioctl(answers.fileno(), termios.FIONREAD, unread) == 0 and any(unread)
        ):
            pass
        os.write(answers.fileno(), text.encode())

    main._answer = twice
    return {}


def large(megabytes: int) -> dict[str, Any]:
    return {"text": "y" * (megabytes << 20)}


def burn(seconds: float, helpers: int = 0) -> dict[str, Any]:
    """Use CPU time in this process, or in as many helpers as are asked for, one after the other."""
    program = f"import time\nwhile time.process_time() < {seconds}: pass"
    for _ in range(helpers):
        subprocess.run([sys.executable, "-c", program], check=True)
    while not helpers and time.process_time() < seconds:
        pass
    return {"done": True}


def wait(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return {"done": True}


def imported(name: str) -> dict[str, Any]:
    """Whether this process has imported a module."""
    return {"there": name in sys.modules}


HANDLERS = {
    function.__name__: function
    for function in (
        echo,
        fail,
        give_up,
        crash,
        leave,
        hang,
        chatter,
        allocate,
        garbage,
        answer_twice,
        large,
        burn,
        wait,
        imported,
    )
}
