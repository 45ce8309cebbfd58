"""The build of a model: planned in a child, compiled, checked and timed by a job, and linked."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tuna.api.services import artifacts_of_models
from tuna.configs import ConvConfig
from tuna.configs.model import TOLERANCE
from tuna.errors import BadInput, NotFound, TunaError
from tuna.sandbox.cores import available_cpus, some_cpus
from tuna.settings import get_settings
from tuna_models import files
from tuna_models.api.model_jobs import MeasuredModel, compiled_functions, measure
from tuna_models.api.model_work import ModelWork
from tuna_models.files import BuildCache, key_of
from tuna_models.manifest import Class, Manifest
from tuna_models.process import ModelProcess
from tuna_models.store import StoredModel

#: The runtime that is asked where the reference has no answer, or another.
_REFERENCE, _RIVAL = "reference", "onnxruntime"
#: How a file of numpy.savez begins: it is a zip archive.
_NPZ = b"PK\x03\x04"


@dataclass(frozen=True)
class Checks:
    """Contenders and inputs of the check of a built model; raises BadInput for a file that has no
    recorded inputs."""

    #: onnxruntime and PyTorch, where they are installed, if the device is this machine
    rivals: bool = True
    untuned: bool = False  #: what TVM makes of the model without tuning, which takes long
    recorded: Path | None = None  #: an npz file with inputs by name, in the place of random ones
    seed: int = 0  #: of the random inputs

    def __post_init__(self) -> None:
        if self.recorded is not None:
            check_recorded(self.recorded)

    @property
    def key(self) -> list[Any]:
        """Return all that the answers of the checks depend on."""
        recorded = (
            "" if self.recorded is None else hashlib.sha256(self.recorded.read_bytes()).hexdigest()
        )
        return [self.rivals, self.untuned, recorded, self.seed]


def check_recorded(path: Path) -> Path:
    """The path of a file of recorded inputs; raises BadInput for one of another form."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        if stream.read(len(_NPZ)) == _NPZ:
            return path
    raise BadInput(f"{path} is no file of NumPy arrays.", hint="write one with numpy.savez")


@dataclass(frozen=True)
class Build:
    """A build that is wanted."""

    work: ModelWork
    model: StoredModel
    manifest: Manifest  #: for the target that it is for
    records: Mapping[str, Any]
    winograd: bool
    compare: bool
    checks: Checks

    @property
    def request(self) -> dict[str, Any]:
        """All that the build depends on, but for Tuna's own code."""
        return {
            "model": self.manifest.digest,
            "environment": self.work.environment.machine_key,
            "records": self.records,
            "winograd": self.winograd,
            "compare": self.compare,
            "checks": self.checks.key,
        }


def made(wanted: Build, library: Path) -> tuple[dict[str, Any], bool]:
    """Write the built model to `library`, in a temporary folder; returns what was found of it, and
    whether it was taken from the cache, which has every build."""
    cache, key = BuildCache(get_settings().home / "cache" / "models"), key_of(wanted.request)
    facts = cache.find(key, library)
    if facts is not None:
        return facts, True
    facts = _make(wanted, library)
    # a full disk: the next build takes as long as this one
    with contextlib.suppress(TunaError, OSError):
        cache.keep(key, library, facts)
    return facts, False


def _make(wanted: Build, library: Path) -> dict[str, Any]:
    """Build the model, check and time it."""
    model, manifest, checks = wanted.model, wanted.manifest, wanted.checks
    kind = ".pt2" if manifest.of_torch else ".onnx"
    source = library.parent / "model" / f"{model.version[:12]}{kind}"
    _lay_out(model, source)
    recorded = None if checks.recorded is None else checks.recorded.resolve()
    readable = (recorded,) if recorded else ()
    with ModelProcess(
        manifest.target, model.name, writable=(library.parent,), readable=readable
    ) as process:
        making = _Making(wanted, process, library.parent, source)
        facts = making.all()
        making.link(facts["measured"]["functions"], library)
    rivals = checks.rivals and wanted.work.runs_here
    facts |= _compared(making, library) if rivals else {"absent": {}, "rival_errors": {}}
    apart = {name: error for name, error in facts["rival_errors"].items() if error > facts["near"]}
    if apart and not facts["remark"]:
        facts["remark"] = _disagreement(apart, bool(facts["quantised"]))
    facts["errors"] |= facts.pop("rival_errors")
    return {**facts, "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _disagreement(apart: Mapping[str, float], quantised: bool) -> str:
    """Say which runtimes differ from a model that agrees with the reference, and by how much."""
    names = " and ".join(f"from {name} by {error:.2g}" for name, error in apart.items())
    text = f"the built model, right by its reference, differs {names} of the largest value"
    return f"{text}, as quantised models do from one runtime to the next" if quantised else text


class _Making:
    """A build, with the child that plans and links it."""

    def __init__(self, wanted: Build, process: ModelProcess, folder: Path, source: Path) -> None:
        """`folder` is a temporary one, `source` the model's file in it."""
        self.wanted, self._process, self._folder = wanted, process, folder
        manifest, checks = wanted.manifest, wanted.checks
        self.model = {"path": str(source), "shapes": manifest.shapes, "values": manifest.values}
        self.given = {
            "inputs": [value.model_dump(mode="json") for value in manifest.inputs],
            "seed": checks.seed,
            "recorded": str(checks.recorded.resolve()) if checks.recorded else "",
        }

    def all(self) -> dict[str, Any]:
        """Plan, check and time the model, with the kernels that were the fastest inside it."""
        wanted = self.wanted
        # before anything is built, for inputs may be refused
        answers = _Answers(self)
        plan = self._planned(wanted.records, compare=wanted.compare)
        measured, verdict = answers.judged(plan)
        first = plan["places"]
        compared = {
            key: _fastest(places, measured.parts_ms) for key, places in plan["places"].items()
        }
        chosen = {key: one["chosen"] for key, one in compared.items()}
        if any(place != 0 for place in chosen.values()) or (first and wanted.checks.untuned):
            refused = plan["refused_records"]
            plan = self._planned(_with_chosen(wanted.records, chosen), compare=False)
            plan["refused_records"] |= refused
            measured, verdict = answers.judged(plan)
        # compared tasks were measured, even where the predicted kernel was the fastest
        plan["classes"] |= dict.fromkeys(compared, Class.EXACT.value)
        return {"plan": plan, "measured": vars(measured), "compared": compared, **verdict}

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The child's answer to an operation on the model."""
        return self._process.call(op, **self.model, **arguments)

    def difference(self, found: Path, expected: Path) -> float:
        """The largest error of answers against others."""
        answer = self._process.call("difference", found=str(found), expected=str(expected))
        return float(answer["error"])

    def measure(self, plan: Mapping[str, Any], answers: Path) -> MeasuredModel:
        """The planned model's job in the session."""
        return measure(
            self.wanted.work, self.wanted.model, self._folder, answers, plan["operations"]
        )

    def answers_by(self, name: str) -> Path:
        """A file for the answers of a runtime, or of the reference."""
        return self._folder / f"{name}.npz"

    def link(self, functions: str, library: Path) -> None:
        """Link the planned model and its compiled functions, by their digest."""
        built = compiled_functions(functions, self._folder / "functions.zip")
        self._process.call(
            "link",
            folder=str(self._folder),
            functions=str(built),
            target=self.wanted.manifest.target,
            output=str(library),
        )

    def _planned(self, records: Mapping[str, Any], *, compare: bool) -> dict[str, Any]:
        return self.call(
            "plan",
            target=self.wanted.manifest.target,
            records=records,
            winograd=self.wanted.winograd,
            compare=compare,
            untuned=self.wanted.checks.untuned,
            folder=str(self._folder),
        )


class _Answers:
    """The right answers of a model, by the reference and by other runtimes."""

    def __init__(self, making: _Making) -> None:
        self._making = making
        self._rules = dict[str, Mapping[str, Any]]()
        self._near = TOLERANCE
        self._unanswered = self._written(_REFERENCE, "")

    def judged(self, plan: Mapping[str, Any]) -> tuple[MeasuredModel, dict[str, Any]]:
        """The measured model, with `errors` by what it was compared with, a `remark`, the `rule`
        by which it was compared, `near` and `quantised` as `child.answer` has them, and a `report`
        of what was counted.

        Where there is no reference, or it differs, onnxruntime is asked. Raises BadInput for a
        wrong answer.
        """
        making, results, doubts = self._making, dict[str, MeasuredModel](), dict[str, float]()
        if not self._unanswered:
            results[_REFERENCE] = making.measure(plan, making.answers_by(_REFERENCE))
        agrees = _REFERENCE in results and results[_REFERENCE].right
        if not agrees and not self._written(_RIVAL, _RIVAL):
            results[_RIVAL] = making.measure(plan, making.answers_by(_RIVAL))
            if _REFERENCE in results:
                paths = map(making.answers_by, (_RIVAL, _REFERENCE))
                doubts[_RIVAL] = making.difference(*paths)
        wanted = making.wanted
        recorded = wanted.checks.recorded is not None
        checked = Checked(
            {name: "" if result.right else result.fault for name, result in results.items()},
            {name: apart for name, apart in doubts.items() if apart > self._near},
            self._unanswered,
            recorded,
            winograd=wanted.winograd and _has_winograd(wanted.manifest),
        )
        remark = judge(wanted.manifest.opset, checked)
        errors = {name: _error(result) for name, result in results.items()}
        if recorded and _REFERENCE in errors:
            errors = {"reference on recorded inputs": errors.pop(_REFERENCE), **errors}
        name = next(name for name, result in results.items() if result.right)
        rule = self._rules[name]
        facts = {
            "rule": rule["rule"],
            "near": rule["tolerance"],
            "quantised": rule["quantised"],
            "report": results[name].report,
        }
        return results[name], {"errors": errors, "remark": remark, **facts}

    def _written(self, name: str, by: str) -> str:
        """Write the answers of the reference or of a runtime; returns why there are none."""
        path = self._making.answers_by(name)
        answer = self._making.call("answer", given=self._making.given, by=by, output=str(path))
        if not answer["unanswered"]:
            self._rules[name], self._near = answer, float(answer["tolerance"])
        return str(answer["unanswered"])


def _error(measured: MeasuredModel) -> float:
    """The error of a measured model; infinite where the answer breaks another rule."""
    return float("inf") if measured.error is None else measured.error


def _has_winograd(manifest: Manifest) -> bool:
    """Whether the model has convolutions of which Winograd's kernels are right to fewer digits."""
    cores = (entry.task.core for entry in manifest.tasks)
    return any(isinstance(core, ConvConfig) and core.fil_h == core.fil_w == 3 for core in cores)


def _fastest(places: Mapping[str, int | None], parts_ms: Mapping[str, float]) -> dict[str, Any]:
    """The kernels of a task inside the model: the time of each, and the `chosen` one, by its place
    among the task's records; None: the predicted kernel."""
    times_ms = {name: parts_ms[name] for name in places}
    best = min(times_ms, key=lambda name: times_ms[name])
    return {"times_ms": list(times_ms.values()), "chosen": places[best]}


def _with_chosen(records: Mapping[str, Any], chosen: Mapping[str, int | None]) -> dict[str, Any]:
    """The records, of the compared tasks the chosen one alone."""
    found = {key: [each[chosen.get(key) or 0]] for key, each in records.items()}
    return {key: each for key, each in found.items() if chosen.get(key, 0) is not None}


def _compared(making: _Making, library: Path) -> dict[str, Any]:
    """Time the library in turn with other runtimes on this machine."""
    manifest, checks = making.wanted.manifest, making.wanted.checks
    # Several threads are timed by the wall clock: each gets a core.
    cpus = some_cpus(min(manifest.cores, len(available_cpus()))) if manifest.cores > 1 else None
    recorded = (checks.recorded.resolve(),) if checks.recorded else ()
    # Another child: it has only what a user's program has.
    with ModelProcess(
        manifest.target, making.wanted.model.name, readable=(library.parent, *recorded), cpus=cpus
    ) as process:
        found = process.call(
            "compare",
            **making.model,
            library=str(library),
            given=making.given,
            threads=process.threads,
        )
    names = ("times_ms", "wall_ms", "absent")
    return {name: found[name] for name in names} | {"rival_errors": found["errors"]}


@dataclass(frozen=True)
class Checked:
    """What a built model was compared with."""

    #: what is wrong by the reference, and by runtimes; empty where nothing is
    faults: Mapping[str, str]
    doubts: Mapping[str, float]  #: errors of runtimes against the reference, of those that differ
    unanswered: str = ""  #: why the reference has no answer
    recorded: bool = False  #: on inputs of a file
    winograd: bool = False  #: its sums may be the reason


def judge(opset: str, checked: Checked) -> str:
    """Return a remark on the check of a model, empty where its answer is the reference's;
    raises BadInput for a wrong one.

    Where the reference cannot compute the model, the others' answers count. Where all of them agree
    with the model and differ from the reference, it is that which is wrong. `opset` as in the
    manifest.
    """
    reference = "PyTorch's own answer" if " " in opset else "ONNX's reference evaluator"
    inputs = "on recorded inputs" if checked.recorded else "on random inputs"
    others = {name: fault for name, fault in checked.faults.items() if name != _REFERENCE}
    names, verb = " and ".join(others), "agree" if len(others) > 1 else "agrees"
    agree = bool(others) and not any(others.values())
    hint = "it is a fault of Tuna or TVM"
    if checked.winograd:
        hint = f"build it without Winograd: --no-winograd; if that fails too, {hint}"
    if checked.unanswered:
        why = f"{reference} cannot compute the model ({checked.unanswered})"
        if agree:
            return f"{why}: it was compared with {names}, which {verb}"
        if others:
            faults = "; ".join(f"by {name} {fault}" for name, fault in others.items() if fault)
            raise BadInput(f"The built model is wrong, {inputs}: {faults}; {why}.", hint=hint)
        raise BadInput(
            f"{why}, and no other runtime is here that can.",
            hint="with onnxruntime installed its answer is compared: pip install onnxruntime",
        )
    fault = checked.faults[_REFERENCE]
    if not fault:
        return ""
    if agree and all(name in checked.doubts for name in others):
        return (
            f"{reference} is wrong here: by it {fault}, {inputs}; {names} {verb} with the model,"
            f" and not with {reference}"
        )
    text = f"The built model is wrong by {reference}, {inputs}: {fault}"
    for name, other in others.items():
        apart = checked.doubts.get(name)
        between = (
            "which agrees with it" if apart is None else f"which differs from it by {apart:.2g}"
        )
        text += f"; by {name}, {between}, {other or 'the model is right'}"
    raise BadInput(f"{text}.", hint=hint)


def _lay_out(model: StoredModel, path: Path) -> None:
    """Write the model's file to `path`, and its weights where it looks for them; raises
    NotFound."""
    artifacts = artifacts_of_models()
    try:
        beside = {place: artifacts.get(digest) for place, digest in model.manifest.data.items()}
        files.lay_out(path, artifacts.get(model.manifest.file), beside)
    except KeyError:
        raise NotFound(
            f"The file of the model {model.name} is not in the artifact store any more.",
            hint="import it again",
        ) from None
