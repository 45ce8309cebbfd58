"""Everything about an NVIDIA GPU that needs one, in stages of nine minutes at most; on a machine
without one a stand-in of its driver (figure `stand_in`: 1), which says nothing about speed.

    scripts/bench gpu --stage smoke       # one product through real workers, from import to SQL
    scripts/bench gpu --stage shape       # E=512, N=128, fp8: all candidates of some batch sizes
    scripts/bench gpu --stage cold        # Mixtral, two ranks, bf16: all candidates of one token
    scripts/bench gpu --stage faults      # planted faults: each named, the next candidate fine

Figures of `shape` and `cold`: seconds, trials, failures, results, the idle share of the device, and
by the geometric mean how much slower the consumer's default is than the best. `--out FILE` adds the
figures as a line, and `--trials FILE` every trial. A machine without a network is prepared by

    pip download -d wheels --only-binary=:all: --python-version 3.12 '.[triton]' psutil  # elsewhere
    python3 -m venv --system-site-packages .venv
    .venv/bin/pip install --no-index --find-links wheels --no-build-isolation -e '.[triton]' psutil
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome, command_line
from benchmarks.triton_builds import layer as wide_layer
from tuna.configs import Config, DataType, GemmConfig
from tuna.configs.moe import MoeConfig
from tuna.libraries.context import DeviceHandle
from tuna.libraries.items import Candidate, WorkItem
from tuna.libraries.kernels import DeviceLost
from tuna.libraries.triton.artifact import (
    PROFILE_SCRATCH,
    Artifact,
    Buffer,
    Launch,
    Param,
    from_bytes,
)
from tuna.libraries.triton.driver import Cuda
from tuna.libraries.triton.library import TritonLibrary
from tuna.testing.rehearsal import run_context
from tuna.vocabulary import BASELINE

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("smoke", "shape", "cold", "faults")
LIMIT_S = 540
_STAND_IN = "GPU_BENCH_STAND_IN"  #: its folder
PRODUCT = GemmConfig(96, 80, 64, data_type=DataType.FP16)
#: Of the stand-in: the arguments of Tuna's own product where only strides within a row are 1.
SCRIPT = (
    "name=gemm params=8,8,8,4,4,4,4,4,4,8,8 run=product_fp16 time_us=8 block_us=0.5 spread=0.01"
)
ALL = 10_000


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__doc__, candidates=0)
    parser.add_argument("--stage", choices=STAGES, default="smoke")
    parser.add_argument("--tokens", default="1,64,1024", help="batch sizes of `shape`")
    parser.add_argument("--out", type=Path, help="file to which the figures are added")
    parser.add_argument("--trials", type=Path, help="file to which every trial is added")
    asked = parser.parse_args(argv)
    stand_in = _stand_in(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        if asked.stage == "faults":
            outcome = faults(Path(folder), stand_in)
        else:
            layers, candidates = _layers(asked.stage, asked.tokens, stand_in)
            outcome = tuned(
                asked.stage, layers, asked.candidates or candidates, Path(folder), asked.trials
            )
    outcome.figures["stand_in"] = float(stand_in)
    if asked.out:
        with asked.out.open("a") as file:
            file.write(json.dumps({"stage": asked.stage, **outcome.figures}) + "\n")
    return outcome.print()


def _stand_in(argv: Sequence[str]) -> bool:
    """Whether there is no device: then this program starts again beside a stand-in of its driver,
    which the loader finds by a variable that it reads at the start."""
    made = os.environ.get(_STAND_IN)
    try:
        Cuda()
    except DeviceLost:
        if made:
            raise
        folder = tempfile.mkdtemp()
        source = ROOT / "tests" / "cuda_double" / "libcuda.c"
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            words = ["cc", "-O2", "-shared", "-fPIC", "-o", f"{folder}/{name}", str(source), "-lm"]
            subprocess.run(words, check=True)
        Path(folder, "script").write_text(SCRIPT)
        variables = {**os.environ, _STAND_IN: folder, "LD_LIBRARY_PATH": folder}
        command = [sys.executable, "-m", "benchmarks.gpu", *argv]
        try:
            raise SystemExit(
                subprocess.run(command, env=variables, check=False).returncode
            ) from None
        finally:
            shutil.rmtree(folder)
    return bool(made)


def _layers(stage: str, tokens: str, stand_in: bool) -> tuple[Sequence[Config], int]:
    """The layers of a stage, and how many candidates of each; of a stand-in products alone."""
    if stage == "smoke" or stand_in:
        count = 1 if stage == "smoke" else 3
        return [dataclasses.replace(PRODUCT, m=96 * (1 + n)) for n in range(count)], 8
    if stage == "shape":
        return [wide_layer(int(one)) for one in tokens.split(",")], ALL
    return [MoeConfig(1, 8, 7168, 4096, 2)], ALL


def tuned(
    stage: str, layers: Sequence[Config], candidates: int, folder: Path, trials: Path | None
) -> Outcome:
    """Tune layers through real workers, from import to SQL."""
    home = folder / "home"
    (folder / "layers.jsonl").write_text("".join(f"{layer.text()}\n" for layer in layers))

    def tuna(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tuna", *words],
            cwd=folder,
            env={**os.environ, "TUNA_HOME": str(home), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"tuna {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    tuna("init-session", "triton", "-l", stage)
    tuna("import", "layers.jsonl", "-t", stage)
    tuna("update-solvers", "triton")
    tuna("applicability", "--session-id", "1")
    tuna("load-jobs", "--session-id", "1", "-t", stage, "--candidates", str(candidates))
    started = time.monotonic()
    tuna("run", "--session-id", "1")
    seconds = time.monotonic() - started
    report = json.loads(tuna("report", "--session-id", "1", "--json"))
    with sqlite3.connect(home / "tuna.sqlite") as connection:
        if trials:
            _write_trials(connection, trials)
        facts = _facts(connection)
    facts |= {"seconds": seconds, "idle_share": float(report.get("idle_share") or 0.0)}
    return Outcome(
        "gpu", facts, budget={"results": float(len(layers))}, limits={"seconds": LIMIT_S}
    )


def _facts(connection: sqlite3.Connection) -> dict[str, float]:
    counted = "SELECT count(*), count(cause), sum(cause = 'wrong_result') FROM trial"
    trials, failed, wrong = connection.execute(counted).fetchone()
    rows = connection.execute(
        "SELECT find_db.config_id, min(CASE WHEN solver.algorithm = ? THEN time_ms END),"
        " min(time_ms), max(noisy) FROM find_db JOIN solver ON solver.id = find_db.solver_id"
        " GROUP BY find_db.config_id",
        [BASELINE],
    ).fetchall()
    gains = [math.log(default / best) for _, default, best, _ in rows if default]
    compared = {"default_over_best": math.exp(sum(gains) / len(gains))} if gains else {}
    return {
        **compared,
        "trials": float(trials),
        "failed": float(failed),
        "wrong": float(wrong or 0),
        "results": float(len(rows)),
        "noisy": float(sum(bool(noisy) for *_, noisy in rows)),
    }


def _write_trials(connection: sqlite3.Connection, path: Path) -> None:
    rows = connection.execute(
        "SELECT config.json, solver.name, trial.params, trial.time_ms, trial.cause, trial.build_s"
        " FROM trial JOIN job ON job.id = trial.job_id JOIN config ON config.id = job.config_id"
        " JOIN solver ON solver.id = job.solver_id ORDER BY trial.id"
    )
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


#: PTX of kernels that do harm; the driver compiles it for its device.
_PTX = """.version 7.0
.target sm_80
.address_size 64
.visible .entry gemm({params})
{{
  .reg .u64 %a;
{body}
  ret;
}}
"""
_BODIES = {
    "illegal access": "  mov.u64 %a, 8;\n  st.global.u32 [%a], 1;",
    "trap": "  trap;",
    "hang": "again:\n  membar.gl;\n  bra again;",
    "unwritten": "",
}
_WORDS = {
    "illegal access": "error=700",
    "trap": "error=719",
    "hang": "hang=1",
    "unwritten": "",
    "good": "run=product_fp16 time_us=20",
}


def faults(folder: Path, stand_in: bool) -> Outcome:
    """Measure planted faults in one item, each followed by a candidate that is right."""
    library, context = TritonLibrary(), run_context(folder)
    name = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    device = DeviceHandle("gpu", name or "gpu", {"CUDA_VISIBLE_DEVICES": name} if name else {})
    context = dataclasses.replace(context, device=dataclasses.replace(device, cpus=context.cpus))
    good = planted("good", stand_in) if stand_in else _compiled(library, context)
    codes = [good]
    for number, fault in enumerate(_BODIES):
        codes += [planted(fault, stand_in), dataclasses.replace(good, triton=f"{number}")]
    item = _item(
        candidates=tuple(
            Candidate(index=index, artifact=context.artifacts.put(code.to_bytes()))
            for index, code in enumerate(codes)
        )
    )
    try:
        (result,) = library.run(library.step("eval"), [item], context)
    finally:
        library.close()
    causes = {
        name: str(trial.cause.value if trial.cause else "none")
        for name, trial in zip(_BODIES, result.trials[1::2], strict=True)
    }
    for name, trial in zip(_BODIES, result.trials[1::2], strict=True):
        print(f"{name}: {causes[name]}: {trial.output_tail.splitlines()[-1:]}", file=sys.stderr)
    wanted = {
        **dict.fromkeys(("illegal access", "trap"), "run_error"),
        **{"hang": "run_timeout", "unwritten": "wrong_result"},
    }
    figures = {
        "named": float(sum(causes[name] == cause for name, cause in wanted.items())),
        "fine": float(sum(trial.cause is None for trial in result.trials[::2])),
        "planted": float(len(wanted)),
    }
    return Outcome("gpu", figures, budget={"named": len(wanted), "fine": len(wanted) + 1})


def planted(fault: str, stand_in: bool) -> Artifact:
    """A candidate for PRODUCT that behaves so."""
    config = PRODUCT
    params = (
        *(Param(f"{letter}_ptr", "ptr", letter) for letter in "abc"),
        *(Param(size, "i32", value=getattr(config, size)) for size in "mnk"),
        *(Param(f"scratch{number}", "ptr", PROFILE_SCRATCH) for number in range(2)),
    )
    if stand_in:
        code = f"FAKE params=8,8,8,4,4,4,8,8 {_WORDS[fault]}"
    else:
        kinds = {"ptr": "u64", "i32": "u32"}
        listed = [f".param .{kinds[one.type]} p{place}" for place, one in enumerate(params)]
        code = _PTX.format(params=", ".join(listed), body=_BODIES[fault])
    shapes = {
        "a": ((config.m, config.k), "input"),
        "b": ((config.k, config.n), "input"),
        "c": ((config.m, config.n), "output"),
    }
    buffers = tuple(Buffer(one, "fp16", shape, role) for one, (shape, role) in shapes.items())
    launch = Launch(0, "gemm", (4, 1, 1), 4, 32, 0, 0, 1, 0, 1, params)
    return Artifact(_arch(), "0", "0" * 64, buffers, (launch,), (code.encode(),))


def _arch() -> str:
    return TritonLibrary().environment().arch


def _compiled(library: TritonLibrary, context: Any) -> Artifact:
    """Tuna's own product by its default, compiled by Triton."""
    item = _item(step="compile", target=_arch(), options={"candidates": 1})
    (result,) = library.run(library.step("compile"), [item], context)
    return from_bytes(context.artifacts.get(result.trials[0].artifact or ""))


def _item(**facts: Any) -> WorkItem:
    common: Mapping[str, Any] = {
        **{"job_id": 1, "attempt": 1, "session_id": 1, "library": "triton", "step": "eval"},
        **{"solver": "TritonGemm", "options": {"measure_timeout_s": 10}},
        "config": PRODUCT.to_json(),
    }
    return WorkItem(**{**common, **facts})


if __name__ == "__main__":
    sys.exit(main())
