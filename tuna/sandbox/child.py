"""Entry point of every sandboxed process: limits itself, then runs a program or serves requests.

`python -m tuna.sandbox.child LIMITS exec PROGRAM ARG...` replaces itself by the program. `python -m
tuna.sandbox.child LIMITS serve MODULE READ_FD WRITE_FD IMPORT...` answers one JSON object per line.
A request has an `op`, which names a function in the module's `HANDLERS`; the other fields are its
keyword arguments and its result is the answer. One with a number `fork` is answered by the fork of
the process with that number, which is made if there is none and lives until a request with another
number comes. `cpu_s` are CPU seconds that the answer may take; they end the process by SIGXCPU.
The first line says that the limits hold; after it the process imports each IMPORT, so
that a later request need not wait for that.

LIMITS is the number of a file descriptor, for an argument cannot be longer than 128 KiB, with a
JSON object: `parent` (process id) and, each optional, `cpus`, `box` (see `box.facts`) and
`resources`: limits by the name that module `resource` has for them. Only the standard library is
imported here, so that a start costs what Python costs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from tuna.common import lifetime
from tuna.sandbox import landlock, seccomp, self_limits

#: Functions that answer, by the name of the request, the attribute of a served module
Handlers = Mapping[str, Callable[..., dict[str, Any]]]
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITY_VERSION_3 = 0x20080522


def limit_self(limits: Mapping[str, Any]) -> None:
    """Apply `limits`, die with the parent and dump no core; raises OSError.

    As a subreaper it stays the ancestor of all that it starts.
    """
    lifetime.end_with_parent(limits["parent"])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getsid(0) != os.getpid():
        os.setsid()
    for name, most in {"RLIMIT_CORE": 0, **limits.get("resources", {})}.items():
        self_limits.lower_limit(getattr(resource, name), most)
    if limits.get("cpus"):
        os.sched_setaffinity(0, limits["cpus"])
    # when memory runs out, the kernel ends this process before others
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if box := limits.get("box"):
        _close(box)


def _close(box: Mapping[str, Any]) -> None:
    if box["landlock"]:
        landlock.restrict(
            ((str(path), int(rights)) for path, rights in box["rules"]), box["landlock"]
        )
    if box["seccomp"]:
        seccomp.restrict(box["landlock"], network=box["network"], gpus=box["gpus"])
    if not box["gpus"]:
        self_limits.allow_memory_bound()
    _drop_capabilities()


def _drop_capabilities() -> None:
    """Give up root's capabilities.

    CAP_PERFMON, for example, shows any process's environment in spite of Landlock (Linux 6.16).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # or a program would get them back
    if libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "capset")


def serve(module: str, read_fd: int, write_fd: int, imports: Sequence[str]) -> None:
    """Answer requests until the parent closes its end; an exception's answer is its traceback.

    The exception's attribute `ends` travels with it: see `ChildFailed.ends`.
    """
    for fd in (read_fd, write_fd):  # or a grandchild would keep the pipe open after our exit
        os.set_inheritable(fd, False)
    with os.fdopen(read_fd, "rb") as requests, os.fdopen(write_fd, "wb") as answers:
        answers.write(b'{"number": 0, "result": {}}\n')
        answers.flush()
        handlers: Handlers = importlib.import_module(module).HANDLERS
        for name in imports:
            with contextlib.suppress(Exception):  # the request that needs it raises it again
                importlib.import_module(name)
        _serve(handlers, requests, answers)


def _serve(handlers: Handlers, requests: BinaryIO, answers: BinaryIO) -> None:
    fork: _Fork | None = None
    for line in requests:
        request = json.loads(line)
        wanted = request.pop("fork", 0)
        if fork is not None and (fork.number != wanted or fork.has_more):
            fork.end()
            fork = None
        if not wanted:
            _answer(handlers, request, answers)
            continue
        if fork is None:
            fork = _Fork(wanted, handlers, (requests, answers))
        fork.pass_on(request, answers)


def _answer(handlers: Handlers, request: dict[str, Any], answers: BinaryIO) -> None:
    number = request.pop("number")
    if cpu_s := request.pop("cpu_s", 0):
        self_limits.limit_cpu_time(cpu_s)
    try:
        answer = {"number": number, "result": handlers[request.pop("op")](**request)}
    except Exception as error:  # the boundary of the process: the parent decides what it means
        text = "".join(traceback.format_exception(error))
        answer = {"number": number, "error": f"{type(error).__name__}: {error}", "traceback": text}
        answer["ends"] = str(getattr(error, "ends", ""))
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


class _Fork:
    """A fork for foreign code, which reaches neither this process's requests nor its answers."""

    def __init__(self, number: int, handlers: Handlers, ours: Sequence[BinaryIO]) -> None:
        """`ours` are closed in it."""
        self.number, self._cpus = number, os.sched_getaffinity(0)
        theirs_read, self._requests = os.pipe()
        self._answers, theirs_write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        lifetime.forbid_inspection()  # or it could open our files through /proc
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                lifetime.end_with_parent(parent)
                for fd in (self._requests, self._answers, *(file.fileno() for file in ours)):
                    os.close(fd)
                with (
                    os.fdopen(theirs_read, "rb") as requests,
                    os.fdopen(theirs_write, "wb") as answers,
                ):
                    for line in requests:
                        _answer(handlers, json.loads(line), answers)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            finally:  # never return into the loop of the parent
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.close(theirs_read)
        os.close(theirs_write)

    @property
    def has_more(self) -> bool:
        """Whether it wrote more than its answer, or has ended."""
        return bool(select.select([self._answers], [], [], 0)[0])

    def pass_on(self, request: dict[str, Any], answers: BinaryIO) -> None:
        """Pass on a request and its answer; without an answer, end as the fork ended."""
        with (
            contextlib.suppress(BrokenPipeError),
            os.fdopen(os.dup(self._requests), "wb") as requests,
        ):
            requests.write(json.dumps(request).encode() + b"\n")
        while chunk := os.read(self._answers, 1 << 20):
            line, end, more = chunk.partition(b"\n")
            answers.write(line + end)
            answers.flush()
            if more:
                os.kill(self._pid, signal.SIGKILL)  # `has_more` says that it has ended
            if end:
                return
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(max(code, 0))

    def end(self) -> None:
        """Kill it, and restore the affinity of this process, which it could change."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.sched_setaffinity(0, self._cpus)
        os.close(self._requests)
        os.close(self._answers)


def execute(words: list[str]) -> NoReturn:
    """Replace this process by a program."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        raise SystemExit(f"{words[0]} cannot be started: {error.strerror}") from None


def main(argv: list[str]) -> None:
    """The command line that the module's first sentences describe."""
    limits_fd, mode, *rest = argv
    with open(int(limits_fd), encoding="utf-8") as stream:
        limits = json.load(stream)
    limit_self(limits)
    if mode == "exec":
        execute(rest)
    serve(rest[0], int(rest[1]), int(rest[2]), rest[3:])


if __name__ == "__main__":
    main(sys.argv[1:])
