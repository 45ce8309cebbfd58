"""A session described step by step, then run:
`t.session("tvm").layers(tag="x").candidates(16).run().best()`."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuna import api
from tuna.coordinator.session_run import Progress
from tuna.errors import BadInput
from tuna.exports import ExportReport
from tuna.results.result_rows import MAX_LIMIT, ResultFilter, ResultRows


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
        NotFound for a tag or solver that there is not, BadInput for layers or options that cannot
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
    errored: int  #: jobs of the session that failed for good
    check: Callable[[], None] = field(default=lambda: None, repr=False)

    def results(self, n_best: int | None = None) -> ResultRows:
        """All results by layer and time; with `n_best` the fastest trials of each solver."""
        self.check()
        return api.query(
            ResultFilter(session_id=self.session_id, tag=self.tag, n_best=n_best, limit=MAX_LIMIT)
        )

    def best(self) -> ResultRows:
        """The fastest result of each layer; a baseline's where there is no other."""
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
