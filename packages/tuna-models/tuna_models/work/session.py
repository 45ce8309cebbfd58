"""Where a model is worked on: a session, with workers on this machine if they are of its
environment, and a folder with a child that reads, plans and links.

An import and the builds after it share the child, so that TVM is imported once, and what was read
is kept.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuna.api import Progress, RunEvents, get_settings, preparation, running
from tuna.api.rows import open_database, reading, sessions
from tuna.api.services import artifacts_of_models
from tuna.errors import BadInput, NotFound
from tuna.libraries.base import Environment
from tuna.libraries.registry import get_library
from tuna.libraries.tvm import toolchain
from tuna.sandbox.cores import measuring_with, usable_count
from tuna.workers.launch import LastingWorkers
from tuna_models.limits import ModelLimits
from tuna_models.manifest import Manifest
from tuna_models.process import ModelProcess
from tuna_models.work import files, store
from tuna_models.work.known_kernels import ResultScope
from tuna_models.work.store import StoredModel

#: Reason of the session in which the tasks of all models are tuned, so that one that two models
#: have is tuned once.
SESSION = "models"
_CONDITIONS: Mapping[str, str] = {"caches": "cold"}
_SILENT = RunEvents()


class Workspace:
    """A folder and a child, made when they are needed, and ended with a `with` block of this."""

    def __init__(
        self,
        parent: Path | None = None,
        prefix: str = "tuna-",
        *,
        limits: ModelLimits | None = None,
    ) -> None:
        """The folder is in `parent`, by default that of temporary files; `limits` are the child's,
        by default those of the settings."""
        self._stack = contextlib.ExitStack()
        self._limits = limits
        self._parent, self._prefix = parent, prefix
        self._folder: Path | None = None
        self._process: ModelProcess | None = None
        self._files: dict[str, Path] = {}

    @property
    def folder(self) -> Path:
        """The folder, to which the child may write."""
        if self._folder is None:
            made = tempfile.TemporaryDirectory(
                dir=self._parent, prefix=self._prefix, ignore_cleanup_errors=True
            )
            self._folder = Path(self._stack.enter_context(made)).resolve()
        return self._folder

    def new_folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder within the folder, which ends before it; a fork of the child may still write."""
        return tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True)

    def process(self, target: str, model: str) -> ModelProcess:
        """The child, which has started to import TVM; `target` as `ModelProcess` has it."""
        if self._process is None:
            self._process = ModelProcess(
                target, model, writable=(self.folder,), limits=self._limits
            )
            self._stack.callback(self.end_process)
        self._process.start(model)
        return self._process

    def end_process(self) -> None:
        """End the child, which holds what it has read; another one starts when it is needed."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def keep(self, version: str, file: Path) -> None:
        """Keep the file of an import, which lies within the folder, for `file_of`."""
        self._files[version] = file

    def file_of(self, model: StoredModel) -> Path:
        """The model's file within the folder, with its weights where it looks for them; raises
        NotFound."""
        if model.version not in self._files:
            self._files[model.version] = self._lay_out(model)
        return self._files[model.version]

    def _lay_out(self, model: StoredModel) -> Path:
        kind = ".pt2" if model.manifest.of_torch else ".onnx"
        path = self.folder / model.version / f"{model.version[:12]}{kind}"
        artifacts = artifacts_of_models()
        try:
            files.write(path, artifacts.get(model.manifest.file))
            for place, digest in model.manifest.data.items():
                files.write(path.parent / place, artifacts.get(digest))
        except KeyError:
            raise NotFound(
                f"The file of the model {model.name} is not in the artifact store any more.",
                hint="import it again",
            ) from None
        return path

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass
class ModelWork:
    """A session for models. Workers that it starts last until the end of `open_work`."""

    environment: Environment
    own: bool  #: this machine, or the board that it has, is of the environment
    lasting: LastingWorkers
    number: int | None = None  #: Id of the session; None: the one of all models, made when needed
    events: RunEvents = field(default_factory=RunEvents)
    workspace: Workspace = field(default_factory=Workspace)

    def process(self, model: str) -> ModelProcess:
        """The child that reads, plans and links models in the workspace; the name is for messages
        about this one."""
        return self.workspace.process(self.target, model)

    def start_workers(self) -> None:
        """Start the workers of this machine, if it measures, which get ready while the caller goes
        on."""
        if self.own:
            running.start_workers("tvm", self.lasting, self.events)

    @property
    def target(self) -> str:
        """JSON of the target that kernels are compiled for."""
        return self.environment.target

    @property
    def simulated(self) -> bool:
        """Whether the device is an emulated one, whose results count for it alone."""
        return "emulator" in self.environment.flags

    @property
    def runs_here(self) -> bool:
        """Whether it measures on cores of this machine."""
        return self.own and get_library("tvm").device.own_device() is None

    def session_id(self) -> int:
        """The session, which is made if it is not there."""
        if self.number is None:
            self.number = preparation.init_session("tvm", SESSION, conditions=_CONDITIONS).id
        return self.number

    def scope(self, *, winograd: bool = True, **only: int | None) -> ResultScope:
        """Results that count: all for this target, unless `only` says less."""
        return ResultScope(winograd=winograd, simulated=self.simulated, **only)

    @contextlib.contextmanager
    def showing(
        self,
        on_progress: Callable[[Progress], None],
        on_wait: Callable[[float, str], None],
        on_waiting: Callable[[str], None],
        on_log: Callable[[Path], None],
    ) -> Iterator[None]:
        """Show what is done within a `with` block, as `api.run` does."""
        before = self.events
        self.events = replace(
            before, on_progress=on_progress, on_wait=on_wait, on_waiting=on_waiting, on_log=on_log
        )
        try:
            yield
        finally:
            self.events = before

    def run(self, on_progress: Callable[[Progress], None] | None = None) -> None:
        """Work through the session, with workers here if it is of this machine's environment;
        `on_progress` takes the place of that of `showing`."""
        running.run(
            self.session_id(),
            workers=self.lasting if self.own else False,
            on_progress=on_progress,
            events=self.events,
        )


@contextlib.contextmanager
def open_work(
    session_id: int | None = None,
    *,
    model: str | None = None,
    output: Path | None = None,
    events: RunEvents = _SILENT,
    limits: ModelLimits | None = None,
) -> Iterator[ModelWork]:
    """The work on models in a session, or in that of all models on this machine.

    Where TUNA_EVAL_CPUS does not say how many, that one is for as many cores as the `model` was
    imported for; with `model=""`, for one that is to be imported, for all that this process can
    keep busy; without it for one. Libraries are made beside `output`, the file of one that is to be
    written. `limits` are the child's, by default those of the settings. Raises NotFound, and
    BadInput for a session of another library than TVM.
    """
    if output is not None and not output.parent.is_dir():
        raise BadInput(f"The folder {output.parent} does not exist.")
    with contextlib.ExitStack() as stack:
        if model is not None and session_id is None and not get_settings().eval_cpus:
            cores = usable_count()
            if model:
                with reading(open_database()) as connection:
                    cores = min(cores, store.find(connection, model).manifest.cores)
            if cores > 1:
                stack.enter_context(measuring_with(cores))
        environment = environment_of(session_id)
        here = get_library("tvm").environment().machine_key
        own, lasting = environment.machine_key == here, stack.enter_context(LastingWorkers())
        place = (output.parent, f".{output.name[:99]}.") if output else ()
        workspace = stack.enter_context(Workspace(*place, limits=limits))
        yield ModelWork(environment, own, lasting, session_id, events, workspace)


def environment_of(session_id: int | None) -> Environment:
    """The environment of a session, or of this machine for models; raises NotFound, and BadInput
    for a session of another library than TVM."""
    if session_id is None:
        return preparation.session_environment("tvm", conditions=_CONDITIONS)
    with reading(open_database()) as connection:
        found = sessions.get(connection, session_id).environment
    if found.library != "tvm":
        raise BadInput(
            f"Session {session_id} belongs to {found.library}, which compiles no models.",
            hint="`tuna init-session tvm -l WHY` makes one that does",
        )
    return found


def find_model(name: str, work: ModelWork) -> StoredModel:
    """The latest import under a name for the target of this work, whatever its number of cores.

    Raises NotFound, and BadInput where it was imported for another target.
    """
    with reading(open_database()) as connection:
        latest, imports = store.find(connection, name), store.list_all(connection)
    wanted, version = _without_cores(work.target), name.partition("@")[2]
    for model in imports:
        same = model.name == latest.name and model.version.startswith(version)
        if same and _without_cores(model.manifest.target) == wanted:
            return model
    of_session = "" if work.number is None else f" with --session-id {work.number}"
    raise BadInput(
        f"The model {latest.name} was imported for {_words(latest.manifest.target)}, and this is"
        f" for {_words(work.target)}.",
        hint=f"import it again{of_session}: `tuna model import {latest.name} FILE`",
    )


def planned_for(manifest: Manifest, work: ModelWork) -> Manifest:
    """The import for the number of cores of this work."""
    return manifest.model_copy(update={"target": work.target})


def _without_cores(target: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(target).items() if name != "num-cores"}


def _words(target: str) -> str:
    return toolchain.to_words(json.loads(target))
