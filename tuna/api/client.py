"""`tuna.open()`: the functions of this package as methods, for notebooks and scripts.

A session is described step by step, then run:
`t.session("tvm").layers(tag="x").candidates(16).run().best()`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tuna import api
from tuna.configs.sources import api_of
from tuna.coordinator.session_run import Progress, RunEvents
from tuna.db.database import open_database
from tuna.db.overview import Overview
from tuna.errors import BadInput
from tuna.exports import ExportReport
from tuna.results.coverage import Coverage
from tuna.results.result_rows import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    ResultFilter,
    ResultRows,
    html_table,
    moment,
)
from tuna.settings import get_settings


@dataclass(frozen=True)
class SessionPlan:
    """A description of a session. Each method returns another plan; nothing is written before
    `run()`."""

    library: str
    reason: str
    tag: str | None = None
    source: Path | tuple[str, ...] | None = None
    names: tuple[str, ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], None] = field(default=lambda: None, repr=False)

    def layers(
        self,
        source: str | os.PathLike[str] | Sequence[str] | None = None,
        *,
        tag: str | None = None,
    ) -> SessionPlan:
        """The layers of a file or a list of lines (driver commands, JSON objects), imported under
        `tag`; without a source those that carry the tag. A tag need not be given with a source: it
        is the file's name, or made from the lines."""
        if source is None and tag is None:
            raise BadInput("Say which layers: a file, lines, or tag=.")
        if source is None:
            return replace(self, tag=tag, source=None)
        if isinstance(source, str | os.PathLike):
            path = Path(source)
            return replace(self, tag=tag or path.stem, source=path)
        lines = tuple(source)
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return replace(self, tag=tag or f"python-{digest[:8]}", source=lines)

    def solvers(self, *names: str) -> SessionPlan:
        """Only these solvers; default: every applicable one."""
        return replace(self, names=names)

    def candidates(self, count: int) -> SessionPlan:
        """So many points of each solver's parameter space."""
        return self.options(candidates=count)

    def options(self, **values: object) -> SessionPlan:
        """Job options; `tuna solvers LIBRARY --options` lists them."""
        return replace(self, values={**self.values, **values})

    def run(
        self, *, processes: int | None = None, on_progress: Callable[[Progress], None] | None = None
    ) -> SessionResults:
        """Import the layers, load the jobs and run them with workers on this machine. Interrupted,
        the same call goes on.

        `processes`: compile processes; `on_progress` is called a few times a second at most. Raises
        NotFound for an unknown tag or solver, BadInput for layers or options that cannot
        be.
        """
        self.check()
        if self.tag is None:
            raise BadInput("Say which layers: layers(...) before run().")
        session = api.init_session(self.library, self.reason, conditions=self.conditions)
        if self.source is not None:
            self._import(self.tag)
        api.update_solvers(self.library)
        api.update_applicability(session.id, self.tag)
        api.load_jobs(
            session.id, tag=self.tag, reason=self.reason, solvers=self.names, options=self.values
        )
        end = api.run(session.id, processes=processes, on_progress=on_progress)
        return SessionResults(session.id, self.tag, end.errored, self.check)

    def _import(self, tag: str) -> None:
        if isinstance(self.source, Path):
            api.import_configs(self.source, tag)
            return
        with tempfile.NamedTemporaryFile(
            "w", prefix="layers-", suffix=".txt", encoding="utf-8"
        ) as file:
            file.write("\n".join(self.source or ()) + "\n")
            file.flush()
            api.import_configs(Path(file.name), tag, strict=True)


@dataclass(frozen=True)
class SessionResults:
    """A session that was run, as far as its layers go."""

    session_id: int
    tag: str
    errored: int  #: number of the session's jobs that failed for good
    check: Callable[[], None] = field(default=lambda: None, repr=False)

    def results(self, n_best: int | None = None) -> ResultRows:
        """All results by layer and time; with `n_best` the fastest trials of each solver."""
        self.check()
        return api.query(
            ResultFilter(session_id=self.session_id, tag=self.tag, n_best=n_best, limit=MAX_LIMIT)
        )

    def best(self) -> ResultRows:
        """The fastest result of each layer; a baseline's if nothing else has one."""
        self.check()
        return api.winners(self.session_id, self.tag)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the session's report as one HTML file."""
        self.check()
        return api.write_report(self.session_id, Path(path))

    def export(
        self, form: str, directory: str | os.PathLike[str] = ".", **options: object
    ) -> ExportReport:
        """Write the session's results as a database, as `tuna export` does."""
        self.check()
        return api.export(self.session_id, form, Path(directory), **options)

    def _repr_html_(self) -> str:
        return self.best()._repr_html_()


def connect(home: str | os.PathLike[str] | None) -> Tuna:
    """Tuna with the settings of this process; `home` replaces `TUNA_HOME`, also for workers that it
    starts."""
    if home is not None:
        os.environ["TUNA_HOME"] = str(Path(home).expanduser().resolve())
        get_settings.cache_clear()
    open_database().dispose()  # made, if it is not there; what is wrong with it is raised now
    return Tuna(get_settings().home)


@dataclass(frozen=True)
class Tuna:
    """A database of results, and this machine to add to them."""

    home: Path

    def session(self, library: str, reason: str = "python", **conditions: str) -> SessionPlan:
        """A session to describe and then `run()`, which makes it unless it is there; `conditions`
        of measurement."""
        self._check()
        return SessionPlan(library, reason, conditions=dict(conditions), check=self._check)

    def tune(
        self,
        model: str | os.PathLike[str],
        *,
        minutes: float | None = None,
        name: str | None = None,
        batch: int | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        values: Mapping[str, Sequence[float]] | None = None,
        candidates: int = 4,
        winograd: bool = True,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> ModelHandle:
        """Import an ONNX file or a program of `torch.export` and tune its tasks on this machine,
        `minutes` at most.

        What another model has is not tuned again. `name`: default the file's; `batch`: first extent
        of the inputs that `shapes` does not name; inputs with `values` become constants.
        Interrupted, the same call goes on.
        """
        self._check()
        path = Path(model)
        stored = (
            api_of("models")
            .import_model(name or path.stem, path, batch=batch, shapes=shapes, values=values)
            .model
        )
        handle = ModelHandle(f"{stored.name}@{stored.version}", winograd=winograd)
        return handle.tune(minutes=minutes, candidates=candidates, on_progress=on_progress)

    def model(self, name: str) -> ModelHandle:
        """An imported model, `NAME` (the latest) or `NAME@VERSION`."""
        self._check()
        stored, _ = api_of("models").show_model(name)
        return ModelHandle(f"{stored.name}@{stored.version}")

    def models(self) -> list[str]:
        """`NAME@VERSION` of every imported model, the latest first."""
        self._check()
        return [f"{stored.name}@{stored.version}" for stored in api_of("models").list_models()]

    def query(
        self,
        *,
        model: str | None = None,
        tag: str | None = None,
        layer: str | None = None,
        op: str | None = None,
        shape: str | Sequence[str] = (),
        dtype: str | None = None,
        library: str | None = None,
        arch: str | None = None,
        device: str | None = None,
        environment: str | None = None,
        solver: str | None = None,
        session_id: int | None = None,
        since: datetime | str | None = None,
        n_best: int | None = None,
        limit: int = DEFAULT_LIMIT,
    ) -> ResultRows:
        """Results that meet all conditions, which are those of `tuna query`."""
        self._check()
        wanted = ResultFilter(
            model=model,
            tag=tag,
            layer=layer,
            op=op,
            shape=(shape,) if isinstance(shape, str) else tuple(shape),
            dtype=dtype,
            library=library,
            arch=arch,
            device=device,
            environment=environment,
            solver=solver,
            session_id=session_id,
            since=moment(since) if isinstance(since, str) else since,
            n_best=n_best,
            limit=limit,
        )
        return api.query(wanted)

    def coverage(
        self,
        name: str,
        arch: str | None = None,
        *,
        device: str | None = None,
        library: str | None = None,
    ) -> Coverage:
        """Return the share of a model, network or tag that has results on an architecture, by
        default the only one that was tuned for."""
        self._check()
        return api.coverage(name, arch, device=device, library=library)

    def status(self, session_id: int | None = None) -> list[Overview]:
        """All sessions, or one: jobs by state, failures by cause."""
        self._check()
        return api.status(session_id)

    def _check(self) -> None:
        """Settings are the process's: raise BadInput if another home was opened since."""
        if get_settings().home != self.home:
            raise BadInput(
                f"This process has opened {get_settings().home} since; one home at a time.",
                hint=f"open it again: tuna.open({str(self.home)!r})",
            )


@dataclass(frozen=True)
class ModelHandle:
    """An imported model."""

    name: str  #: model's name, `NAME@VERSION`
    winograd: bool = field(default=True, kw_only=True)
    #: number of jobs that failed for good when it was tuned
    errored: int = field(default=0, kw_only=True)

    def tune(
        self,
        *,
        minutes: float | None = None,
        candidates: int = 4,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> ModelHandle:
        """Tune its tasks, for so many minutes at most; what has a result is not measured again."""
        models = api_of("models")
        events = RunEvents() if on_progress is None else RunEvents(on_progress)
        with models.open_work(model=self.name, events=events) as work:
            limits = {"candidates": candidates, "minutes": minutes}
            tuned = models.tune_model(self.name, winograd=self.winograd, work=work, **limits)
        return ModelHandle(self.name, winograd=self.winograd, errored=tuned.errored)

    def build(
        self,
        output: str | os.PathLike[str],
        *,
        session_id: int | None = None,
        golden: int | None = None,
    ) -> Any:
        """Build the shared library `output` with the winners of a session, a golden version or all;
        check and time it."""
        return api_of("models").build_model(
            self.name, Path(output), session_id=session_id, golden=golden, winograd=self.winograd
        )

    def tasks(self) -> list[Any]:
        """Its tasks, with how often it calls each and the fastest kernel."""
        found: list[Any] = api_of("models").show_model(self.name)[1]
        return found

    def _repr_html_(self) -> str:
        cells = [
            (
                task.label,
                task.count,
                task.winner.solver if task.winner else "",
                task.winner and task.winner.time_ms,
            )
            for task in self.tasks()
        ]
        return html_table(self.name, ("task", "calls", "fastest", "ms"), cells)
