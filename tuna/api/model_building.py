"""Models: build one with the kernels that won, check and time it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuna.api.models import artifacts_of_models
from tuna.errors import BadInput, NotFound, TunaError

if TYPE_CHECKING:
    from tuna.models.choice import Source, Winner
    from tuna.models.manifest import Class, Manifest
    from tuna.models.store import StoredModel

#: Largest error relative to the largest magnitude of the answer that a built model may have.
TOLERANCE = 1e-3
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
    times_ms: Mapping[str, Sequence[float]]  #: by contender, CPU time of the thread, rounds in turn
    wall_ms: Mapping[str, Sequence[float]]  #: wall time of the same rounds
    absent: Mapping[str, str]  #: contenders that did not take part, and why
    tasks: Mapping[Class, int]
    shares: Mapping[Class, float]  #: of the time that the model's functions take
    runtime_share: float  #: of the time, spent in TVM's virtual machine and allocation
    functions_ms: Mapping[str, float]  #: by label, all calls together
    tuned_ms: Mapping[str, float]  #: the same as measured alone, of tasks that have such a result
    compared: int  #: tasks of which several kernels were timed inside the model
    made_at: str  #: when it was built, checked and timed: earlier than now if it was built before
    cached: bool
    lookup_s: float  #: that looking for results of its tasks took
    refused: Mapping[str, str] = field(default_factory=dict)  #: records that could not be applied, by task label


@dataclass(frozen=True)
class Checks:
    """What a built model is compared with; raises BadInput for a file that has no recorded inputs."""

    rivals: bool = True  #: onnxruntime and PyTorch, where they are installed
    untuned: bool = False  #: what TVM makes of the model without tuning, which takes long
    recorded: Path | None = None  #: an npz file with inputs by name, besides random ones
    seed: int = 0  #: of the random inputs

    def __post_init__(self) -> None:
        if self.recorded is not None and not _is_npz(self.recorded):
            raise BadInput(f"{self.recorded} is no file of NumPy arrays.", hint="write one with numpy.savez")

    @property
    def key(self) -> list[Any]:
        """What the answers of the checks depend on."""
        recorded = "" if self.recorded is None else hashlib.sha256(self.recorded.read_bytes()).hexdigest()
        return [self.rivals, self.untuned, recorded, self.seed]


_CHECKS = Checks()


def _is_npz(path: Path) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read(len(_NPZ)) == _NPZ
    except OSError:
        return False


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
    """Build an imported model into the shared library `output`, check and time it; `output` is only there if it is right.

    Kernels are the winners of the session, of the golden version, or of all sessions on such a machine; else those of similar
    tasks; else predicted. With `compare` the fastest few of each task are timed inside the model. A build of the same model and
    records that was made before is taken as it is. Raises NotFound, and BadInput if the answer differs from ONNX's reference by
    more than `TOLERANCE`.
    """
    from tuna.db.database import open_database
    from tuna.db.engine import reading
    from tuna.models import choice, store
    from tuna.models.build_cache import BuildCache, key_of
    from tuna.settings import get_settings

    if not output.parent.is_dir():
        raise BadInput(f"There is no folder {output.parent}.")
    if session_id is not None and golden is not None:
        raise BadInput("Kernels come from a session or from a golden version, not from both.")
    with reading(open_database()) as connection:
        model = store.find(connection, name)
        source = choice.Source(session_id, _golden_id(connection, golden), winograd)
        started = time.perf_counter()
        known = choice.finalists(connection, model.manifest, source)
        alike = choice.nearest(connection, model.manifest, source, known)
        lookup_s = time.perf_counter() - started
    records: dict[str, Any] = {key: [[one.solver, one.params, False] for one in found] for key, found in known.items()}
    records |= {key: [[winner.solver, winner.params, True]] for key, winner in alike.items()}
    request = _request(model.manifest, records, source, compare, checks)
    cache, key = BuildCache(get_settings().home / "cache" / "models"), key_of(request)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name[:99]}.") as folder:
        temporary = Path(folder) / "new.so"
        facts = cache.find(key, temporary)
        cached = facts is not None
        if facts is None:
            facts = _make(model, records, winograd, compare, checks, temporary)
            with contextlib.suppress(TunaError, OSError):  # a full disk: the next build takes as long as this one
                cache.keep(key, temporary, facts)
        temporary.replace(output)
    built = _described(output, model, facts, known, cached=cached, lookup_s=lookup_s)
    Path(f"{output}.json").write_text(json.dumps(_for_programs(built), indent=1) + "\n")
    return built


def _request(
    manifest: Manifest, records: Mapping[str, Any], source: Source, compare: bool, checks: Checks
) -> dict[str, Any]:
    """All that a build depends on, but for Tuna's own code."""
    return {
        "model": manifest.digest,
        "records": records,
        "winograd": source.winograd,
        "compare": compare,
        "checks": checks.key,
    }


def _make(
    model: StoredModel, records: Mapping[str, Any], winograd: bool, compare: bool, checks: Checks, library: Path
) -> dict[str, Any]:
    """Build, check and time it, in the folder of `library`, which the caller removes: the child's answers."""
    from tuna.models.process import ModelProcess

    manifest, plain = model.manifest, library.with_suffix(".untuned.so")
    source = library.with_suffix(".model")
    common: dict[str, Any] = {"path": str(source), "shapes": manifest.shapes}
    target = {"target": manifest.target}
    recorded = None if checks.recorded is None else checks.recorded.resolve()
    source.write_bytes(_data(model))
    with ModelProcess(manifest.target, writable=(library.parent,)) as process:
        made = process.call(
            "make", **common, **target, records=records, winograd=winograd, compare=compare, output=str(library)
        )
        if checks.untuned:
            process.call("make_untuned", **common, **target, output=str(plain))
    # Another one: it has only what a user's program has.
    given = (library.parent, *([recorded] if recorded else []))
    with ModelProcess(manifest.target, readable=given) as process:
        checked = process.call(
            "check",
            **common,
            library=str(library),
            seed=checks.seed,
            rivals=checks.rivals,
            recorded=str(recorded or ""),
            untuned=str(plain) if checks.untuned else "",
        )
    refused = refusal(manifest.opset, checked["errors"])
    if refused is not None:
        raise refused
    return {"made": made, "checked": checked, "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def refusal(opset: str, errors: Mapping[str, float]) -> BadInput | None:
    """Why a model with these errors, by what they are against, is not right; None if it is. `opset` as in the manifest."""
    wrong = {name: error for name, error in errors.items() if name.startswith("reference") and not error <= TOLERANCE}
    if not wrong:
        return None
    reference = "PyTorch's own answer" if " " in opset else "ONNX's reference evaluator"
    name, error = max(wrong.items(), key=lambda entry: entry[1])
    inputs = name.removeprefix("reference").strip() or "on random inputs"
    others = {other: found for other, found in errors.items() if not other.startswith("reference")}
    beside = "".join(f"; from {other} by {found:.2g}" for other, found in others.items())
    text = f"The built model differs from {reference} by {error:.2g} of the largest value, {inputs}{beside}."
    agreeing = [other for other, found in others.items() if found <= TOLERANCE]
    if agreeing:
        return BadInput(text, hint=f"{' and '.join(agreeing)} agrees with the built model: {reference} may be wrong")
    hint = "build it without Winograd: --no-winograd; if that fails too, it is a fault of Tuna or TVM"
    return BadInput(text, hint=hint)


def _described(
    output: Path,
    model: StoredModel,
    facts: Mapping[str, Any],
    known: Mapping[str, Sequence[Winner]],
    *,
    cached: bool,
    lookup_s: float,
) -> BuiltModel:
    from tuna.models.manifest import Class

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
            alone_ms = known[key][chosen or 0].time_ms if chosen is not None else min(made["compared"][key]["times_ms"])
            tuned[labels[key]] += made["calls"][function] * alone_ms
    total = sum(spent.values()) + runtime
    for key in set(made["functions"].values()):
        numbers[Class(made["classes"].get(key, Class.DEFAULT))] += 1
    return BuiltModel(
        path=output,
        model=model,
        errors=checked["errors"],
        times_ms=checked["times_ms"],
        wall_ms=checked["wall_ms"],
        absent=checked["absent"],
        tasks={kind: numbers[kind] for kind in Class if kind in numbers},
        shares={kind: ms / total for kind, ms in spent.items()},
        runtime_share=runtime / total,
        functions_ms=dict(sorted(by_label.items(), key=lambda entry: -entry[1])),
        tuned_ms=dict(tuned),
        compared=len(made["compared"]),
        made_at=facts["made_at"],
        cached=cached,
        lookup_s=lookup_s,
        refused={labels.get(key, key): reason for key, reason in made["refused_records"].items()},
    )


def _for_programs(built: BuiltModel) -> dict[str, Any]:
    """What stands beside the library, for programs that load it."""
    return {
        "model": built.model.name,
        "version": built.model.version,
        "inputs": [value.model_dump(mode="json") for value in built.model.manifest.inputs],
        "target": json.loads(built.model.manifest.target),
        "tvm": built.model.manifest.tvm,
        "errors": dict(built.errors),
        "tasks": {str(kind): count for kind, count in built.tasks.items()},
    }


def _golden_id(connection: Any, version: int | None) -> int | None:
    from tuna.golden.versions import find

    return None if version is None else find(connection, version, "tvm").id


def _data(model: StoredModel) -> bytes:
    try:
        return artifacts_of_models().get(model.manifest.file)
    except KeyError:
        raise NotFound(
            f"The file of the model {model.name} is not in the artifact store any more.", hint="import it again"
        ) from None
