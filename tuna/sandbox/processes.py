"""Foreign code in child processes with limits: programs (`run`), modules that answer (`Child`).

Every child has its own process group, which is killed as a whole; dies with the thread that started
it (so start it in a long-lived one); sees only the variables it is given and the files its `Box`
names; and may print without limit, since only the tail is kept. Neither a shell nor pickle is used.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from tuna.common.lifetime import forbid_inspection
from tuna.common.messages import one_line
from tuna.common.python import bare_command, module_command
from tuna.sandbox import box as boxes
from tuna.sandbox.box import Box
from tuna.sandbox.discovery import visibility
from tuna.sandbox.process_tree import CpuLimit, end, ended

_ROOT = Path(__file__).resolve().parents[2]
#: Bytes of the tail of a child's output that are kept
TAIL_BYTES = 64 << 10
#: Maximum of bytes of an answer; a child that writes a longer one is killed
MAX_ANSWER_BYTES = 64 << 20
#: Variables of this process that a child may see; no others, because some hold secrets
_ALLOWED = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CC", "CXX", "USER"),
)
_CLOSED = Box()
#: Seconds of one poll, after which the clock and the child are checked again
_TICK_S = 0.5
_GRACE_S = 1.0
#: Maximum of characters of the reason why an answer is not valid
_REASON_CHARS = 300
#: Seconds for a start without imports
_START_S = 60.0


class ChildNotStarted(Exception):
    """This machine could not start a child: no memory or processes left, or no Python."""


class ChildCancelled(Exception):
    """The call was cancelled; the child and its process group were killed."""


class ChildFault(Exception):
    """A call of a child failed; `tail` is the end of what the child printed, or its traceback."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


class ChildTimeout(ChildFault):
    """The child did not answer in time; it and its process group were killed."""


class ChildCrashed(ChildFault):
    """The child ended, or was killed for what it answered."""

    peak_bytes = 0  #: Most memory that it had at a time; 0: unknown


class ChildGarbled(ChildCrashed):
    """The child wrote no valid answer and was killed."""


class ChildFailed(ChildFault):
    """The function in the child raised; the child lives on unless `ends` says otherwise."""

    def __init__(self, message: str, tail: str, ends: str = "") -> None:
        """`ends`: "process" if no later call can succeed in the child, which was killed for it;
        "device" if none can anywhere, because its device is lost."""
        super().__init__(message, tail)
        self.ends = ends


@dataclass(frozen=True)
class Completed:
    """Exit of a program."""

    returncode: int  #: exit code; negative: the signal that killed it
    signal: str | None  #: name of the signal that ended it, such as SIGSEGV
    timed_out: bool
    output: str  #: end of its standard output and error, in the order they came


def signal_name(returncode: int | None) -> str | None:
    """The name of the signal in a negative return code, else None."""
    if returncode is None or returncode >= 0:
        return None
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _object(answer: Any) -> dict[str, Any]:
    """The answer, a JSON object; raises ValueError."""
    if not isinstance(answer, dict):
        raise ValueError("the answer is not an object")
    return answer


def child_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allowed variables of this process, Tuna's place in PYTHONPATH, and `extra` over both."""
    # without those of devices it would measure on the first one
    allowed = (*_ALLOWED, *visibility())
    env = {name: os.environ[name] for name in allowed if name in os.environ}
    paths = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    if "site-packages" not in _ROOT.parts:
        paths.append(str(_ROOT))
    return {**env, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}), **(extra or {})}


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cpus: Sequence[int] | None = None,
    cwd: Path | str | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    box: Box | None = _CLOSED,
) -> Completed:
    """Run a program to its end or limit; return code 1 if it cannot be started.

    `env` is the whole environment of the program, by default `child_env()`. `box` is its access
    beyond its own file; None: that of this user. Remaining processes of its group are killed.
    Raises ChildCancelled within half a second after `cancelled` (such as `RunContext.cancelled`)
    returns True.
    """
    variables = dict(child_env() if env is None else env)
    if box is not None:
        box = replace(box, readable=(*box.readable, *boxes.found_program(argv[0], variables)))
    process = _start(["exec", *argv], variables, box, cpus, cwd, boxes.resources(box, None))
    output = _OutputTail(process)
    deadline, timed_out = time.monotonic() + timeout_s, False
    try:
        while not ended(process):
            if time.monotonic() >= deadline:
                timed_out = True
                break
            if cancelled():
                raise ChildCancelled
            wait_s = min(0.05 if output.closed else _TICK_S, max(deadline - time.monotonic(), 0.0))
            select.select(output.readers, [], [], wait_s)
            output.read()
    finally:
        returncode = end(process).returncode
        output.read()
        output.close()
    name = None if timed_out else signal_name(returncode)
    return Completed(returncode, name, timed_out, output.text())


class _OutputTail:
    """The tail of a child's output, read without blocking."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._pipe, self._kept = process.stdout, bytearray()
        self.closed = False
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def readers(self) -> list[Any]:
        """The pipes to `select` on."""
        return [] if self.closed else [self._pipe]

    def read(self) -> None:
        """Read what is available, but a few megabytes at most, so that the caller goes on."""
        for _ in range(64):
            if self.closed:
                return
            try:
                chunk = os.read(self._pipe.fileno(), 64 << 10)
            except BlockingIOError:
                return
            self.closed = not chunk
            self._kept += chunk
            if len(self._kept) > 2 * TAIL_BYTES:
                del self._kept[:-TAIL_BYTES]

    def close(self) -> None:
        """Close our end of the pipe."""
        self.closed = True
        self._pipe.close()

    def text(self) -> str:
        """The tail of the output."""
        return bytes(self._kept[-TAIL_BYTES:]).decode("utf-8", "replace")


class Child:
    """A process that runs `module` and answers calls; started when a call finds none."""

    def __init__(
        self,
        module: str,
        *,
        env: Mapping[str, str] | None = None,
        memory_bytes: int | None = None,
        cpus: Sequence[int] | None = None,
        cwd: Path | str | None = None,
        box: Box | None = _CLOSED,
        imports: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
    ) -> None:
        """`imports` are imported before the first call; folders of `box` must exist by then.
        `limits` go before those of the settings, by the names of module `resource`.

        The other options are those of `run`.
        """
        self.box, self.env, self.memory_bytes = box, env, memory_bytes
        self.limits = dict(limits or {})
        self.cpus, self.cwd = cpus, cwd
        self.module, self.imports = module, imports
        self.starts = 0  #: number of processes that were started
        self._process: subprocess.Popen[bytes] | None = None
        self._number = self._peak_bytes = 0

    @property
    def alive(self) -> bool:
        """Whether a process is there that can be called without a new start."""
        return self._process is not None and not ended(self._process)

    @property
    def pid(self) -> int | None:
        """The process that answers now."""
        return self._process.pid if self._process is not None else None

    def start(
        self, timeout_s: float = _START_S, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        """Start the process if there is none; raises as `call` does.

        It imports what it needs while the caller goes on.
        """
        if not self.alive:
            self.close()
            self._open()
            self._exchange(b"", timeout_s, cancelled, cpu_limit=False)

    def call(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        cpu_limit: bool = False,
        check: Callable[[Any], dict[str, Any]] = _object,
    ) -> dict[str, Any]:
        """Send a request (`op` and its arguments) and return the answer.

        `timeout_s` includes a start. `check` validates the answer, which foreign code may have
        forged; if it raises ValueError, the child counts as crashed.

        With `cpu_limit` the timeout counts the CPU time of the child and all that it started, so
        that other work on the machine does not count; the child also times out after that time
        without CPU use, and after 20 times as long. A request with a number `fork` is answered by a
        fork of the child, which has the child's imports; an earlier fork with another number is
        killed.

        Raises ChildTimeout, ChildCrashed and ChildCancelled (within half a second after `cancelled`
        returns True), which leave no process behind, and ChildFailed.
        """
        if self.alive and select.select([self._answers], [], [], 0)[0]:
            self.close()  # it wrote more than its answer, or has ended
        self.start(timeout_s, cancelled)
        self._number += 1
        line = json.dumps({**request, "number": self._number}).encode() + b"\n"
        answer = self._exchange(line, timeout_s, cancelled, cpu_limit)
        if "error" in answer:
            ends = str(answer.get("ends", ""))
            if ends:
                self.close()
            raise ChildFailed(str(answer["error"]), str(answer.get("traceback", "")), ends)
        try:
            return check(answer["result"])
        except ValueError as error:
            reason = one_line(str(error), _REASON_CHARS)
            raise self._garbled(f"the child's answer is not valid: {reason}") from None

    def close(self) -> None:
        """Kill the process and its group, if there is one; a later call starts another."""
        if self._process is None:
            return
        self._peak_bytes = end(self._process).peak_bytes
        self._process = None
        self._output.read()
        self._output.close()
        os.close(self._requests)
        os.close(self._answers)

    def _open(self) -> None:
        theirs_read, self._requests = os.pipe()
        self._answers, theirs_write = os.pipe()
        try:
            serve = ["serve", self.module, str(theirs_read), str(theirs_write), *self.imports]
            fds = (theirs_read, theirs_write)
            env = child_env() if self.env is None else self.env
            limits = boxes.resources(self.box, self.memory_bytes) | self.limits
            self._process = _start(serve, env, self.box, self.cpus, self.cwd, limits, fds)
        except BaseException:
            os.close(self._requests)
            os.close(self._answers)
            raise
        finally:
            os.close(theirs_read)
            os.close(theirs_write)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._answers, False)
        self._output = _OutputTail(self._process)
        self.starts += 1
        self._number = 0

    def _exchange(
        self, line: bytes, timeout_s: float, cancelled: Callable[[], bool], cpu_limit: bool
    ) -> dict[str, Any]:
        assert self._process is not None
        pending, received, started = memoryview(line), bytearray(), time.monotonic()
        limit = CpuLimit(self._process.pid, timeout_s, started) if cpu_limit else None
        while True:
            now = time.monotonic()
            left = _TICK_S if limit else started + timeout_s - now
            exceeded = limit.exceeded(now) if limit else f"{timeout_s:g} s" if left <= 0 else ""
            if exceeded:
                self.close()
                raise ChildTimeout(f"no answer within {exceeded}", self._output.text())
            if cancelled():
                self.close()
                raise ChildCancelled
            writers = [self._requests] if pending else []
            readers, writable, _ = select.select(
                [self._answers, *self._output.readers], writers, [], min(left, _TICK_S)
            )
            self._output.read()
            try:
                if writable:
                    pending = pending[os.write(self._requests, pending[: 64 << 10]) :]
                chunk = os.read(self._answers, 1 << 20) if self._answers in readers else None
            except BlockingIOError:
                continue
            except BrokenPipeError:
                chunk = b""
            if chunk == b"" or (chunk is None and ended(self._process)):
                self._crashed()
            if not chunk:
                continue
            searched = len(received)
            received += chunk
            if received.find(b"\n", searched) >= 0:
                return self._parse(bytes(received))
            if len(received) > MAX_ANSWER_BYTES:
                raise self._garbled(
                    f"the child's answer is too long: more than {MAX_ANSWER_BYTES} bytes"
                )

    def _parse(self, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            raise self._garbled("the child's answer is not JSON") from None
        fault = ""
        if not isinstance(answer, dict):
            fault = "is not an object"
        elif answer.get("number") != self._number:
            fault = "has not the number of its request"
        elif not ("result" in answer or "error" in answer):
            fault = "has neither a result nor an error"
        if fault:
            raise self._garbled(f"the child's answer {fault}")
        return cast(dict[str, Any], answer)

    def _garbled(self, reason: str) -> ChildGarbled:
        self.close()
        return ChildGarbled(reason, self._output.text())

    def _crashed(self) -> NoReturn:
        process = self._process
        assert process is not None
        # let it exit, so that its own exit status is reported and not the SIGKILL
        deadline = time.monotonic() + _GRACE_S
        while not (gone := ended(process)) and time.monotonic() < deadline:
            self._output.read()
            time.sleep(0.01)
        self.close()
        status = ""
        if gone:
            code = process.returncode
            status = f" with {signal_name(code) or f'exit code {code}'}"
        fault = ChildCrashed(f"the child ended{status}", self._output.text())
        fault.peak_bytes = self._peak_bytes
        raise fault


def limits_file() -> IO[str]:
    """Return a file without a name, in memory where the kernel has such files for this process;
    raises OSError."""
    try:
        return os.fdopen(os.memfd_create("limits"), "w", encoding="utf-8")
    except OSError:  # some sandboxes refuse the system call
        return tempfile.TemporaryFile("w", encoding="utf-8")


def _start(
    command: list[str],
    env: Mapping[str, str],
    box: Box | None,
    cpus: Sequence[int] | None,
    cwd: Path | str | None,
    resources: Mapping[str, int],
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    forbid_inspection()
    limits = {
        "parent": os.getpid(),
        "cpus": list(cpus or ()),
        "resources": dict(resources),
        "box": boxes.facts(box, env),
    }
    start = bare_command if command[0] == "exec" else module_command  # a module needs its packages
    try:
        with limits_file() as stream:
            stream.write(json.dumps(limits))
            stream.seek(0)
            return subprocess.Popen(
                start("tuna.sandbox.child", str(stream.fileno()), *command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=boxes.at_home(box, env),
                cwd=cwd,
                pass_fds=(*pass_fds, stream.fileno()),
                start_new_session=True,  # so that its group can be killed before its code runs
                bufsize=0,
            )
    except OSError as error:
        raise ChildNotStarted(f"a child process cannot be started: {error}") from error
