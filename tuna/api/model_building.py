"""Models: build one with the kernels that won, check and time it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tuna.api.models import artifacts_of_models
from tuna.db.database import open_database
from tuna.db.engine import reading
from tuna.errors import BadInput, NotFound, TunaError
from tuna.golden.versions import find
from tuna.models import choice, files, store
from tuna.models.choice import Winner
from tuna.models.files import BuildCache, key_of
from tuna.models.manifest import Class, Manifest
from tuna.models.process import TOLERANCE, ModelProcess
from tuna.models.store import StoredModel
from tuna.sandbox.cores import available_cpus, eval_cpus, some_cpus
from tuna.settings import get_settings

#: How a file of numpy.savez begins: it is a zip archive.
_NPZ = b"PK\x03\x04"


@dataclass(frozen=True)
class BuiltModel:
    """A built model as it was checked and timed on this machine."""

    path: Path
    model: StoredModel
    errors: Mapping[
        str, float
    ]  #: relative to the largest magnitude, by what they are against: ONNX's `reference`, others
    times_ms: Mapping[
        str, Sequence[float]
    ]  #: by contender, rounds in turn: CPU time of the thread, of several wall time
    wall_ms: Mapping[str, Sequence[float]]  #: wall time of the same rounds
    absent: Mapping[str, str]  #: contenders that did not take part, and why
    remark: str  #: what was wrong with the reference, empty where nothing was
    tasks: Mapping[Class, int]
    shares: Mapping[Class, float]  #: of the time that the model's functions take
    runtime_share: float  #: of the time, spent in TVM's virtual machine and allocation
    functions_ms: Mapping[str, float]  #: by label, all calls together
    tuned_ms: Mapping[str, float]  #: the same as measured alone, of tasks that have such a result
    compared: int  #: tasks of which several kernels were timed inside the model
    made_at: str  #: when it was built, checked and timed: earlier than now if it was built before
    cached: bool
    lookup_s: float  #: that looking for results of its tasks took
    cores: int = 1  #: that it is built for
    threads: int = 1  #: that it was timed with
    #: records that could not be applied, by task label
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checks:
    """Contenders and inputs of the check of a built model; raises BadInput for a file that has no
    recorded inputs."""

    rivals: bool = True  #: onnxruntime and PyTorch, where they are installed
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


_CHECKS = Checks()


def check_recorded(path: Path) -> Path:
    """The path of a file of recorded inputs; raises BadInput for one of another form."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        if stream.read(len(_NPZ)) == _NPZ:
            return path
    raise BadInput(f"{path} is no file of NumPy arrays.", hint="write one with numpy.savez")


def build_model(
    name: str,
    output: Path,
    *,
    session_id: int | None = None,
    golden: int | None = None,
    winograd: bool = True,
    compare: bool = True,
    checks: Checks = _CHECKS,
) -> BuiltModel:
    """Build an imported model into the shared library `output`, check and time it; `output` is only
    there if it is right.

    It is built for the cores of TUNA_EVAL_CPUS, where that is set, else for as many as it was
    imported for. Kernels are the winners of the session, of the golden version, or of all sessions
    on such a machine; else those of similar tasks; else predicted. With `compare` the fastest few
    of each task are timed inside the model. A build of the same model and records that was made
    before is taken as it is. Raises NotFound, and BadInput if the answer differs from ONNX's
    reference by more than `TOLERANCE`.
    """
    if not output.parent.is_dir():
        raise BadInput(f"There is no folder {output.parent}.")
    if session_id is not None and golden is not None:
        raise BadInput("Kernels come from a session or from a golden version, not from both.")
    with reading(open_database()) as connection:
        model = store.find(connection, name)
        manifest = _for_cores(model.manifest)
        release = None if golden is None else find(connection, golden, "tvm").id
        source = choice.ResultScope(session_id, release, winograd)
        started = time.perf_counter()
        known = choice.finalists(connection, manifest, source)
        alike = choice.nearest(connection, manifest, source, known)
        lookup_s = time.perf_counter() - started
    records: dict[str, Any] = {
        key: [[one.solver, one.params, False] for one in found] for key, found in known.items()
    }
    records |= {key: [[winner.solver, winner.params, True]] for key, winner in alike.items()}
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name[:99]}.") as folder:
        temporary = Path(folder) / "new.so"
        wanted = _Build(model, manifest, records, winograd, compare, checks)
        facts, cached = _made(wanted, temporary)
        temporary.replace(output)
    built = _described(
        output, model, facts, known, cached=cached, lookup_s=lookup_s, cores=manifest.cores
    )
    Path(f"{output}.json").write_text(json.dumps(_for_programs(built), indent=1) + "\n")
    return built


def check_model(
    name: str, *, winograd: bool = True, compare: bool = True, checks: Checks = _CHECKS
) -> float:
    """Build an imported model with predicted kernels and check it as `build_model` does; its error.
    Nothing is written.

    What cannot be built is so refused before anything is tuned. Raises what `build_model` raises.
    """
    with reading(open_database()) as connection:
        model = store.find(connection, name)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "new.so"
        checks = replace(checks, untuned=False)
        wanted = _Build(model, _for_cores(model.manifest), {}, winograd, compare, checks)
        facts, _ = _made(wanted, library)
    errors: Mapping[str, float] = facts["checked"]["errors"]
    return next(iter(errors.values()))


@dataclass(frozen=True)
class _Build:
    """A build of a model."""

    model: StoredModel
    manifest: Manifest  #: for the cores that it is for
    records: Mapping[str, Any]
    winograd: bool
    compare: bool
    checks: Checks

    @property
    def request(self) -> dict[str, Any]:
        """All that the build depends on, but for Tuna's own code."""
        return {
            "model": self.manifest.digest,
            "records": self.records,
            "winograd": self.winograd,
            "compare": self.compare,
            "checks": self.checks.key,
        }


def _made(wanted: _Build, library: Path) -> tuple[dict[str, Any], bool]:
    """As `_make`, and whether it was taken from the cache, which has every build."""
    cache, key = BuildCache(get_settings().home / "cache" / "models"), key_of(wanted.request)
    facts = cache.find(key, library)
    if facts is not None:
        return facts, True
    facts = _make(wanted, library)
    # a full disk: the next build takes as long as this one
    with contextlib.suppress(TunaError, OSError):
        cache.keep(key, library, facts)
    return facts, False


def _make(wanted: _Build, library: Path) -> dict[str, Any]:
    """The child's answers after it is built for the manifest's target, checked and timed; `library`
    is in a temporary folder."""
    model, manifest, checks = wanted.model, wanted.manifest, wanted.checks
    plain = library.with_suffix(".untuned.so")
    # Several threads are timed by the wall clock: each gets a core.
    cpus = some_cpus(min(manifest.cores, len(available_cpus()))) if manifest.cores > 1 else None
    source = (
        library.parent
        / "model"
        / f"{model.version[:12]}{'.pt2' if ' ' in manifest.opset else '.onnx'}"
    )
    common: dict[str, Any] = {"path": str(source), "shapes": manifest.shapes}
    target = {"target": manifest.target}
    recorded = None if checks.recorded is None else checks.recorded.resolve()
    _lay_out(model, source)
    readable = (recorded,) if recorded else ()
    given = {
        "inputs": [value.model_dump(mode="json") for value in manifest.inputs],
        "seed": checks.seed,
        "recorded": str(recorded or ""),
    }
    with ModelProcess(
        manifest.target, model.name, writable=(library.parent,), readable=readable, cpus=cpus
    ) as process:
        made = process.call(
            "make",
            **common,
            **target,
            records=wanted.records,
            winograd=wanted.winograd,
            compare_on=given if wanted.compare else None,
            output=str(library),
        )
        if checks.untuned:
            process.call("make_untuned", **common, **target, output=str(plain))
    # Another one: it has only what a user's program has.
    with ModelProcess(
        manifest.target, model.name, readable=(library.parent, *readable), cpus=cpus
    ) as process:
        checked = process.call(
            "check",
            **common,
            library=str(library),
            given=given,
            rivals=checks.rivals,
            threads=process.threads,
            untuned=str(plain) if checks.untuned else "",
        )
    checked["remark"] = judge(manifest.opset, checked, recorded is not None)
    if recorded and "reference" in checked["errors"]:
        errors = checked["errors"]
        checked["errors"] = {"reference on recorded inputs": errors.pop("reference"), **errors}
    return {
        "made": made,
        "checked": checked,
        "threads": process.threads,
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def judge(opset: str, checked: Mapping[str, Any], recorded: bool) -> str:
    """Return a remark on the check of a model, empty where its answer is the reference's;
    raises BadInput for a wrong one.

    Where the reference cannot compute the model, the others' answers count. Where all of them agree
    with the model and differ from the reference, it is that which is wrong. `opset` as in the
    manifest.
    """
    reference = "PyTorch's own answer" if " " in opset else "ONNX's reference evaluator"
    inputs, doubts = "on recorded inputs" if recorded else "on random inputs", checked["doubts"]
    others = {name: error for name, error in checked["errors"].items() if name != "reference"}
    names, verb = " and ".join(others), "agree" if len(others) > 1 else "agrees"
    agree = bool(others) and all(error <= TOLERANCE for error in others.values())
    beside = "".join(f"; from {other} by {found:.2g}" for other, found in others.items())
    if checked["unanswered"]:
        why = f"{reference} cannot compute the model ({checked['unanswered']})"
        if agree:
            return f"{why}: it was compared with {names}, which {verb}"
        if others:
            raise BadInput(
                f"The built model differs{beside.removeprefix(';')} of the largest value, {inputs};"
                f" {why}."
            )
        raise BadInput(
            f"{why}, and no other runtime is here that can.",
            hint="with onnxruntime installed its answer is compared: pip install onnxruntime",
        )
    error = checked["errors"]["reference"]
    if error <= TOLERANCE:
        return ""
    text = f"differs from {reference} by {error:.2g} of the largest value, {inputs}"
    if agree and all(doubts[name] > TOLERANCE for name in others):
        return (
            f"{reference} is wrong here: the built model {text}, and so does {names}, which"
            f" {verb} with the model"
        )
    hint = (
        "build it without Winograd: --no-winograd; if that fails too, it is a fault of Tuna or TVM"
    )
    raise BadInput(f"The built model {text}{beside}.", hint=hint)


def _described(
    output: Path,
    model: StoredModel,
    facts: Mapping[str, Any],
    known: Mapping[str, Sequence[Winner]],
    *,
    cached: bool,
    lookup_s: float,
    cores: int,
) -> BuiltModel:
    made, checked = facts["made"], facts["checked"]
    labels = {entry.task.key: entry.task.label for entry in model.manifest.tasks}
    spent: dict[Class, float] = defaultdict(float)
    by_label: dict[str, float] = defaultdict(float)
    tuned: dict[str, float] = defaultdict(float)
    numbers: dict[Class, int] = defaultdict(int)
    runtime = 0.0
    for function, ms in checked["shares"].items():
        key = made["functions"].get(function)
        if key is None:
            runtime += ms
            continue
        kind = Class(made["classes"].get(key, Class.DEFAULT))
        spent[kind] += ms
        by_label[labels.get(key, function)] += ms
        if kind is Class.EXACT and key in known:
            chosen = made["compared"].get(key, {"chosen": 0})["chosen"]
            alone_ms = (
                known[key][chosen or 0].time_ms
                if chosen is not None
                else min(made["compared"][key]["times_ms"])
            )
            tuned[labels[key]] += made["calls"][function] * alone_ms
    total = sum(spent.values()) + runtime
    for key in set(made["functions"].values()):
        numbers[Class(made["classes"].get(key, Class.DEFAULT))] += 1
    return BuiltModel(
        path=output,
        model=model,
        **{name: checked[name] for name in ("errors", "times_ms", "wall_ms", "absent", "remark")},
        tasks={kind: numbers[kind] for kind in Class if kind in numbers},
        shares={kind: ms / total for kind, ms in spent.items()},
        runtime_share=runtime / total,
        functions_ms=dict(sorted(by_label.items(), key=lambda entry: -entry[1])),
        tuned_ms=dict(tuned),
        compared=len(made["compared"]),
        made_at=facts["made_at"],
        cached=cached,
        lookup_s=lookup_s,
        cores=cores,
        threads=facts["threads"],
        refused={labels.get(key, key): reason for key, reason in made["refused_records"].items()},
    )


def _for_programs(built: BuiltModel) -> dict[str, Any]:
    """Return the facts that stand beside the library, for programs that load it."""
    return {
        "model": built.model.name,
        "version": built.model.version,
        "inputs": [value.model_dump(mode="json") for value in built.model.manifest.inputs],
        "target": json.loads(built.model.manifest.for_cores(built.cores).target),
        "tvm": built.model.manifest.tvm,
        "errors": dict(built.errors),
        "tasks": {str(kind): count for kind, count in built.tasks.items()},
    }


def _for_cores(manifest: Manifest) -> Manifest:
    return manifest.for_cores(len(eval_cpus())) if get_settings().eval_cpus else manifest


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
