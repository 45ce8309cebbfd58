"""The build of a model: planned in a child, compiled, checked and timed by a job, and linked."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tuna.api import get_settings
from tuna.configs.model import TOLERANCE
from tuna.errors import BadInput, TunaError
from tuna.sandbox.cores import available_cpus, some_cpus
from tuna_models.child_answers import (
    ChildAnswer,
    Contenders,
    Data,
    LargestError,
    ModelFile,
    Plan,
    Sentence,
    WrittenAnswers,
)
from tuna_models.judging.checks import (
    ABSENT,
    REFERENCE,
    RIVAL,
    RUNTIMES,
    Checked,
    Checks,
    Imprecise,
    disagreement,
    judge,
)
from tuna_models.manifest import Class, Manifest, Precision, Promise
from tuna_models.process import ModelProcess
from tuna_models.work.files import BuildCache, key_of
from tuna_models.work.model_job import MeasuredModel, compiled_functions, measure
from tuna_models.work.session import ModelWork
from tuna_models.work.store import StoredModel

#: Candidate kernels of a task, the best first: solver, params, and whether of a similar task.
Records = Mapping[str, Sequence[tuple[str, str, bool]]]


class Verdict(Data):
    """A measured model whose answer is right."""

    measured: MeasuredModel
    errors: dict[str, float]  #: Largest error, by the reference or runtime it is against
    remark: str  #: What was wrong with the reference; empty where nothing was
    rule: str  #: How it was compared, in one line
    tolerance: float  #: Largest error that the rule allows
    quantised: int  #: Number of quantised tensors
    report: str  #: Numbers of whole numbers that differ within their rules


class ComparedTask(Data):
    """A task of which several kernels were timed inside the model."""

    times_ms: tuple[float, ...]  #: Time of each kernel, all its calls together
    chosen: int | None  #: The fastest, by its place among the records; None: the predicted kernel


class BuildFacts(Data):
    """Facts about a build, as the cache keeps it beside the library."""

    plan: Plan
    verdict: Verdict
    compared: dict[str, ComparedTask]  #: By task key
    contenders: Contenders
    made_at: str  #: Time of the build in ISO format
    cached: bool = False  #: It was made before

    @property
    def errors(self) -> Mapping[str, float]:
        """Largest errors, against the reference first, then against other runtimes."""
        return self.verdict.errors | self.contenders.errors

    @property
    def remark(self) -> str:
        """A fault of the reference, or runtimes that differ from the model; empty if neither."""
        tolerance, errors = self.verdict.tolerance, self.contenders.errors
        apart = {name: error for name, error in errors.items() if error > tolerance}
        if self.verdict.remark or not apart:
            return self.verdict.remark
        return disagreement(apart, quantised=bool(self.verdict.quantised))


@dataclass(frozen=True)
class Build:
    """A build that is wanted."""

    work: ModelWork
    model: StoredModel
    manifest: Manifest  #: That of the model, for the target of the work
    records: Records
    winograd: bool
    checks: Checks

    @property
    def request(self) -> dict[str, Any]:
        """All that the build depends on, but for Tuna's own code."""
        return {
            "model": self.manifest.digest,
            "environment": self.work.environment.machine_key,
            "records": self.records,
            "winograd": self.winograd,
            "checks": self.checks.key,
        }

    def run(self, library: Path) -> BuildFacts:
        """Write the built model to `library`, in a temporary folder: planned, checked and timed
        with the kernels that were the fastest inside it, or taken from the cache of all builds.

        Raises BadInput for a wrong answer, Imprecise for one of a model in bf16.
        """
        cache, key = BuildCache(get_settings().home / "cache" / "models"), key_of(self.request)
        kept = cache.find(key, library)
        if kept is not None:
            return BuildFacts.model_validate({**kept, "cached": True})
        draft = _Draft(self, self.work.process(self.model.name), library.parent)
        self.work.start_workers()
        plan = draft.plan(self.records, compare=self.checks.compare)
        verdict = draft.judged(plan)
        compared = {
            task: _fastest(places, verdict.measured.parts_ms)
            for task, places in plan.places.items()
        }
        chosen = {task: task_times.chosen for task, task_times in compared.items()}
        if any(place != 0 for place in chosen.values()) or (compared and self.checks.untuned):
            refused = plan.refused_records
            plan = draft.plan(_with_chosen(self.records, chosen), compare=False)
            plan = plan.model_copy(update={"refused_records": plan.refused_records | refused})
            verdict = draft.judged(plan)
        draft.link(verdict.measured.functions, library)
        # compared tasks were measured, even where the predicted kernel was the fastest
        exact = dict.fromkeys(compared, Class.EXACT)
        contenders = Contenders()
        if self.checks.rivals and self.work.runs_here:
            absent = {name: ABSENT for name, package in RUNTIMES.items() if not find_spec(package)}
            contenders = (
                Contenders(absent=absent)
                if len(absent) == len(RUNTIMES)
                else self._timed_in_turn(draft, library)
            )
        facts = BuildFacts(
            plan=plan.model_copy(update={"classes": plan.classes | exact}),
            verdict=verdict,
            compared=compared,
            contenders=contenders,
            made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        # a full disk: the next build takes as long as this one
        with contextlib.suppress(TunaError, OSError):
            cache.keep(key, library, facts.model_dump())
        return facts

    def promise(self, folder: Path, built_error: float = 0.0) -> Promise | None:
        """What the model leaves in fp32 so that its error in bf16 is kept, more than now if it was
        built and was off by `built_error`; None where that cannot be measured."""
        return _Draft(self, self.work.process(self.model.name), folder).promise(built_error)

    def _timed_in_turn(self, draft: _Draft, library: Path) -> Contenders:
        """Time the library in turn with other runtimes on this machine."""
        cores = self.manifest.cores
        # Several threads are timed by the wall clock: each gets a core.
        cpus = some_cpus(min(cores, len(available_cpus()))) if cores > 1 else None
        # Another child: it has only what a user's program has.
        with ModelProcess(
            self.manifest.target, self.model.name, readable=[self.work.workspace.folder], cpus=cpus
        ) as process:
            return process.call(
                Contenders,
                "compare",
                model=draft.model,
                library=str(library),
                given=draft.given,
                threads=process.threads,
            )


class _Draft:
    """A build in work, with the child that plans and links it, and the right answers."""

    def __init__(self, build: Build, process: ModelProcess, folder: Path) -> None:
        """Take the reference's answers that an earlier build had, or begin to write them.

        The number of inputs depends on how fast the reference is at the time. So answers that are
        written anew may be others, for which the job of an interrupted build would not count.
        """
        manifest, checks = build.manifest, build.checks
        self._build, self._process, self._folder = build, process, folder
        path = build.work.workspace.file_of(build.model)
        file = ModelFile(
            path=str(path),
            shapes=manifest.shapes,
            values=manifest.values,
            precision=manifest.precision,
            in_fp32=manifest.in_fp32,
            max_error=checks.max_error,
        )
        self.model = file.model_dump()
        recorded = ""
        if checks.recorded is not None:
            recorded = shutil.copy(checks.recorded, tempfile.mkdtemp(dir=folder))
        self.given = {
            "inputs": [value.model_dump(mode="json") for value in manifest.inputs],
            "seed": checks.seed,
            "recorded": recorded,
        }
        self._rules: dict[str, WrittenAnswers] = {}
        self._tolerance = TOLERANCE
        self._unanswered: str | None = None  #: None: not asked yet
        self._cache = BuildCache(get_settings().home / "cache" / "answers", ".npz")
        versions = [version(package) for package in ("numpy", "onnx")]
        self._key = key_of(
            {"model": manifest.source, "inputs": checks.inputs_key, "versions": versions}
        )
        kept = self._cache.find(self._key, self._answers(REFERENCE))
        if kept is not None:
            self._unanswered = self._taken(REFERENCE, WrittenAnswers.model_validate(kept))
        elif process.limits.forks:
            process.call(ChildAnswer, "begin_answer", **self._asked(REFERENCE, ""))

    def plan(self, records: Records, *, compare: bool) -> Plan:
        """Plan the model with the best of the records; with `compare` others are timed too."""
        return self._process.call(
            Plan,
            "plan",
            model=self.model,
            target=self._build.manifest.target,
            records=records,
            winograd=self._build.winograd,
            compare=compare,
            untuned=self._build.checks.untuned,
            folder=str(self._folder),
        )

    def judged(self, plan: Plan) -> Verdict:
        """Have the planned model measured by a job, and compare its answer.

        Without a reference, or if it differs, onnxruntime is asked. Raises BadInput for a
        wrong answer, and for inputs that do not fit.
        """
        build, results, doubts = self._build, dict[str, MeasuredModel](), dict[str, float]()
        job = build.work, build.model, self._folder
        unanswered = self._reference()
        if not unanswered:
            results[REFERENCE] = measure(*job, self._answers(REFERENCE), plan.operations)
        agrees = REFERENCE in results and results[REFERENCE].right
        refused = "" if agrees else self._written(RIVAL, RIVAL)
        if not agrees and not refused:
            results[RIVAL] = measure(*job, self._answers(RIVAL), plan.operations)
            if REFERENCE in results:
                paths = {
                    "found": str(self._answers(RIVAL)),
                    "expected": str(self._answers(REFERENCE)),
                }
                apart = self._process.call(LargestError, "difference", **paths).error
                doubts = {RIVAL: apart} if apart > self._tolerance else {}
        recorded = build.checks.recorded is not None
        in_bf16 = build.manifest.precision is Precision.BF16
        right_ones = [name for name, result in results.items() if result.right]
        alone = ""
        if REFERENCE in results and not right_ones and not in_bf16:
            alone = self._alone()
        checked = Checked(
            {name: "" if result.right else result.fault for name, result in results.items()},
            doubts,
            unanswered,
            refused if find_spec(RUNTIMES[RIVAL]) else "",
            recorded,
            winograd=plan.winograd,
            bf16=in_bf16,
            alone=alone,
        )
        # infinite where the answer breaks another rule
        errors = {
            name: math.inf if result.error is None else result.error
            for name, result in results.items()
        }
        try:
            remark = judge(build.manifest.opset, checked)
        except BadInput as error:
            if not in_bf16 or REFERENCE not in errors:
                raise
            imprecise = Imprecise(str(error), hint=error.hint)
            imprecise.error = errors[REFERENCE]
            raise imprecise from None
        if recorded and REFERENCE in errors:
            errors = {"reference on recorded inputs": errors.pop(REFERENCE), **errors}
        right = right_ones[0]
        rule = self._rules[right]
        return Verdict(
            measured=results[right],
            errors=errors,
            remark=remark,
            rule=rule.rule,
            tolerance=rule.tolerance,
            quantised=rule.quantised,
            report=results[right].report,
        )

    def promise(self, built_error: float) -> Promise | None:
        """See `Build.promise`."""
        if self._reference():
            return None
        rule = self._rules[REFERENCE]
        return (self._kept(rule, built_error) if built_error else rule).promise

    def _reference(self) -> str:
        """Write the answers of the reference, if they are not there; returns why there are none."""
        if self._unanswered is None:
            self._unanswered = self._written(REFERENCE, "")
            if not self._unanswered:
                rule = self._rules[REFERENCE]
                build = self._build
                if build.manifest.precision is Precision.BF16 and build.checks.max_error < 1:
                    rule = self._rules[REFERENCE] = self._kept(rule, 0.0)
                with contextlib.suppress(TunaError, OSError):  # a full disk
                    self._cache.keep(self._key, self._answers(REFERENCE), rule.model_dump())
        return self._unanswered

    def _kept(self, rule: WrittenAnswers, built_error: float) -> WrittenAnswers:
        """What is known of the reference's answers, with what stays in fp32."""
        return self._process.call(
            WrittenAnswers,
            "keep_error",
            model=self.model,
            target=self._build.manifest.target,
            given=self.given,
            answers=str(self._answers(REFERENCE)),
            facts=rule.model_dump(),
            built_error=built_error,
        )

    def link(self, functions: str, library: Path) -> None:
        """Link the planned model and its compiled functions, which are given by their SHA-256."""
        built = compiled_functions(functions, self._folder / "functions.zip")
        self._process.call(
            ChildAnswer,
            "link",
            folder=str(self._folder),
            functions=str(built),
            target=self._build.manifest.target,
            output=str(library),
        )

    def _answers(self, name: str) -> Path:
        """A file for the answers of a runtime, or of the reference."""
        return self._folder / f"{name}.npz"

    def _written(self, name: str, by: str) -> str:
        """Write the answers of the reference or of a runtime; returns why there are none."""
        answers = self._process.call(WrittenAnswers, "answer", **self._asked(name, by))
        return self._taken(name, answers)

    def _taken(self, name: str, answers: WrittenAnswers) -> str:
        """Compare with these answers from now on; returns why there are none."""
        if not answers.unanswered:
            self._rules[name], self._tolerance = answers, answers.tolerance
        return answers.unanswered

    def _asked(self, name: str, by: str) -> dict[str, Any]:
        """Arguments of the child's `answer`."""
        output = str(self._answers(name))
        return {"model": self.model, "given": self.given, "by": by, "output": output}

    def _alone(self) -> str:
        """A sentence on the first operator that is wrong alone; empty if the child ends at that."""
        answers = str(self._answers(REFERENCE))
        with contextlib.suppress(BadInput):  # what is to be said is that the model is wrong
            return self._process.call(
                Sentence, "operators", model=self.model, answers=answers
            ).sentence
        return ""


def _fastest(places: Mapping[str, int | None], parts_ms: Mapping[str, float]) -> ComparedTask:
    """Compare the functions with the kernels of a task by their times inside the model."""
    times_ms = {name: parts_ms.get(name, 0.0) for name in places}  # missing: of the shortest
    best = min(times_ms, key=lambda name: times_ms[name])
    return ComparedTask(times_ms=tuple(times_ms.values()), chosen=places[best])


def _with_chosen(records: Records, chosen: Mapping[str, int | None]) -> Records:
    """The records, of the compared tasks the chosen one alone."""
    found = {key: [each[chosen.get(key) or 0]] for key, each in records.items()}
    return {key: each for key, each in found.items() if chosen.get(key, 0) is not None}
