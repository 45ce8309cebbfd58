"""State of one worker process: its connection, scratch folder, and one runner for each kind of
work."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from pydantic import ValidationError

from tuna.artifacts.files import folder_url
from tuna.artifacts.store import Artifacts
from tuna.common.lifetime import LIBRARIES
from tuna.errors import StoreUnavailable, TunaError
from tuna.libraries.base import Library
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.registry import get_library, names
from tuna.libraries.steps import find_step
from tuna.queue.heartbeat import HeartbeatSender, WorkerStatus
from tuna.queue.messages import Chunk
from tuna.sandbox.core_lending import BuildCores, offer
from tuna.sandbox.cores import compile_cpus
from tuna.settings import Settings
from tuna.vocabulary import queue_name
from tuna.workers.devices import device_for, place_of
from tuna.workers.health import Health
from tuna.workers.link import RedisLink, WorkerLink
from tuna.workers.runner import Runner
from tuna.workers.served_queues import ServedQueues, Unavailable, served_names

log = structlog.get_logger(__name__)


class WorkerProcess:
    """The state of one process that runs chunks; everything is created lazily."""

    def __init__(
        self,
        settings: Settings,
        served: ServedQueues | None = None,
        mend: Callable[[], None] = lambda: None,
        ending: Callable[[], bool] = lambda: False,
        node_pid: int | None = None,
        connect: Callable[[Settings], WorkerLink] = RedisLink.from_settings,
    ) -> None:
        """`served`: what this machine can serve, as far as it was found before the fork; `mend`,
        `ending`: see `Health`; `node_pid`: the node's main process, by default this one."""
        self._settings = settings
        self._served = served or ServedQueues()
        self._mend = mend
        self._ending = ending
        self._node_pid = node_pid
        self._connect = connect
        self._runners: dict[tuple[str, bool], Runner] = {}
        self._devices: dict[str, DeviceHandle] = {}  # by library
        self._sender: HeartbeatSender | None = None
        self._offers = contextlib.ExitStack()

    def run_chunk(self, chunk: str) -> str:
        """Run one chunk (JSON of `messages.Chunk`), and return the outcome; never raises for what
        is in it."""
        try:
            parsed = Chunk.model_validate_json(chunk)
            library = get_library(parsed.library)
            find_step(library, parsed.step)
        except ValidationError as error:
            return _unreadable(error.errors()[0]["msg"])
        except TunaError as error:
            return _unreadable(str(error))
        store, refusal = None, self._refusal(parsed)
        if not refusal:
            try:
                store = self.link.store(parsed)
            except StoreUnavailable as error:
                refusal = f"{error} {error.hint}"
        return self._runner(parsed, library).run(parsed, library, refusal, store).value

    def begin(self, queues: Sequence[str], device: str) -> None:
        """Show this process, which serves `queues`, and prepare it for chunks; what fails of that
        is left to the chunks."""
        with contextlib.suppress(TunaError):
            self.announce(queues, device)
            self.offer_cores(queues)
            self.warm_up(queues, os.environ.get(LIBRARIES, "").split(","))

    def offer_cores(self, queues: Sequence[str]) -> None:
        """Lend the cores that this process measures with, if it does, to builds between its chunks,
        until it ends."""
        device = self._served_device(queues)
        offer(self._offers, device.cpus if device else ())

    def announce(self, queues: Sequence[str], device: str) -> None:
        """Start publishing the heartbeat of this process, which serves `queues`."""
        settings = self._settings
        kinds = [queue.partition(".") for queue in queues]
        environments = [name for kind, _, name in kinds if kind == "eval"]
        status = WorkerStatus(
            name=f"{settings.worker_name or socket.gethostname()}:{os.getpid()}",
            role="eval" if environments else "compile",
            host=socket.gethostname(),
            pid=os.getpid(),
            device=device,
            environment=", ".join(environments),
            toolchains=tuple(name for kind, _, name in kinds if kind == "compile"),
            job_ids=(),
            started_at=time.time(),
            seen_at=time.time(),
            place=place_of(settings.worker_name, self._served_device(queues), self._node),
        )

        self._sender = HeartbeatSender(self.link, status, settings.lease_s / 4).start()

    def warm_up(self, queues: Sequence[str], libraries: Sequence[str]) -> None:
        """Start what is slow to start for the steps of these libraries that this process serves."""
        for name in set(libraries).intersection(names()):
            for on_device in (False, True):
                if self._served.queue_of(name, on_device=on_device) in queues:
                    get_library(name).device.warm_up(self._context(get_library(name), on_device))

    def leave(self) -> None:
        """Remove the heartbeat of this process, which ends, and lend no more cores."""
        self._offers.close()
        if self._sender:
            self._sender.stop()

    @property
    def _node(self) -> str:
        """The Celery node among those of all machines."""
        return f"{socket.gethostname()}:{self._node_pid or os.getpid()}"

    @functools.cached_property
    def link(self) -> WorkerLink:
        """The connection of this process, made after the fork; raises ServiceError."""
        return self._connect(self._settings)

    @functools.cached_property
    def _scratch(self) -> Path:
        return scratch_folder(self._settings.run_dir / "scratch")

    def _refusal(self, chunk: Chunk) -> str:
        """Return why this machine may not run the chunk; empty when it may."""
        queue = queue_name(bool(chunk.environment), chunk.toolchain, chunk.environment)
        served = self._served.queue_of(chunk.library, on_device=bool(chunk.environment))
        if isinstance(served, Unavailable):
            return served.reason
        if served != queue:
            return f"this machine serves {served}, the session needs {queue}"
        return ""

    def _device_of(self, library: Library) -> DeviceHandle:
        if library.name not in self._devices:
            self._devices[library.name] = device_for(library, self._settings)
        return self._devices[library.name]

    def _served_device(self, queues: Sequence[str]) -> DeviceHandle | None:
        """The device that chunks of `queues` will measure on; None for those of steps on a CPU."""
        served = (
            name for name in served_names() if self._served.queue_of(name, on_device=True) in queues
        )
        return next((self._device_of(get_library(name)) for name in served), None)

    def _runner(self, chunk: Chunk, library: Library) -> Runner:
        on_device = bool(chunk.environment)
        key = (library.name, on_device)
        if key not in self._runners:
            settings = self._settings
            context = self._context(library, on_device)
            health = Health(
                [settings.home, self._scratch], context.device, self._mend, self._ending
            )
            self._runners[key] = Runner(
                self.link, context, settings.worker_name, self._sender, health, self._node
            )
        return self._runners[key]

    def _context(self, library: Library, on_device: bool) -> RunContext:
        """The context of all chunks, each of which brings its own artifacts."""
        device = self._device_of(library) if on_device else None
        cpus = compile_cpus(self._settings)
        return RunContext(
            artifacts=Artifacts(folder_url(self._scratch), self._scratch),
            scratch=self._scratch,
            cpus=device.cpus if device else cpus,
            device=device,
            ending=self._ending,
            builds=None if device else BuildCores(cpus),
        )


def _unreadable(fault: str) -> str:
    log.error("invalid message dropped", fault=fault)
    return f"unreadable: {fault}"


def scratch_folder(parent: Path) -> Path:
    """A folder for this process, empty; those of this machine's processes that are gone are
    removed, for a killed one cannot tidy up, and so is what one with this process' number left.
    Other machines may share the parent, and their processes cannot be looked up here."""
    prefix = f"{socket.gethostname()}-"
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        process = folder.name.removeprefix(prefix)
        if process.isdigit() and (
            int(process) == os.getpid() or not Path(f"/proc/{process}").exists()
        ):
            shutil.rmtree(folder, ignore_errors=True)
    mine = parent / f"{prefix}{os.getpid()}"
    # of a full disk, say: a worker that cannot write there is put aside
    with contextlib.suppress(OSError):
        mine.mkdir(parents=True, exist_ok=True)
    return mine
