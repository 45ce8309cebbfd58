"""Models for other environments than this machine's: a session decides the target, and its workers
do the work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import rpc_servers
from command_lines import Ended
from compiled import TARGET, job_of, planned, run, write, write_answers
from nets import Net

from tuna import api
from tuna.api import running
from tuna.configs import from_json
from tuna.configs.model import WholeModelConfig
from tuna.errors import BadInput
from tuna.libraries.base import Environment
from tuna.libraries.registry import get_library
from tuna.libraries.tvm.solvers import MODEL, applicable, unsupported
from tuna.sandbox.cores import measuring_with
from tuna_models import api as models_api
from tuna_models.work import session as models_work
from tuna_models.work.known_kernels import ResultScope
from tuna_remote import board_child

#: Of another machine with this one's linker, so that no cross compiler is needed.
OTHER = "llvm -mcpu=x86-64-v2 -num-cores=3"


@pytest.fixture
def model(home: Path, tmp_path: Path) -> Path:
    net, path = Net((1, 8, 6, 6)), tmp_path / "net.onnx"
    onnx.save(net.model(net.relu(net.conv("x", 8, 8, 1))), path)
    return path


class Served(Exception):
    """The workers elsewhere would do it now."""


def test_a_session_decides_the_target_and_its_workers_are_elsewhere(
    type_in: Callable[..., Ended], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = api.init_session("tvm", "other", {"target": OTHER}).id
    assert type_in("tuna", "model", "import", "net", model).code == 0
    refused = type_in("tuna", "model", "build", "net", "-o", tmp_path / "net.so", "--session-id", 1)
    assert refused.code == BadInput.exit_code
    assert "The model net was imported for llvm -mcpu=" in refused.err
    assert "import it again with --session-id 1: `tuna model import net FILE`" in refused.err
    imported = type_in("tuna", "model", "import", "net", model, "--session-id", session)
    assert imported.code == 0
    here, there = (json.loads(one.manifest.target) for one in reversed(models_api.list_models()))
    with measuring_with(None):
        assert here == json.loads(get_library("tvm").environment().target)
    assert there == {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 3}
    asked: list[int] = []

    def run(session_id: int, *, workers: bool, **_: Any) -> None:
        assert not workers, "they are elsewhere"
        asked.append(session_id)
        raise Served

    monkeypatch.setattr(running, "run", run)
    with pytest.raises(Served):
        models_api.build_model("net", tmp_path / "net.so", session_id=session)
    assert asked == [session]
    (overview,) = api.status(session)
    assert sum(overview.jobs.values()) == 1, "the model's job alone"
    (config,) = (
        one for one in api.list_configs(models_api.list_models()[0].tag) if one.kind == "model"
    )
    assert isinstance(config, WholeModelConfig)
    assert json.loads(config.target) == there
    assert config.label.startswith("model net@")
    assert config.flops == 2 * 8 * 8 * 6 * 6
    assert not (tmp_path / "net.so").exists()
    # the same import is still the one for this machine
    with models_api.open_work(model="net") as work:
        assert json.loads(models_work.find_model("net", work).manifest.target) == here
        assert (work.own, work.runs_here) == (True, True)


def test_a_session_of_another_library_has_no_models(
    type_in: Callable[..., Ended], model: Path
) -> None:
    api.init_session("noop", "test")
    refused = type_in("tuna", "model", "import", "net", model, "--session-id", 1)
    assert refused.code == BadInput.exit_code
    assert "Session 1 belongs to noop, which compiles no models." in refused.err


def test_a_whole_model_is_for_its_own_target_alone() -> None:
    config = WholeModelConfig("net@1", "here", *(digit * 64 for digit in "abc"))
    assert applicable(config, "here", {}) == [MODEL.name]
    assert applicable(config, "there", {}) == []
    assert unsupported(config) == "models for another target"
    assert config.data_digests == ("b" * 64, "c" * 64)
    with pytest.raises(BadInput, match="program must be a SHA-256"):
        from_json({**config.to_json(), "program": "none"})


def test_results_of_an_emulated_device_count_for_it_alone() -> None:
    facts = {"library": "tvm", "library_version": "1", "arch": "a", "num_cu": 1, "toolchain": "t"}
    board = Environment(**facts, flags={"emulator": "qemu"})  # type: ignore[arg-type]
    work = models_work.ModelWork(board, own=False, lasting=SimpleNamespace())  # type: ignore[arg-type]
    assert work.scope() == ResultScope(simulated=True)


def test_a_model_is_checked_and_timed_on_a_board_that_links_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = Net((1, 3, 8, 8))
    plan = planned(net.model(net.add("GlobalAveragePool", net.conv("x", 3, 16, 3))))
    built = write(plan, TARGET, tmp_path)
    job = job_of(tmp_path, TARGET)
    x = np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)
    write_answers(Path(job.files["answers"]), [x], run(plan, x))
    loader = board_child.BoardLoader()
    problem = loader.reference(job)
    assert problem is not None
    with rpc_servers.server(key="board") as server:
        board_child.open_session("127.0.0.1", server.port, "board", 600)
        try:
            kernel = loader.load(job, built, [*problem.inputs, problem.blank()])
            kernel.run()
            assert problem.error(kernel.answer()) < 1e-6
            times_ms = kernel.times_ms(2, 3)
            assert times_ms is not None
            assert len(times_ms) == 3
            parts_ms = kernel.parts_ms()
            assert {"timed_0", "global_average"} < parts_ms.keys()
            assert 0 < parts_ms["timed_0"] < 1000
        finally:
            del kernel
            board_child.close_session()
