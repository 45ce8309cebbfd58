"""Every Python example in the documents and the notebook runs as it stands, with the library that
only pretends to measure.

Workers and TVM's builds take seconds: a stand-in stores what they would. `test_api.py` runs a
session for real, `packages/tuna-models/tests` a model; with TUNA_TEST_DRILLS these pages do, too.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import sqlalchemy as sa
from shared_data import DRILLS, need

from tuna import api
from tuna.configs import ConvConfig, TaskConfig
from tuna.coordinator.session_run import Progress
from tuna.db import models
from tuna.db.database import open_database
from tuna.db.engine import writing
from tuna_models import api as models_api
from tuna_models.manifest import Manifest, ManifestTask
from tuna_models.work import store

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "tuna.ipynb"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Pages whose code is whole files, with the tests that take them.
ELSEWHERE = {"plugins.md": "plugin/test_plugins_page.py"}
LAYERS = (
    "MIOpenDriver conv -n 1 -c 8 -H 8 -W 8 -k 8 -y 3 -x 3 -p 1 -q 1 -F 1\nMIOpenDriver gemm -m 8 -n"
    " 8 -k 8\n"
)


def blocks(path: Path) -> list[str]:
    """The Python code of a page or notebook, in its order."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


WITH_CODE = [path for path in [*PAGES, NOTEBOOK] if blocks(path) and path.name not in ELSEWHERE]


def measured(session_id: int, *_: Any, **__: Any) -> Progress:
    """What workers would store: each job evaluated, with a trial and a result."""
    with writing(open_database()) as connection:
        jobs = connection.execute(
            sa.select(models.Job).where(models.Job.session_id == session_id)
        ).all()
        connection.execute(sa.update(models.Job).values(state="evaluated"))
        for job in jobs:
            facts = {"time_ms": 1.0 + job.solver_id, "params": "{}", "clock": "wall"}
            trial = {"job_id": job.id, "number": 0, "output_tail": "", "times_ms": "[1.0]", **facts}
            connection.execute(sa.insert(models.TrialRow).values(**trial))
            key = {name: getattr(job, name) for name in ("session_id", "config_id", "solver_id")}
            rest = {"job_id": job.id, "trial_number": 0, "workspace_bytes": 0, "simulated": True}
            connection.execute(sa.insert(models.FindDb).values(**key, **rest, **facts))
    return Progress({"evaluated": len(jobs)}, len(jobs), 0, 0)


def imported(name: str, path: Path, **_: Any) -> models_api.ImportedModel:
    """A model of one task, whatever the file holds."""
    task = TaskConfig(core=ConvConfig(1, 8, 6, 6, 8, 1, 1), layouts="native")
    manifest = Manifest(
        file="0" * 64,
        size_bytes=1,
        opset="17",
        shapes={},
        target="{}",
        tvm="0",
        inputs=(),
        tasks=(ManifestTask(config=task.to_json(), count=1),),
        text="1" * 64,
    )
    with writing(open_database()) as connection:
        return models_api.ImportedModel(
            store.StoredModel(name, manifest), store.save(connection, name, manifest, {}).added
        )


@pytest.fixture
def stand_ins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the examples name, and quick answers of what takes long."""
    Path("layers.txt").write_text(LAYERS)
    if DRILLS == 1:
        built = SimpleNamespace(errors={"reference": 1e-7}, shares={})
        monkeypatch.setattr(api, "run", create_autospec(api.run, side_effect=measured))
        doubles: dict[str, Any] = {
            "import_model": {"side_effect": imported},
            "tune_model": {"return_value": SimpleNamespace(errored=0)},
            "build_model": {"return_value": built},
        }
        for name, answer in doubles.items():
            double = create_autospec(getattr(models_api, name), **answer)
            monkeypatch.setattr(models_api, name, double)
        return
    need(find_spec("onnx") and find_spec("tvm"), "TVM and onnx")
    import nets
    import onnx

    onnx.save(nets.residual(), "resnet18.onnx")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.name)
def test_the_examples_of_a_page_run_one_after_the_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("example")
    # where dataclasses look up their annotations
    monkeypatch.setitem(sys.modules, "example", module)
    names = vars(module)
    for number, block in enumerate(blocks(path), 1):
        code = re.sub(r'"candidates": \d+', '"trials": True', block.replace('"tvm"', '"noop"'))
        exec(compile(code, f"{path.name}, block {number}", "exec"), names)  # noqa: S102  # our own document
    if "rows" in names:
        assert len(names["rows"]) == 10, "the examples ask about what they tuned"
        assert "MIOpenDriver" in names["rows"][0].driver


def test_pages_with_code_are_found() -> None:
    assert {path.name for path in WITH_CODE} >= {"python.md", "kinds.md", "tuna.ipynb"}
    for name, place in ELSEWHERE.items():
        assert name in (ROOT / "tests" / place).read_text()


def test_the_notebook_is_one_and_holds_no_output() -> None:
    document = json.loads(NOTEBOOK.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    for cell in document["cells"]:
        assert cell["cell_type"] in ("code", "markdown")
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.skipif(DRILLS == 1, reason="TUNA_TEST_DRILLS: it starts a kernel, workers and TVM")
def test_a_notebook_program_executes_it(home: Path) -> None:
    need(find_spec("nbclient") and find_spec("ipykernel"), "nbclient with ipykernel")
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=280).execute()
    shown = [
        out["data"] for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out
    ]
    assert any("<table>" in data.get("text/html", "") for data in shown)
