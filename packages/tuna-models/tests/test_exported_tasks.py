"""TVM alone applies an exported database to the model that it imports; the export says what it
cannot apply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from builders import DatabaseBuilder, memory
from compiled import HERE, planned
from nets import Net

from tuna.configs import ConvConfig, TaskConfig
from tuna.db import configs
from tuna.exports import export
from tuna.libraries.kernels import KernelJob
from tuna.libraries.reference import make
from tuna.libraries.tvm import function_texts, functions, problems, tvm_db
from tuna.libraries.tvm.kernel_child import TvmBuilder
from tuna.libraries.tvm.kernels.shape import Mode
from tuna.libraries.tvm.kernels.signature import packing_for
from tuna_models.reading import onnx_reference

TARGET = json.dumps(HERE)
#: The passes of TVM's own documentation, then a lookup of each function in the database.
PLAIN = """
import json, sys
import numpy as np, onnx, tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx
from tvm.s_tir import meta_schedule as ms
model, directory, given, answer = sys.argv[1:]
with open(directory + "/database_tuning_record.json") as records:
    target = tvm.target.Target(json.loads(next(records))[1][2])
passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(),
          relax.transform.FoldConstant(), relax.transform.FuseOps(), relax.transform.FuseTIR()]
with target:
    imported = from_onnx(onnx.load(model), keep_params_in_input=False)
    module = tvm.transform.Sequential(passes)(imported)
with target, ms.database.JSONDatabase(work_dir=directory), tvm.transform.PassContext(opt_level=3):
    tuned = relax.transform.MetaScheduleApplyDatabase()(module)
machine = relax.VirtualMachine(tvm.compile(tuned, target=target), tvm.cpu())
np.save(answer, machine["main"](tvm.runtime.tensor(np.load(given))).numpy())
scheduled = {var.name_hint: bool(f.attrs and f.attrs.get("tirx.is_scheduled"))
             for var, f in tuned.functions.items()}
print(json.dumps([scheduled, "tuna" in sys.modules]))
"""


def attending() -> Any:
    """A softmax between two products."""
    net = Net((4, 16))
    found = net.add(
        "Softmax", net.add("MatMul", "x", net.constant(net.random.normal(0, 1, (16, 32)))), axis=-1
    )
    return net.model(net.add("MatMul", found, net.constant(net.random.normal(0, 1, (32, 8)))))


def tuned(built: DatabaseBuilder, model: Any, folder: Path) -> int:
    """A session with a result of each task of the model."""
    session = built.session(reason="models", target=TARGET, conditions={"caches": "cold"})
    plan = planned(model, target=HERE)
    for task, _ in plan.tasks():
        solver, body = "TvmGemmTile", folder / "body"
        if task.core is None:
            solver = "TvmFunction"
            body.write_text(plan.bodies[task.body])
            if not functions.can_be_tuned(function_texts.read(str(body))):
                continue
            configs.store(built.connection, [task], None, bodies={task.body: body.read_bytes()})
        job = KernelJob(task, solver, TARGET, {}, 0, 3, body=str(body) if task.body else "")
        params, workload = TvmBuilder().propose(job)[-1], built.kernel(TvmBuilder().workload(job))
        config = built.config(task)
        made = built.job(session, config, built.solver(solver))
        built.trial(made, 0, 1.0, params=params)
        built.winner(
            session, config, built.solver(solver), 1.0, made, params=params, workload=workload
        )
    return session


def test_plain_tvm_finds_a_models_functions_in_an_export_which_counts_the_others(
    tmp_path: Path,
) -> None:
    model, given = attending(), np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)
    built = DatabaseBuilder(memory().connect())
    report = export(built.connection, tuned(built, model, tmp_path), "tvm", tmp_path)
    assert [(note.split(",")[0], count) for note, count in report.notes.items()] == [
        ("functions of models", 1),
        ("kernels of Tuna's own: `tuna model build` puts them into a model", 2),
    ]
    assert sorted(layer.solver for layer in tvm_db.read(report.path)) == [
        "TvmFunction",
        "TvmGemmTile",
        "TvmGemmTile",
    ]
    onnx.save(model, tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", given)
    words = [tmp_path / "net.onnx", report.path, tmp_path / "x.npy", tmp_path / "y.npy"]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *map(str, words)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    scheduled, with_tuna = json.loads(done.stdout.splitlines()[-1])
    assert not with_tuna
    assert scheduled == {"main": False, "matmul": False, "softmax": True, "matmul1": False}
    (expected,) = onnx_reference.run(model, {"x": given})
    assert np.abs(np.load(tmp_path / "y.npy") - expected).max() < 1e-5


def test_an_export_says_how_the_kernel_of_a_task_takes_its_tensors() -> None:
    core = ConvConfig(1, 12, 5, 6, 20, 3, 3, 1, 1)
    task = TaskConfig(core=core, layouts="native", epilogue=("bias", "residual", "relu"))
    direct = problems.with_family(task, "direct", Mode.NATIVE, tvm.target.Target(HERE))
    assert direct is not None
    problem = make(task)
    packed = direct.inputs(*problem.inputs)
    extents = [array.shape for array in (*packed, direct.output(problem.expected))]
    steps = packing_for(task, "direct", [("float32", sizes) for sizes in extents])
    assert steps is not None
    assert len(steps) == len(extents) == 5
    assert steps[3] == steps[4] != steps[0]  # the residual lies as the answer does
    assert steps[2] == {
        "filled": [extents[2][0] * extents[2][1]],
        "split": list(extents[2]),
        "permuted": [0, 1],
    }
    for array, how in zip(packed, steps, strict=False):
        assert how is not None
        assert tuple(how["split"][axis] for axis in how["permuted"]) == array.shape
    assert packing_for(TaskConfig(name="softmax", body="0" * 64), "", []) is None
