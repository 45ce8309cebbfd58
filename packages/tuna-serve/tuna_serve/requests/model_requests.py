"""The steps of a request for a model: import it, tune its tasks as far as the budget goes, build
it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tuna import api
from tuna.api import RunEvents
from tuna.api.documents import json_text
from tuna.api.rows import Job, networks, open_database, read_configs, reading, writing
from tuna.api.services import artifacts_of_models
from tuna.common.messages import counted
from tuna.configs import Config
from tuna.configs.sources import api_of
from tuna.libraries.registry import get_library
from tuna.vocabulary import RequestState
from tuna_serve.db import requests
from tuna_serve.requests import answers, known
from tuna_serve.requests.answers import RequestAnswer
from tuna_serve.requests.layers_work import RequestWork, cancel_jobs, set_priority, solvers_of
from tuna_serve.requests.uploads import uploaded_before, working_folder
from tuna_serve.requests.watch import Watch, begin_tuning, current
from tuna_serve.settings import service_settings


class BudgetUsed(Exception):
    """The budget is used up; raised through all that works on the model."""


class ModelRequestWork(RequestWork):
    """The work on a request for a model."""

    _tuning = False

    def run(self) -> None:
        """Work until the request is over; raises RequestCanceled, and TunaError for what makes it
        fail."""
        models, settings = api_of("models"), service_settings()
        limits = models.ModelLimits(
            min(settings.request_memory_mib, settings.service_memory_mib),
            settings.request_cpu_s,
            forks=False,
            memory_setting="the owner of the service sets TUNA_REQUEST_MEMORY_MIB",
            cpu_setting="the owner of the service sets TUNA_REQUEST_CPU_S",
        )
        events = RunEvents(on_progress=lambda _: self._look())
        with (
            models.open_work(self._session_id, events=events, limits=limits) as work,
            contextlib.ExitStack() as stack,
        ):
            if not self._request.tag:
                stack.enter_context(models.forgotten_if_refused(self._import(work)))
            layers = self._tasks()
            missing = {*layers} - {*self._exact(layers)}
            accepted = self._request.state is RequestState.ACCEPTED
            self._watch = Watch(self._request, get_library("tvm"))
            if accepted and not missing and self._asked.target_ms is None:
                self._build(work, RequestState.KNOWN, layers)
                return
            if accepted:
                if self._asked.target_ms is None:  # else it is built before the first job
                    models.check_model(self._request.tag, work=work)
                    self._look()
                self._begin(len(layers), len(missing))
            message = self._tune_within_budget(work)
            cancel_jobs(self._request)
            self._build(work, RequestState.BUILT, layers, message)
        set_priority(self._session_id)

    def _look(self) -> None:
        """Look at the request while jobs are worked on; raises RequestCanceled, BudgetUsed."""
        self._watch.now_and_then(BudgetUsed if self._tuning else None)

    def _import(self, work: Any) -> Any:
        """Import the file in the box, return the import; its tasks become layers under a tag."""
        with writing(open_database()) as connection:
            requests.write(connection, self._request.id, progress={"step": "import"})
        with working_folder() as place:
            path = place / "model"
            with path.open("w+b") as file:
                with uploaded_before():
                    artifacts_of_models().copy(self._request.upload, file)
                file.seek(0)
                ending = ".pt2" if file.read(2) == b"PK" else ".onnx"
            path = path.rename(path.with_name(f"{self._asked.name.replace('/', '-')}{ending}"))
            imported = api_of("models").import_model(
                self._asked.name,
                path,
                batch=self._asked.batch,
                shapes=self._asked.shapes,
                work=work,
            )
        with writing(open_database()) as connection:
            requests.write(connection, self._request.id, tag=imported.model.tag)
        self._request = current(self._request.id)
        return imported

    def _tasks(self) -> dict[int, tuple[Config, int]]:
        """Return the tasks of the model that solvers can run, by id, with their counts."""
        api.update_solvers("tvm")
        api.update_applicability(self._session_id, self._request.tag)
        with reading(open_database()) as connection:
            model_id, _ = networks.find(connection, self._request.tag)
            weights = networks.weights(connection, model_id)
            layers = {
                key: (layer, weights[key]) for key, layer in read_configs(connection, list(weights))
            }
        tunable = solvers_of(self._session_id, list(layers))
        return {key: layers[key] for key in layers if key in tunable}

    def _begin(self, layers: int, missing: int) -> None:
        with reading(open_database()) as connection:
            before = connection.execute(sa.select(sa.func.max(Job.id))).scalar() or 0
        numbers = {"layers": layers, "known": layers - missing, "jobs_before": before}
        self._request = begin_tuning(self._request, {**numbers, "step": "tune"})
        self._watch = Watch(self._request, get_library("tvm"))
        set_priority(self._session_id)

    def _tune_within_budget(self, work: Any) -> str:
        """Tune as far as the budget goes; return what was not reached."""
        if not self._watch.over:
            self._tuning = True
            try:
                return self._tune(work)
            except BudgetUsed:
                pass
            finally:
                self._tuning = False
        return f"The {self._watch.over} are used up: this is the best so far."

    def _tune(self, work: Any) -> str:
        target_ms = self._asked.target_ms
        models = api_of("models")
        tuned = models.tune_model(
            self._request.tag,
            minutes=self._watch.minutes_left,
            latency=None if target_ms is None else models.Latency(target_ms),
            work=work,
        )
        self._watch.look(added=tuned.added)
        said = []
        if tuned.reached is not None and tuned.reached.best_ms > tuned.reached.target_ms:
            reached = tuned.reached
            said.append(
                f"{reached.target_ms:g} ms were not reached ({reached.ending}; the estimates say"
                f" {reached.least_ms:.4g} ms at best): this is the best so far."
            )
        elif tuned.added < tuned.wanted and target_ms is None:
            left = counted(tuned.wanted - tuned.added, "job")
            said.append(f"The time was over with {left} left: this is the best so far.")
        if tuned.errored:
            said.append(f"{counted(tuned.errored, 'job')} failed.")
        return " ".join(said)

    def _build(
        self,
        work: Any,
        state: RequestState,
        layers: dict[int, tuple[Config, int]],
        message: str = "",
    ) -> None:
        """Build, check and time the model, and end the request with its files."""
        name = f"{self._asked.name.replace('/', '-')}.so"
        self._watch.look(step="build")
        with working_folder() as place:
            path = place / name
            models = api_of("models")
            checks = models.Checks(rivals=False, untuned=self._asked.untuned)
            built = models.build_model(self._request.tag, path, work=work, checks=checks)
            results, arch = self._exact(layers), self._environment.arch
            coverage = known.coverage_of(self._request.tag, arch, layers, results)
            documents: dict[str, bytes | Path] = {
                name: path,
                f"{name}.json": Path(f"{path}.json"),
                "coverage.json": json_text(coverage, indent=1).encode(),
            }
            self._watch.look()
            facts: dict[str, object] = {
                "layers": len(layers),
                "exact": len(results),
                "complete": len(results) == len(layers),
                "time_ms": built.time_ms,
                "errors": dict(built.errors),
                "device": built.device,
            }
            if built.untuned_ms is not None:
                facts["untuned_ms"], facts["in_turn_ms"] = built.untuned_ms
            answers.finish(self._watch.request, RequestAnswer(state, documents, message), **facts)
