"""`tuna worker`: supervises this machine's workers, one for each device: starts, restarts and stops
them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import structlog

from tuna.common import logs, signals
from tuna.common.lifetime import ONCE, SESSION
from tuna.common.restarts import Restarts
from tuna.errors import BadInput, LibraryMissing, ServiceError
from tuna.sandbox import discovery
from tuna.sandbox.cores import available_cpus, deal, eval_cpus, read_places
from tuna.sandbox.discovery import CPU, Device
from tuna.sandbox.processes import signal_name
from tuna.settings import Settings, get_settings
from tuna.workers.launch import WorkerSpec, run_hook, start_process

log = structlog.get_logger(__name__)

#: Seconds beyond the limit of its warm shutdown after which a worker is killed
_MARGIN_S = 5.0
_TICK_S = 0.2
#: Restarts in a row after which a worker that dies is given up, unless it waits for a board
_MAX_RESTARTS = 6
#: Exit codes that a restart does not cure: bad input, database, library missing, disk full
_REFUSALS = frozenset({2, 3, 4, 6, 8})


def serve(
    queue: str,
    processes: int = 1,
    *,
    devices: str | None = None,
    session: str = "",
    once: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
    settings: Settings | None = None,
) -> int:
    """Run the workers of `tuna worker` until they have ended; returns the exit code.

    `devices`: `all`, or numbers such as `0,2`; None: one worker that sees what this process sees.
    `session`: what `workers.served_queues.session_text` gives for the only session to serve.
    `variables`: settings of the workers' own. Call it in the main thread.
    """
    settings = settings or get_settings()
    logs.configure(settings.log_level, settings.log_format)
    on_boards = "TUNA_TVM_TRACKER" in variables
    check_options(queue, processes, devices, on_boards)
    # the first worker would refuse cores that are not there, and be started again
    eval_cpus(settings)
    common = {
        **variables,
        **({SESSION: session} if session else {}),
        **({ONCE: "1"} if once else {}),
    }
    if on_boards:
        specs = [
            WorkerSpec(queue, name=f"board-{number}", env=common, waits=True)
            for number in range(processes)
        ]
    elif devices is None:
        specs = [WorkerSpec(queue, processes, env=common)]
    else:
        specs = device_specs(discovery.discover(), devices, settings, common)
    return Supervisor(specs, settings).run()


def check_options(queue: str, processes: int, devices: str | None, on_boards: bool) -> None:
    """Raise BadInput for options of `serve` that exclude each other."""
    if queue == "eval" and processes != 1 and not on_boards:
        raise BadInput("An eval worker has one process: its device measures one kernel at a time.")
    if on_boards and devices is not None:
        raise BadInput(
            "Boards are not among this machine's devices.",
            hint="leave out --devices, or --tvm-tracker",
        )
    if queue != "eval" and devices is not None:
        raise BadInput("Only eval workers have devices.", hint="leave out --devices")


def device_specs(
    devices: Sequence[Device], chosen: str, settings: Settings, common: Mapping[str, str]
) -> list[WorkerSpec]:
    """An eval worker for each chosen device, with the variables that give it this device and its
    own cores.

    The cores are divided among all devices of the machine, so that a worker for another device gets
    other cores.
    """
    numbers = discovery.choose(devices, chosen)
    if any(device.kind == CPU for device in devices):
        shares = [eval_cpus(settings)] * len(devices)
    else:
        usable = eval_cpus(settings) if settings.eval_cpus else available_cpus()
        each = None if settings.eval_cpus else 1
        shares = deal([device.node for device in devices], read_places(usable), each=each)
    return [
        WorkerSpec(
            "eval",
            name=f"eval-{number}",
            env={
                **common,
                **devices[number].variables,
                "TUNA_EVAL_CPUS": ",".join(map(str, shares[number])),
            },
        )
        for number in numbers
    ]


def is_final(code: int, *, waits: bool, first: bool) -> bool:
    """Return whether a worker that ended with this exit code, at its `first` start, is not started
    again; one that `waits` for a board is until there is one."""
    if waits and code == LibraryMissing.exit_code:  # no board: the library was there before
        return False
    return code == 0 or code in _REFUSALS or (first and code == ServiceError.exit_code)


class Supervisor:
    """Supervises each worker from a thread, which starts and restarts it; the main thread handles
    the signals."""

    def __init__(
        self, specs: Sequence[WorkerSpec], settings: Settings, margin_s: float = _MARGIN_S
    ) -> None:
        """`margin_s`: beyond the bound of their warm shutdown, until workers are killed."""
        self._settings = settings
        self._margin_s = margin_s
        self._stop = signals.SignalEvent()
        self._sent = signal.SIGTERM  #: what workers are sent that are to end
        self._kill_at = self._leave_at = float("inf")
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._codes: dict[str, int] = {}
        self._threads = [
            threading.Thread(target=self._keep, args=(spec,), name=spec.title, daemon=True)
            for spec in specs
        ]

    def run(self) -> int:
        """Run until every worker has ended; returns the highest exit code."""
        with signals.handling(self._asked):
            try:
                for thread in self._threads:
                    thread.start()
                told = False
                while (
                    any(thread.is_alive() for thread in self._threads)
                    and time.monotonic() < self._leave_at
                ):
                    for thread in self._threads:
                        thread.join(_TICK_S)
                    if self._stop.is_set() and not told:
                        told = True
                        log.warning("workers end", most_s=self._settings.shutdown_s)
                    if time.monotonic() >= self._kill_at:
                        self._kill()
            finally:
                self._kill()  # a no-op unless an error occurred above
        return max(self._codes.values(), default=0)

    def _asked(self, _: int, at_once: bool) -> None:
        """Warm shutdown; `at_once`: cold, hooks included."""
        if at_once:
            self._sent = signals.NOW
            self._kill_at = self._leave_at = time.monotonic() + self._margin_s
        else:
            self._kill_at = time.monotonic() + self._settings.shutdown_s + self._margin_s
        self._stop.set()
        for process in list(self._running.values()):
            _send(process, self._sent)

    def _kill(self) -> None:
        for process in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _keep(self, spec: WorkerSpec) -> None:
        restarts = Restarts(None if spec.waits else _MAX_RESTARTS)
        first = True
        while not self._stop.is_set():
            started_at = time.monotonic()
            try:
                code = self._live(spec)
            except ServiceError as error:
                log.error("worker not started", reason=str(error), worker=spec.title)
                self._codes[spec.title] = error.exit_code
                return
            self._codes[spec.title] = 0 if self._stop.is_set() else max(code, 1 if code else 0)
            if is_final(code, waits=spec.waits, first=first) or self._stop.is_set():
                return
            first = False
            reason = signal_name(code) or f"exit code {code}"
            pause_s = restarts.pause_s(time.monotonic() - started_at)
            if restarts.are_over:
                log.error("worker given up: too many restarts", worker=spec.title, reason=reason)
                return
            log.error("worker restarted", worker=spec.title, reason=reason, pause_s=pause_s)
            self._stop.wait(pause_s)

    def _live(self, spec: WorkerSpec) -> int:
        """Run one worker process between its hooks; returns its exit code."""
        run_hook("TUNA_BEFORE_WORKER", self._settings.before_worker, spec.env)
        with self._lock:
            if self._stop.is_set():
                return 0
            process = start_process(spec)
            self._running[spec.title] = process
        if self._stop.is_set():  # the signal came while the process was being started
            _send(process, self._sent)
        code = process.wait()
        del self._running[spec.title]
        try:
            run_hook("TUNA_AFTER_WORKER", self._settings.after_worker, spec.env)
        except ServiceError as error:
            log.error(str(error), worker=spec.title)
        return code


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
