"""Starts and stops workers on this machine as child processes that end with their parent, and runs
the commands that a user has for before and after a worker: a power cycle, a health probe."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tuna.common import signals
from tuna.common.lifetime import WITH_PARENT
from tuna.common.python import module_command
from tuna.errors import ServiceError
from tuna.libraries.boards import board_settings
from tuna.sandbox.processes import signal_name
from tuna.settings import Settings, get_settings
from tuna.workers.joining import joining

#: Module in which Celery finds the app
APP = "tuna.celery_app"
#: Seconds beyond the limit of its warm shutdown in which a worker returns unfinished chunks
_MARGIN_S = 5.0


@dataclass(frozen=True)
class WorkerSpec:
    """A worker to start: which queue it serves, with how many processes."""

    queue: str  #: compile or eval
    processes: int = 1
    name: str = ""  #: name among the workers of one command; empty: the queue's
    #: environment variables that are set beside those of this process
    env: Mapping[str, str] = field(default_factory=dict)
    #: true if its board may not be there yet: the worker is started again until it is
    waits: bool = False

    @property
    def title(self) -> str:
        """Its name among the workers of one command."""
        return self.name or self.queue


class RunStopped(Exception):
    """Raised by a callback of a run to end it: workers may finish what they have begun. Its text
    says why."""


class LocalWorkers:
    """The workers that this process started."""

    def __init__(self, log_dir: Path) -> None:
        self.idle = True  #: true if the workers have nothing to do when their run ends normally
        self._log_dir = log_dir
        self._running: list[tuple[WorkerSpec, Path, subprocess.Popen[bytes]]] = []

    def start(self, spec: WorkerSpec) -> None:
        """Start one worker; its log goes to a file in the log directory."""
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self._log_dir / f"worker-{spec.queue}-{os.getpid()}.log"
        with open(log, "ab") as output, signals.held():
            self._running.append((spec, log, start_process(spec, output)))

    def check(self) -> None:
        """Raise ServiceError with the reason of a worker that has ended: the signal, or else the
        end of its log."""
        for spec, log, process in self._running:
            code = process.poll()
            if killed := signal_name(code):
                hint = "the kernel does that where memory is short; " if killed == "SIGKILL" else ""
                raise ServiceError(
                    f"The {spec.queue} worker was killed ({killed}).", hint=f"{hint}see {log}"
                )
            if code is not None:
                lines = log.read_text(errors="replace").rstrip().splitlines()[-2:]
                # a sentence and its hint
                last = lines if lines and lines[-1].startswith("  ") else lines[-1:]
                words = " ".join(map(str.strip, last))
                raise ServiceError(
                    f"The {spec.queue} worker ended with exit code {code}: {words}",
                    hint=f"see {log}",
                )

    def stop(self, *, idle: bool, bound_s: float = 0.0) -> None:
        """Stop all: at once when they are known to be `idle`, else warmly, with `bound_s` for the
        current chunks.

        A bound of 0 and an interruption of the wait stop them at once; they still return their
        chunks.
        """
        if not idle:
            try:
                if bound_s:
                    self._send(signal.SIGTERM)
                    self._wait(bound_s + _MARGIN_S)
            except signals.INTERRUPTS:
                bound_s = 0.0
            if not bound_s:
                self._send(signals.NOW)
                self._wait(_MARGIN_S)
        for _, _, process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()

    def _send(self, number: signal.Signals) -> None:
        for _, _, process in self._running:
            process.send_signal(number)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for _, _, process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def start_process(spec: WorkerSpec, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """A worker that ends with this process; it writes to `output`, by default to the output of this
    process."""
    return subprocess.Popen(
        worker_command(spec),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, **spec.env, WITH_PARENT: str(os.getpid())},
        start_new_session=True,  # Ctrl-C reaches this process alone, which stops the worker
    )


def worker_command(spec: WorkerSpec) -> list[str]:
    """The command line of a worker: what a person would type, in any working directory."""
    settings = get_settings()
    before = "from tuna.common import lifetime; lifetime.end_with_starter()"
    if settings.gateway or "TUNA_GATEWAY" in spec.env:
        return module_command(joining().node, spec.queue, str(spec.processes), before=before)
    name = f"{spec.title}-{os.getpid()}@%h"
    # Celery's banner is not JSON
    quiet = ["--quiet"] if settings.log_format == "json" else []
    return module_command(
        "celery", "-A", APP, *quiet, "worker",
        "-Q", spec.queue, "-c", str(spec.processes), "-n", name,
        "--without-gossip", "--without-mingle", "--loglevel", settings.log_level,
        # Celery looks for the app in the working directory first, and importing it takes longer
        # than some commands live.
        before=f"{before}; import {APP}",
    )  # fmt: skip


@contextlib.contextmanager
def local_workers(
    log_dir: Path,
    specs: Sequence[WorkerSpec],
    bound_s: float = 0.0,
    on_wait: Callable[[float, str], None] = lambda *_: None,
) -> Iterator[LocalWorkers]:
    """Workers for the duration of a `with` block, whose normal end means that they are idle, unless
    their `idle` was set to False.

    Else they have `bound_s` to finish the current chunks, and `on_wait` is called with that and the
    reason of a `RunStopped`, empty after an interruption or an error.
    """
    workers = LocalWorkers(log_dir)
    idle = False
    try:
        for spec in specs:
            workers.start(spec)
        yield workers
        idle = True
    except BaseException as error:
        if isinstance(error, signals.Interrupted) and error.at_once:
            bound_s = 0.0
        with contextlib.suppress(OSError):  # who reads it may have ended by the same signal
            on_wait(bound_s, str(error) if isinstance(error, RunStopped) else "")
        raise
    finally:
        workers.stop(idle=idle and workers.idle, bound_s=bound_s)


class LastingWorkers:
    """Workers on this machine that several runs share: the first run starts them, or who wants them
    to get ready before it; the end of a `with` block of this ends them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._started: LocalWorkers | None = None
        self._on_wait: Callable[[float, str], None] = lambda *_: None
        self._used = False  #: True once a run has ended
        #: called after the workers have ended; the last run drains what they reported
        self.on_end: Callable[[], None] = lambda: None
        self._stopped: RunStopped | None = None  #: exception that ended the last run

    def start(
        self,
        log_dir: Path,
        specs: Sequence[WorkerSpec],
        bound_s: float,
        on_wait: Callable[[float, str], None],
    ) -> LocalWorkers:
        """The workers of the first call; `on_wait` is that of `local_workers` from now on."""
        self._on_wait = on_wait
        if self._started is None:
            workers = local_workers(
                log_dir, specs, bound_s, lambda seconds, why: self._on_wait(seconds, why)
            )
            self._started = self._stack.enter_context(workers)
        return self._started

    def ended(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        """Note how a run ended: after a `RunStopped` workers may still have something to do."""
        self._used = True
        self._stopped = error if isinstance(error, RunStopped) else None

    def __enter__(self) -> LastingWorkers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self._used:  # they have had nothing to do
            kind, error, trace = None, None, None
        elif error is None and self._stopped is not None:
            kind, error = RunStopped, self._stopped
        try:
            self._stack.__exit__(kind, error, trace)
        finally:
            self.on_end()


#: Seconds in which a hook may reset or reboot a device
LIMIT_S = 600.0
_TAIL_CHARS = 2000
#: Minimum seconds between two resets of a lost board, so that one which boots is not stopped
_RESET_EVERY_S = 60.0


def run_hook(setting: str, command: str, env: Mapping[str, str], limit_s: float = LIMIT_S) -> None:
    """Run the `command` that `setting` holds, if any, with `env` over our own; raises ServiceError
    with its output."""
    if not command:
        return
    try:
        process = subprocess.Popen(
            shlex.split(command),
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for this process: a power cycle must not be interrupted
            start_new_session=True,
        )
    except OSError as error:
        raise ServiceError(
            f"{setting} cannot be started: {error.strerror}: {error.filename}"
        ) from None
    with process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            # and the processes that a shell among them started
            os.killpg(process.pid, signal.SIGKILL)
            raise ServiceError(
                f"{setting} did not end within {limit_s:g} s. {_tail(error.output)}"
            ) from None
    if process.returncode:
        raise ServiceError(f"{setting} failed with exit code {process.returncode}. {_tail(output)}")


def _tail(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace").strip()[-_TAIL_CHARS:]


class DeviceRepair:
    """Runs, for a device in quarantine, the hooks that may bring it back."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reset_at = -math.inf

    def __call__(self) -> None:
        """The hook that follows a worker's end may repair its device, too."""
        run_hook("TUNA_AFTER_WORKER", self._settings.after_worker, {})
        if time.monotonic() - self._reset_at >= _RESET_EVERY_S:
            self._reset_at = time.monotonic()
            run_hook("TUNA_TVM_RESET", board_settings().tvm_reset, {})
