"""Which workers lend cores, and how many processes compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuna.coordinator.session_run import default_workers
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.registry import get_library
from tuna.sandbox import core_lending, cores
from tuna.sandbox.discovery import CPU
from tuna.settings import get_settings
from tuna.testing.noop import NoopLibrary
from tuna.workers import served_queues
from tuna.workers.served_queues import ServedQueues
from tuna.workers.worker_process import WorkerProcess


class Borrower(NoopLibrary):
    device = DeviceUse(CPU, borrows_cores=True)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def test_a_worker_that_measures_lends_its_cores_until_it_leaves(tuna_home: Path) -> None:
    get_library.cache_clear()
    served = ServedQueues()
    for on_device, lent in ((False, set()), (True, set(cores.eval_cpus()))):
        process = WorkerProcess(get_settings(), served)
        queue = served.queue_of("noop", on_device=on_device)
        assert isinstance(queue, str)
        process.offer_cores([queue])
        assert core_lending._offered() == lent
        process.leave()
        assert core_lending._offered() == set()


@pytest.mark.parametrize(
    ("usable", "compiling", "with_lent"),
    [((0, 1, 2, 3), 3, 4), ((0, 1), 1, 2), ((5,), 1, 1)],
    ids=str,
)
def test_there_is_a_compile_process_for_each_core_that_may_build(
    usable: tuple[int, ...],
    compiling: int,
    with_lent: int,
    tuna_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "available_cpus", lambda: usable)
    for library, number in ((NoopLibrary(), compiling), (Borrower(), with_lent)):
        by_queue = {spec.queue: spec.processes for spec in default_workers([library])}
        assert by_queue == {"compile": number, "eval": 1}
    assert default_workers([Borrower()], 7)[0].processes == 7


def test_a_worker_warms_up_what_it_serves_of_the_libraries_that_it_is_told(
    tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[bool] = []
    device = DeviceUse(CPU, warm_up=lambda context: warmed.append(context.device is not None))
    monkeypatch.setattr(NoopLibrary, "device", device)
    get_library.cache_clear()
    served = ServedQueues()
    process = WorkerProcess(get_settings(), served)
    for on_device in (False, True):
        queue = served.queue_of("noop", on_device=on_device)
        assert isinstance(queue, str)
        process.warm_up([queue], ["noop", "there-is-no-such-library"])
        process.warm_up([queue], [""])
    assert warmed == [False, True]
    assert {spec.env["TUNA_WORKER_LIBRARIES"] for spec in default_workers([NoopLibrary()])} == {
        "noop"
    }


def test_workers_of_sessions_that_are_known_look_for_no_other_library(
    tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_queues, "names", lambda: ["absent", "noop"])
    assert {*ServedQueues().under("compile")} == {"absent", "noop"}
    (compiling, measuring) = default_workers([NoopLibrary()], alone=True)
    assert compiling.env == measuring.env
    for name, value in compiling.env.items():
        monkeypatch.setenv(name, value)
    assert {*ServedQueues().under("compile")} == {"noop"}
