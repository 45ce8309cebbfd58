"""`tuna model` and `tuna tune`: from an ONNX file to a library that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import onnx.reference
import pytest
import sqlalchemy as sa
from command_lines import Ended
from nets import Net
from test_model_store import TASKS, manifest

from tuna import api
from tuna.api import running
from tuna.common.messages import size
from tuna.coordinator.session_run import Progress, RunEvents, progress
from tuna.db.database import open_database
from tuna.db.engine import reading, writing
from tuna.db.models import CONFIG_CHARS, ConfigTag, Job
from tuna.errors import BadInput, NotFound, StorageFull
from tuna.libraries.registry import get_library
from tuna.sandbox.cores import available_cpus
from tuna.sandbox.processes import Child, ChildCrashed, ChildFailed
from tuna_models import api as models_api
from tuna_models.api import tuning
from tuna_models.child_answers import ChildAnswer
from tuna_models.process import ModelProcess
from tuna_models.refusals import REPORT_HINT
from tuna_models.work import store
from tuna_models.work.session import SESSION

#: NumPy has no threads of its own there.
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
EXAMPLE = Path(__file__).parents[3] / "examples" / "run_model.py"


@pytest.fixture
def residual(tmp_path: Path) -> Path:
    """A model file, with its weights in another one beside it."""
    path = tmp_path / "net.onnx"
    onnx.save(
        nets.residual(), path, save_as_external_data=True, location="net.data", size_threshold=0
    )
    return path


@pytest.mark.usefixtures("forked", "quick_timing")
def test_a_model_is_imported_shown_and_built_into_a_library_that_plain_tvm_runs(
    type_in: Callable[..., Ended], residual: Path, tmp_path: Path
) -> None:
    imported = type_in("tuna", "model", "import", "net", residual)
    assert imported.code == 0, imported
    assert (
        "10 calls of 10 tasks, 7 of them convolutions, products and attention; 10 tasks are new"
        in imported.out
    )
    (listed,) = json.loads(type_in("tuna", "model", "list", "--json").out)
    assert listed["name"] == "net"
    tasks = json.loads(type_in("tuna", "model", "show", "net", "--json").out)["tasks"]
    assert [task["count"] for task in tasks if "+bias+residual+relu" in task["task"]] == [1, 1]
    again = type_in("tuna", "model", "import", "net", residual)
    assert "0 tasks are new" in again.out
    assert len(models_api.list_models()) == 1
    for file in (residual, residual.with_name("net.data")):
        file.unlink()  # it is kept with its weights
    library = tmp_path / "net.so"
    built = type_in("tuna", "model", "build", "net", "-o", library)
    assert built.code == 0, built
    assert "predicted" in built.out
    assert "tuna: " in built.out
    library.unlink()
    again = json.loads(type_in("tuna", "model", "build", "net", "-o", library, "--json").out)
    assert again["cached"]
    assert again["tasks"]["predicted"] == 7
    assert json.loads(Path(f"{library}.json").read_text())["inputs"] == [
        {"name": "x", "shape": [1, 3, 16, 16], "dtype": "float32"}
    ]
    x = np.random.default_rng(5).standard_normal((1, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    ran = subprocess.run(
        [sys.executable, EXAMPLE, library, "--input", tmp_path / "x.npy"],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = (
        onnx.reference.ReferenceEvaluator(nets.residual()).run(None, {"x": x})[0].reshape(-1)[:4]
    )
    printed = [float(word) for word in ran.stdout.split("[")[1].split("]")[0].split()]
    assert np.allclose(printed, expected, atol=1e-4)


def test_what_the_child_refuses_is_an_error_of_the_command(
    type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    net, path = Net((1, 8)), tmp_path / "net.onnx"
    onnx.save(net.model(net.add("Mystery", "x", domain="own"), check=False), path)
    ended = type_in("tuna", "tune", path)
    assert ended.code == BadInput.exit_code
    assert "net.onnx has operators that cannot be imported: own.Mystery (1: v0)." in ended.err
    assert models_api.list_models() == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            ChildFailed(
                "InternalError: Check failed: it is false: of no use.\n  File x, line 3",
                "the traceback",
            ),
            (
                "The model net cannot be processed (InternalError: Check failed: it is false: of no"
                " use)."
            ),
        ),
        (
            ChildCrashed("ended by SIGSEGV", "the traceback"),
            "The process that compiles net ended: ended by SIGSEGV.",
        ),
    ],
    ids=["failed", "crashed"],
)
def test_what_goes_wrong_in_the_child_is_told_in_a_sentence(
    fault: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(Child, "call", fail)
    with ModelProcess("{}", "net") as process, pytest.raises(BadInput) as refused:
        process.call(ChildAnswer, "check")
    assert str(refused.value) == told
    assert refused.value.hint == REPORT_HINT
    assert "the traceback" in str(refused.value.__cause__)


@pytest.mark.parametrize(
    "fault",
    [
        ChildFailed("OSError: [Errno 28] No space left on device.", "the traceback"),
        ChildCrashed("ended by SIGABRT", "LLVM ERROR: IO failure: No space left on device"),
    ],
    ids=["failed", "crashed"],
)
def test_a_child_without_space_is_no_fault_of_the_model(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(Child, "call", fail)
    with ModelProcess("{}", "net") as process, pytest.raises(StorageFull, match="to build net"):
        process.call(ChildAnswer, "check")


def test_a_model_that_is_not_there_and_a_file_of_another_form_are_refused(
    type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    assert (
        type_in("tuna", "model", "build", "net", "-o", tmp_path / "net.so").code
        == NotFound.exit_code
    )
    assert type_in("tuna", "model", "import", "net", tmp_path / "net.pt").code == BadInput.exit_code


def test_nothing_stays_of_a_model_whose_name_or_task_is_refused(
    home: Path, residual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match="without @"):
        models_api.import_model("a@b", residual)
    monkeypatch.setitem(CONFIG_CHARS, "driver", 50)
    with pytest.raises(BadInput, match="the driver of a task config has"):
        models_api.import_model("net", residual)
    assert not [path for path in (home / "artifacts").rglob("*") if len(path.name) == 64]


def test_the_command_line_imports_neither_tvm_nor_onnx() -> None:
    program = (
        "import sys, tuna_models.cli.model, tuna_models.api.importing, tuna_models.work.store\n"
        "import tuna_models.process, tuna_models.manifest\n"
        "print(sorted({'tvm', 'onnx', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_several_batches_are_imports_of_their_own(
    type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    net, path = Net(("n", 4, 6, 6)), tmp_path / "net.onnx"  # type: ignore[arg-type]
    onnx.save(net.model(net.conv("x", 4, 8, 1)), path)
    ended = type_in("tuna", "model", "import", "net", path, "--batch", "1,2")
    assert ended.code == 0, ended
    assert {
        model.name: model.manifest.inputs[0].shape[0] for model in models_api.list_models()
    } == {
        "net-b1": 1,
        "net-b2": 2,
    }
    refused = type_in("tuna", "model", "import", "net", path, "--batch", "1,x")
    assert (refused.code, "is not of the form 1,8" in refused.err) == (BadInput.exit_code, True)


@pytest.mark.parametrize("text", ["x", "x=", "=1,2", "x=1,0", "x=a"])
def test_a_shape_is_an_input_with_whole_numbers(
    type_in: Callable[..., Ended], text: str, tmp_path: Path
) -> None:
    ended = type_in("tuna", "model", "import", "net", tmp_path / "net.onnx", "--shape", text)
    assert ended.code == BadInput.exit_code
    assert "is not of the form input=1,3,224,224" in ended.err


@pytest.mark.usefixtures("home")
def test_the_numbers_of_a_model_are_those_of_its_own_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = get_library("tvm").environment().target
    with writing(open_database()) as connection:
        first, second = (
            store.StoredModel(name, manifest(*TASKS[at : at + 2], target=here))
            for name, at in (("a", 0), ("b", 1))
        )
        for one in (first, second):
            store.save(connection, one.name, one.manifest, {})
    session = api.init_session("tvm", SESSION, conditions={"caches": "cold"})
    api.update_solvers("tvm")
    for one in (first, second):
        api.update_applicability(session.id, one.tag)
    api.load_jobs(
        session.id, tag=None, reason="both", solvers=["TvmConvTile"], options={"candidates": 1}
    )
    seen: list[Progress] = []

    def run(session_id: int, *, on_progress: Callable[[Progress], None], **_: object) -> None:
        with reading(open_database()) as connection:
            whole = progress(connection, get_library("tvm"), session_id, ())
        assert whole.total == len(TASKS)
        on_progress(whole)
        with writing(open_database()) as connection:
            ids = sa.select(ConfigTag.config_id).where(ConfigTag.tag == second.tag)
            connection.execute(sa.update(Job).where(Job.config_id.in_(ids)).values(state="errored"))
        on_progress(whole)
        raise AssertionError("the jobs of the other model would be waited for")

    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr(tuning._Tuning, "_load", lambda *_: None)
    with models_api.open_work(model="b", events=RunEvents(seen.append)) as work:
        tuned = models_api.tune_model("b", work=work)
    assert [(one.wanted, one.unfinished) for one in seen] == [(2, 2), (2, 0)]
    assert tuned.errored == 2


def test_what_cannot_be_built_is_refused_before_anything_is_tuned(
    type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    path, given = tmp_path / "net.onnx", tmp_path / "given.npz"
    onnx.save(nets.tokens(), path)
    np.savez(given, ids=np.zeros((2, 6), np.int32))
    ended = type_in("tuna", "tune", path, "-o", tmp_path / "net.so", "--input", given)
    assert ended.code == BadInput.exit_code
    assert "given.npz has no array mask of shape (2, 6) and type int64." in ended.err
    assert api.list_sessions() == []


@pytest.mark.parametrize(
    ("number", "text"),
    [(512, "512 B"), (28_300, "28 KB"), (45_100_000, "45.1 MB"), (2e9, "2.0 GB")],
)
def test_the_size_of_a_model_has_a_unit_that_fits(number: int, text: str) -> None:
    assert size(int(number)) == text


def threads_and_cores_of_example(
    library: Path, cpus: tuple[int, ...]
) -> tuple[int, list[list[int]]]:
    """TVM_NUM_THREADS of the example that runs a model, pinned to `cpus`, and the cores of each of
    its threads afterwards."""
    program = (
        f"import os, sys, json, runpy\nos.sched_setaffinity(0, {cpus})\n"
        f"sys.argv = ['run_model.py', {str(library)!r}]\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
        "cores = [sorted(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')]\n"
        "print(json.dumps([int(os.environ['TVM_NUM_THREADS']), cores]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=ONE_THREAD
    )
    threads, cores = json.loads(ran.stdout.splitlines()[-1])
    return threads, cores


@pytest.mark.drill(only=True)
@pytest.mark.usefixtures("forked", "quick_timing")
@pytest.mark.skipif(len(available_cpus()) < 2, reason="it needs two cores")
def test_a_model_for_two_cores_says_so_and_runs_with_two_threads(
    type_in: Callable[..., Ended], tmp_path: Path
) -> None:
    net, path, library = Net((1, 32, 28, 28)), tmp_path / "net.onnx", tmp_path / "net.so"
    onnx.save(net.model(net.relu(net.conv(net.relu(net.conv("x", 32, 64, 3)), 64, 64, 3))), path)
    assert type_in("tuna", "model", "import", "net", path, "--cores", 2).code == 0
    built = type_in("tuna", "model", "build", "net", "-o", library, "--no-rivals", "--json")
    facts = json.loads(built.out)
    assert facts["cores"] == 2
    shown = type_in("tuna", "model", "build", "net", "-o", library, "--no-rivals")
    assert f"{library}: built for 2 cores" in shown.out
    assert json.loads(Path(f"{library}.json").read_text())["target"]["num-cores"] == 2
    assert threads_and_cores_of_example(library, available_cpus()[-2:]) == (
        2,
        [[*available_cpus()[-2:]]] * 2,
    ), "the main thread and one of TVM's pool, where they were"
    pinned = available_cpus()[-1]
    assert threads_and_cores_of_example(library, (pinned,)) == (1, [[pinned]])
    shown = type_in(
        "tuna", "model", "build", "net", "-o", library, "--no-rivals", "--no-compare", "--cores", 1
    )
    assert f"{library}: built for 1 core;" in shown.out
    assert json.loads(Path(f"{library}.json").read_text())["target"]["num-cores"] == 1
    assert (
        type_in("tuna", "model", "build", "net", "-o", library, "--cores", 4000).code
        == BadInput.exit_code
    )
