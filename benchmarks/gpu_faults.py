"""Planted faults for `benchmarks.gpu`: candidates that do harm, each followed by one that is
right."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Outcome
from tuna.configs import DataType, GemmConfig
from tuna.libraries.base import Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.items import Candidate, StepResult, WorkItem
from tuna.libraries.steps import find_step
from tuna.testing.rehearsal import run_context
from tuna_triton.artifact import (
    PROFILE_SCRATCH,
    Artifact,
    Buffer,
    Launch,
    Param,
    from_bytes,
)
from tuna_triton.library import TritonLibrary

#: Seconds after which a process that measures is killed while its candidate hangs.
_KILLED_AFTER_S = 4.0
PRODUCT = GemmConfig(96, 80, 64, data_type=DataType.FP16)
_PTX = """.version 7.0
.target sm_80
.address_size 64
.visible .entry gemm({params})
{{
  .reg .u64 %a, %c;
  .reg .u32 %i, %n, %t, %s;
  .reg .b16 %h;
  .reg .pred %p;
{body}
  ret;
}}
"""
_ONES = """  ld.param.u64 %c, [p2];
  ld.param.u32 %t, [p3];
  ld.param.u32 %n, [p4];
  mul.lo.u32 %n, %n, %t;
  mov.u32 %i, %tid.x;
  mov.u32 %t, %ctaid.x;
  mov.u32 %s, %ntid.x;
  mad.lo.u32 %i, %t, %s, %i;
  mov.u32 %t, %nctaid.x;
  mul.lo.u32 %s, %s, %t;
  mov.b16 %h, 0x3c00;
again:
  setp.ge.u32 %p, %i, %n;
  @%p bra done;
  mul.wide.u32 %a, %i, 2;
  add.u64 %a, %c, %a;
  st.global.b16 [%a], %h;
  add.u32 %i, %i, %s;
  bra again;
done:"""


@dataclasses.dataclass(frozen=True)
class _Fault:
    cause: str  #: that its trial must have
    ptx: str  #: body of the kernel
    words: str  #: the same for the stand-in
    warps: int = 4


#: The last ones may wedge a device.
FAULTS: Mapping[str, _Fault] = {
    "unwritten answer": _Fault("wrong_result", "", ""),
    "wrong answer": _Fault("wrong_result", _ONES, "run=product_fp16 wrong_after=0"),
    "launch failure": _Fault("run_error", "", "launch=1", warps=64),
    "illegal access": _Fault(
        "run_error", "  mov.u64 %a, 8;\n  st.global.u32 [%a], 1;", "error=700"
    ),
    "trap": _Fault("run_error", "  trap;", "error=719"),
    "hang": _Fault("run_timeout", "again:\n  membar.gl;\n  bra again;", "hang=1"),
}


def faults(folder: Path, stand_in: bool) -> Outcome:
    """Measure the faults in one item, then a good candidate in another; of the stand-in a lost
    device too."""
    library, context = TritonLibrary(), run_context(folder)
    name = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    device = DeviceHandle("gpu", name or "gpu", {"CUDA_VISIBLE_DEVICES": name} if name else {})
    context = dataclasses.replace(context, device=dataclasses.replace(device, cpus=context.cpus))
    arch, step = library.environment().arch, find_step(library, "eval")
    good = _compiled(library, context, arch)
    codes = [good]
    for number, fault in enumerate(FAULTS.values()):
        codes += [planted(fault, arch, stand_in), dataclasses.replace(good, triton=f"{number}")]
    items = [
        _item(
            job_id=number,
            candidates=tuple(
                Candidate(index=index, artifact=context.artifacts.put(code.to_bytes()))
                for index, code in enumerate(some)
            ),
        )
        for number, some in enumerate((codes, [good]), 1)
    ]
    hang = context.artifacts.put(planted(FAULTS["hang"], arch, stand_in).to_bytes())
    sound = context.artifacts.put(good.to_bytes())
    killed = _item(
        candidates=(Candidate(index=0, artifact=hang), Candidate(index=1, artifact=sound))
    )
    lost = planted(_Fault("", "", "error=214"), arch, stand_in)
    gone = _item(candidates=(Candidate(index=0, artifact=context.artifacts.put(lost.to_bytes())),))
    started = time.monotonic()
    try:
        first, after = library.run(step, items, context)
        (orphaned,) = _without_its_process(library, step, killed, context)
        results = list(library.run(step, [gone], context)) if stand_in else []
    finally:
        library.close()
    named = 0
    for (what, wanted), trial in zip(FAULTS.items(), first.trials[1::2], strict=True):
        cause = trial.cause.value if trial.cause else "none"
        named += cause == wanted.cause
        print(f"{what}: {cause}: {trial.output_tail.splitlines()[-1:]}", file=sys.stderr)
    for result in results:
        print(f"lost device: {result.cause}: {result.output_tail}", file=sys.stderr)
    gone_process, next_one = orphaned.trials
    print(f"lost process: {gone_process.cause}: {gone_process.output_tail}", file=sys.stderr)
    good_ones = (*first.trials[::2], *after.trials, next_one)
    fine = sum(trial.cause is None for trial in good_ones)
    budget = {"named": len(FAULTS), "fine": len(good_ones), "lost_process_named": 1}
    figures = {"lost_process_named": float("SIGKILL" in gone_process.output_tail)}
    figures |= {"named": float(named), "fine": float(fine), "planted": float(len(FAULTS))}
    figures["seconds"] = time.monotonic() - started
    if results:
        figures["lost_named"] = float(
            sum(str(one.cause.value) == "device_lost" for one in results if one.cause)
        )
        budget["lost_named"] = 1
    return Outcome("gpu", figures, budget={name: float(least) for name, least in budget.items()})


def _without_its_process(
    library: TritonLibrary, step: Step, item: WorkItem, context: RunContext
) -> Sequence[StepResult]:
    """Measure an item whose process is killed a while after the start."""

    def kill() -> None:
        kept = getattr(library.processes, "kept", None)
        if kept is not None and kept.pid is not None:
            os.kill(kept.pid, signal.SIGKILL)

    timer = threading.Timer(_KILLED_AFTER_S, kill)
    timer.start()
    try:
        return list(library.run(step, [item], context))
    finally:
        timer.cancel()


def planted(fault: _Fault, arch: str, stand_in: bool) -> Artifact:
    """A candidate for PRODUCT that behaves so."""
    config = PRODUCT
    params = (
        *(Param(f"{letter}_ptr", "ptr", letter) for letter in "abc"),
        *(Param(size, "i32", value=getattr(config, size)) for size in "mnk"),
        *(Param(f"scratch{number}", "ptr", PROFILE_SCRATCH) for number in range(2)),
    )
    if stand_in:
        code = f"FAKE params=8,8,8,4,4,4,8,8 {fault.words}".encode()
    else:
        kinds = {"ptr": "u64", "i32": "u32"}
        listed = [f".param .{kinds[one.type]} p{place}" for place, one in enumerate(params)]
        code = assembled(_PTX.format(params=", ".join(listed), body=fault.ptx), arch)
    shapes = {
        "a": ((config.m, config.k), "input"),
        "b": ((config.k, config.n), "input"),
        "c": ((config.m, config.n), "output"),
    }
    buffers = tuple(Buffer(one, "fp16", shape, role) for one, (shape, role) in shapes.items())
    launch = Launch(0, "gemm", (4, 1, 1), fault.warps, 32, 0, 0, 1, 0, 1, params)
    return Artifact(arch, "0", "0" * 64, buffers, (launch,), (code,))


def assembled(ptx: str, arch: str) -> bytes:
    """The cubin of a PTX text, by the assembler that Triton brings."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(ptx)
        subprocess.run([ptxas, f"-arch={arch}", source, "-o", made], check=True)
        return made.read_bytes()


def _compiled(library: TritonLibrary, context: Any, arch: str) -> Artifact:
    """Tuna's own product by its default, compiled by Triton."""
    item = _item(step="compile", target=arch, options={"candidates": 1})
    (result,) = library.run(find_step(library, "compile"), [item], context)
    return from_bytes(context.artifacts.get(result.trials[0].artifact or ""))


def _item(**facts: Any) -> WorkItem:
    common: Mapping[str, Any] = {
        **{"job_id": 1, "attempt": 1, "session_id": 1, "library": "triton", "step": "eval"},
        **{"solver": "TritonGemm", "options": {"measure_timeout_s": 10}},
        "config": PRODUCT.to_json(),
    }
    return WorkItem(**{**common, **facts})
