"""Models: what would become of a file, or became of an import, without a build."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuna.api import get_settings
from tuna.api.rows import open_database, reading
from tuna.errors import BadInput, TunaError
from tuna.libraries import probe
from tuna.libraries.boards import board_settings
from tuna.libraries.tvm import toolchain
from tuna.sandbox.cores import eval_cpus, some_cpus, usable_count
from tuna_models.api.importing import ModelTask, lay_out, read_model
from tuna_models.child_answers import AskedFile, FileCheck, Obstacle
from tuna_models.manifest import Precision
from tuna_models.work import store
from tuna_models.work.files import BuildCache, key_of
from tuna_models.work.session import Workspace
from tuna_models.work.store import StoredModel


def check_file(
    path: Path,
    *,
    batch: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
    precision: Precision | str = Precision.FP32,
) -> FileCheck:
    """Say whether a file could be imported with these arguments of `import_model`, and all that is
    in the way; and which of its tasks would run without a kernel of Tuna's.

    It is for this machine, or the board of the settings. Nothing is built, and nothing is stored.
    Raises BadInput for a file that cannot be read or whose name ends as no model's does;
    LibraryMissing without TVM or onnx.
    """
    toolchain.tvm_version()
    data = read_model(path)
    with Workspace() as workspace:
        try:
            process = workspace.process(_target(), path.name)
            copy = workspace.folder / "model" / path.name
            lay_out(process, path, data, copy)
            asked = AskedFile(
                path=str(copy),
                target=_target(),
                shapes=shapes or {},
                values=values or {},
                batch=batch,
                precision=Precision(precision),
            )
            return process.call(FileCheck, "check_file", asked=asked.model_dump(mode="json"))
        except BadInput as error:
            why = Obstacle(reason=str(error).rstrip("."), hint=error.hint)
            return FileCheck(obstacles=(why,))


def check_import(name: str) -> FileCheck:
    """Say of the latest import under a name what `check_file` says of its file, for the target that
    it was planned for; it is kept, so that the next one is answered at once.

    Raises NotFound, also where the file is gone; BadInput for one that this version refuses;
    LibraryMissing without TVM or onnx.
    """
    with reading(open_database()) as connection:
        model = store.find(connection, name)
    manifest = model.manifest
    cache = BuildCache(get_settings().home / "cache" / "checks", ".txt")
    key = key_of({"check with rooflines": manifest.digest})
    with Workspace() as workspace:
        file = workspace.folder / "check.txt"
        kept = cache.find(key, file)
        if kept is not None:
            return FileCheck.model_validate(kept)
        toolchain.tvm_version()
        asked = AskedFile(
            path=str(workspace.file_of(model)),
            target=manifest.target,
            shapes=manifest.shapes,
            values=manifest.values,
            precision=manifest.precision,
        )
        check = workspace.process(manifest.target, model.name).call(
            FileCheck, "check_file", asked=asked.model_dump(mode="json")
        )
        for obstacle in check.obstacles:
            raise BadInput(
                f"The model {model.name} cannot be imported any more: {obstacle.reason}."
            )
        file.write_text(manifest.digest)
        with contextlib.suppress(TunaError, OSError):  # a full disk: the next one takes as long
            cache.keep(key, file, check.model_dump(mode="json"))
    return check


def peak_shares(
    model: StoredModel, tasks: Sequence[ModelTask], check: FileCheck | None
) -> dict[str, str]:
    """Return what share of this machine's peak the fastest kernel of each task reaches, by label,
    and whether of arithmetic or memory; nothing for tasks without a time, and for the target of
    another machine."""
    rooflines = {} if check is None else check.rooflines
    times_ms = {task.label: task.winner.time_ms for task in tasks if task.winner is not None}
    known = times_ms.keys() & rooflines.keys()
    peak = _peak_gflops(model.manifest.target) if known else None
    if peak is None:
        return {}
    return {label: rooflines[label].said(times_ms[label], peak) for label in known}


def _peak_gflops(target: str) -> float | None:
    """The fp32 peak of as many cores of this machine as a target has, measured now; None for the
    target of another machine, or a CPU whose peak is not known."""
    asked, here = json.loads(target), json.loads(toolchain.host_environment().target)
    if asked.get("mcpu") != here["mcpu"] or "mtriple" in asked:
        return None
    try:
        return probe.peak_gflops(some_cpus(int(asked.get("num-cores", 1))))
    except (BadInput, probe.NoFmaLoop):  # of more cores than there are, or without the loop
        return None


def _target() -> str:
    """JSON of the target of the settings; else the cores of this machine, whose CPU the child
    knows."""
    if board_settings().tvm_target:
        return toolchain.target_environment(board_settings().tvm_target).target
    cores = len(eval_cpus()) if get_settings().eval_cpus else usable_count()
    return json.dumps({"num-cores": cores})
