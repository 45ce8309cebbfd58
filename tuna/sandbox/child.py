"""The first code of every sandboxed process: puts limits on itself, then runs a program or answers requests.

`python -m tuna.sandbox.child LIMITS exec PROGRAM ARG...` replaces itself by the program.
`python -m tuna.sandbox.child LIMITS serve MODULE READ_FD WRITE_FD IMPORT...` answers one JSON object per line. A request has an
`op`, which names a function in the module's `HANDLERS`; the other fields are its keyword arguments and its result is the answer.
One with `fork` is answered by a fork of the process, which then ends. The first line says that the limits hold; after it the
process imports each IMPORT, so that a later request need not wait for that.

LIMITS is a JSON object: `parent` (process id) and, each optional, `cpus`, `box` (see `box.facts`) and `resources`: limits by the
name that module `resource` has for them. Only the standard library is imported here, so that a start costs what Python costs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from tuna.sandbox import landlock, seccomp
from tuna.sandbox.parent import end_with_parent

#: Attribute of a served module: the functions that answer, by the name of the request.
Handlers = Mapping[str, Callable[..., dict[str, Any]]]
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITY_VERSION_3 = 0x20080522


def limit_self(limits: Mapping[str, Any]) -> None:
    """Die with the parent, dump no core, keep to what `limits` names; stay above all that it starts. Raises OSError."""
    _die_with_parent(limits["parent"])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getsid(0) != os.getpid():
        os.setsid()
    for name, most in {"RLIMIT_CORE": 0, **limits.get("resources", {})}.items():
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))
    if limits.get("cpus"):
        os.sched_setaffinity(0, limits["cpus"])
    if box := limits.get("box"):
        _close(box)


def _close(box: Mapping[str, Any]) -> None:
    if box["landlock"]:
        landlock.restrict(((str(path), int(rights)) for path, rights in box["rules"]), box["landlock"])
    if box["seccomp"]:
        seccomp.restrict(box["landlock"], network=box["network"])
    _drop_capabilities()


def _drop_capabilities() -> None:
    """Of root: for example CAP_PERFMON shows the environment of any process, whatever Landlock says (Linux 6.16)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # or a program would get them back
    if libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "capset")


def _die_with_parent(parent: int) -> None:
    if not end_with_parent(parent=parent):
        raise SystemExit("the parent process is already gone")


def serve(module: str, read_fd: int, write_fd: int, imports: Sequence[str]) -> None:
    """Answer requests until the parent closes its end; a handler that raises is answered with its traceback."""
    for fd in (read_fd, write_fd):  # or a grandchild would keep the pipe open after our exit
        os.set_inheritable(fd, False)
    with os.fdopen(read_fd, "rb") as requests, os.fdopen(write_fd, "wb") as answers:
        answers.write(b'{"number": 0, "result": {}}\n')
        answers.flush()
        handlers: Handlers = importlib.import_module(module).HANDLERS
        for name in imports:
            with contextlib.suppress(Exception):  # the request that needs it raises it again
                importlib.import_module(name)
        for line in requests:
            request = json.loads(line)
            if request.pop("fork", False):
                _fork(handlers, request, answers)
            else:
                _answer(handlers, request, answers)


def _answer(handlers: Handlers, request: dict[str, Any], answers: BinaryIO) -> None:
    number = request.pop("number")
    try:
        answer = {"number": number, "result": handlers[request.pop("op")](**request)}
    except Exception as error:  # the boundary of the process: the parent decides what a failure means
        text = "".join(traceback.format_exception(error))
        answer = {"number": number, "error": f"{type(error).__name__}: {error}", "traceback": text}
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _fork(handlers: Handlers, request: dict[str, Any], answers: BinaryIO) -> None:
    """Answer in a fork; this process ends as the fork did, unless that answered."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _die_with_parent(parent)
            _answer(handlers, request, answers)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:  # never return into the loop of the parent
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(parent, -code)
    if code:
        os._exit(code)


def main(argv: list[str]) -> None:
    """The command line that the module's first sentences describe."""
    limits, mode, *rest = argv
    limit_self(json.loads(limits))
    if mode == "exec":
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(rest[0], rest)
        except OSError as error:
            raise SystemExit(f"{rest[0]} cannot be started: {error.strerror}") from None
    serve(rest[0], int(rest[1]), int(rest[2]), rest[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
