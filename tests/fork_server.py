"""Processes of Python that begin with Tuna's modules imported: forks of one process that has
imported them.

For tests in which the start of a process is not what is tested: a fork takes 2 % of the CPU time of
a start, 0.03 of 1.4 s for a program and 0.04 of 1.6 s for a child with TVM, measured on two busy
cores. A fork is in all else the process
that `subprocess.Popen` would have started: a child of this process, with the arguments, variables,
folder, files, session and exit code that it was given. Only /proc/PID/cmdline and /proc/PID/environ
are those of the server.

Run as a program this file is the server: `python fork_server.py SOCKET_FD MODULE...`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

#: The module of sandboxed children.
CHILD = "tuna.sandbox.child"
#: What processes that are forked have imported; not `tuna.celery_app`, which reads the settings.
PROGRAM_MODULES = (
    "tuna.cli.main",
    "tuna.api",
    "tuna.db.overview",
    "tuna.golden",
    "tuna.coordinator.coordinator",
    "tuna_serve.requests.process",
    "tuna_serve.web.app",
    "tuna.workers.worker",
    "tuna.workers.launch",
    "celery.bin.celery",
    "celery.apps.worker",
    "celery.concurrency.prefork",
    "kombu.transport.redis",
)
TVM_MODULES = (
    "tuna.libraries.building",
    "tuna.libraries.measuring",
    "tuna.libraries.tvm.kernel_child",
    "tuna.libraries.tvm.built_models",
    "tuna_models.child",
)
_PR_SET_CHILD_SUBREAPER = 36
#: The server's own files lie above, those of its forks below.
_HIGH_FD = 512
_MAX_REQUEST_BYTES = 1 << 17
#: Seconds for the imports and the first fork, on a busy machine.
_LIMIT_S = 120.0


class ForkServer:
    """Asks a server for forks; the server ends with this process, the forks need not."""

    def __init__(self, requests: socket.socket) -> None:
        """`requests`: the other end of the server's socket."""
        self._socket = requests
        self._socket.settimeout(_LIMIT_S)

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """The process id of a fork that has become a child of this process, with the session and
        files it asked for."""
        prctl = ctypes.CDLL(None).prctl
        # the fork's own parent ends at once, and this process inherits it
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(
                self._socket, [json.dumps({**request, "parent": os.getpid()}).encode()], fds
            )
            answer = self._socket.recv(64)
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the fork server ended"
        return int(answer)


@contextlib.contextmanager
def fork_server(
    modules: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[ForkServer]:
    """Forks of a process that has imported `modules`; `env`: variables that count at the import,
    over those of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )  # fmt: skip
        yield ForkServer(ours)
    process.wait()


@contextlib.contextmanager
def forking(server: ForkServer | None, module: str = "") -> Iterator[None]:
    """Within it, whoever starts Python with `module` (default: with anything but a sandboxed child)
    gets a fork of `server`.

    Without a server each process starts from the beginning.
    """
    if server is None:
        yield
        return

    def wanted(words: Sequence[str]) -> bool:
        return bool(words) and (module in words if module else CHILD not in words)

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._session = bool(options.get("start_new_session"))
            super().__init__(*args, **options)

        def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[no-untyped-def]
            words = _after_python(args)
            if not wanted(words):
                return super()._execute_child(args, *rest)  # type: ignore[misc,no-any-return]
            _, _, _, pass_fds, cwd, env, _, _, _, *pipes = rest[:15]
            # -1: that of this process
            files = {0: pipes[0], 1: pipes[3], 2: pipes[5], **{fd: fd for fd in pass_fds}}
            request = {
                "words": words,
                "env": dict(os.environ if env is None else env),
                "cwd": str(cwd or Path.cwd()),
                "session": self._session,
                "places": list(files),
            }
            try:
                self.pid = server.fork(
                    request, [place if fd == -1 else fd for place, fd in files.items()]
                )
            finally:
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            self._child_created = True

    with mock.patch.object(subprocess, "Popen", Popen):
        yield


def _after_python(args: Any) -> list[str]:
    """The words after `python` that start the same; none where it is another program, or Python
    with options."""
    words = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else []
    if words and (words[0] == sys.executable or words[0].endswith(".py")):
        words = words[words[0] == sys.executable :]
        return words if words[:1] in (["-m"], ["-c"]) or words[0].endswith(".py") else []
    return ["-m", *words] if words[:1] == ["celery"] else []


def _serve(requests: socket.socket) -> list[str]:
    """Returns in each fork, with the words after `python`; ends with the other end of the
    socket."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 16)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            request = json.loads(message)
            _become(request, fds, between)
            requests.send(str(os.getpid()).encode())
            requests.close()
            return list(request["words"])
        os.waitpid(child, 0)
        for fd in fds:
            os.close(fd)


def _become(request: Mapping[str, Any], fds: Sequence[int], between: int) -> None:
    while (parent := os.getppid()) == between:
        time.sleep(0.0005)
    if parent != request["parent"]:
        os._exit(1)  # it was killed meanwhile
    if request["session"]:
        os.setsid()
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for place, fd in zip(request["places"], above, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])


def _execute(words: list[str], paths: list[str]) -> None:
    """What `python WORDS` does, but that it ends without freeing all objects: a fork would copy
    each page of them first."""
    try:
        _run_program(words, paths)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    else:
        code = 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # Python says at its end that it cannot write
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def _run_program(words: list[str], paths: list[str]) -> None:
    first = {"-c": "", "-m": str(Path.cwd())}.get(words[0], str(Path(words[0]).resolve().parent))
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *given, *paths]
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
        exec(code, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def _moved_up(end: socket.socket) -> socket.socket:
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH_FD))


def _main() -> None:
    requests = _moved_up(socket.socket(fileno=int(sys.argv[1])))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy what it looks at
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    _run(requests, [path for path in sys.path if path not in own])


def _run(requests: socket.socket, paths: list[str]) -> None:
    """Serve; each fork is a program, whose own children are forks too."""
    words = _serve(requests)
    if "celery" in words or CHILD in words:
        return _execute(words, paths)
    ours, theirs = map(_moved_up, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    if os.fork() == 0:
        ours.close()
        os.setsid()  # Ctrl-C is not for it
        return _run(theirs, paths)
    theirs.close()
    server = ForkServer(ours)
    with forking(server), forking(server if "tvm" in sys.modules else None, CHILD):
        _execute(words, paths)


if __name__ == "__main__":
    _main()
