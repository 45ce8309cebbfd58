"""A worker's side of a chunk: it stops what nobody wants, waits for the device, leaves its own
failures to others."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import redis
from settings_changes import change_setting

from tuna.artifacts.store import Artifacts
from tuna.errors import StorageFull
from tuna.libraries.base import Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.items import StepResult, Trial, WorkItem, result_of
from tuna.queue.heartbeat import HeartbeatBoard, HeartbeatSender, WorkerStatus
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, Report, ReportKind
from tuna.sandbox import core_lending
from tuna.sandbox import device_lock as device_lock_module
from tuna.sandbox.device_lock import device_lock
from tuna.sandbox.processes import Child, ChildCancelled, run
from tuna.testing.noop import NoopLibrary
from tuna.vocabulary import Cause
from tuna.workers import runner as running
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

ITEM = WorkItem(
    job_id=7, attempt=1, session_id=1, library="noop", step="measure", solver="Noop1", config={}
)
CORE = DeviceHandle("cpu0", cpus=(0,))
LEASE_S = 2.0


class Foreign(NoopLibrary):
    """Its item is a program that sleeps for ten minutes, or a child that does."""

    def __init__(self, *, served: bool) -> None:
        self._child = Child("sandbox_handlers") if served else None
        self.began = threading.Event()

    def run(
        self, step: Step, items: Sequence[WorkItem], context: RunContext
    ) -> Iterator[StepResult]:
        self.began.set()
        if self._child:
            self._child.call({"op": "hang"}, 600.0, context.cancelled)
        else:
            run(
                [sys.executable, "-c", "import time; time.sleep(600)"],
                timeout_s=600.0,
                cancelled=context.cancelled,
            )
        yield result_of(items[0], ok=True)


class Bench:
    """A runner with its lease and its reports."""

    def __init__(self, client: redis.Redis, folder: Path) -> None:
        store = Artifacts((folder / "a").as_uri(), folder / "c")
        self.leases = Leases(client, "n", LEASE_S)
        self.runner = Runner(
            RedisLink(client, LEASE_S), RunContext(store, folder, (0,), CORE), "me"
        )
        self._client = client

    def on(self, host: str, lease_s: float) -> Bench:
        """The same on another host."""
        other = copy.copy(self)
        other.leases = Leases(self._client, "n", lease_s)
        other.runner = Runner(RedisLink(self._client, lease_s), self.runner._context, host)
        return other

    def run(self, library: NoopLibrary | None = None, item: WorkItem = ITEM) -> str:
        self.leases.open(["c"])
        facts = {"library": "noop", "step": item.step, "environment": "env", "toolchain": "t"}
        chunk = Chunk(id="c", namespace="n", items=(item,), **facts)
        return self.runner.run(chunk, library or NoopLibrary())

    def reports(self) -> list[Report]:
        entries = self._client.xrange(self.leases.results_key)
        return [Report.model_validate_json(fields[b"r"]) for _, fields in entries]

    def somebody(self, environment: str) -> None:
        """Another worker that is alive and measures for `environment`."""
        facts = {
            "role": "eval",
            "host": "h",
            "pid": 1,
            "device": "",
            "toolchains": (),
            "job_ids": (),
        }
        status = WorkerStatus(
            name="other:1",
            place="other",
            environment=environment,
            started_at=0.0,
            seen_at=0.0,
            **facts,
        )
        HeartbeatBoard(self._client, "n", 60.0).announce(status)


@pytest.fixture()
def bench(
    redis_client: redis.Redis, tmp_path: Path, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(running, "_BACKOFF_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "sandbox"))
    return Bench(redis_client, tmp_path)


@pytest.mark.parametrize("served", [False, True])
def test_a_lost_lease_ends_the_child_that_works_for_it(
    bench: Bench, served: bool, eventually: Callable[..., None]
) -> None:
    """A worker whose lease was dropped does not go on until the item is done."""
    library, ended = Foreign(served=served), list[str]()
    worker = threading.Thread(target=lambda: ended.append(bench.run(library)))
    worker.start()
    assert library.began.wait(120)
    bench.leases.drop(["c"])
    worker.join(60)
    assert ended == ["lost"]
    assert [report.kind for report in bench.reports()] == [ReportKind.STARTED]


@pytest.mark.parametrize("end", ["canceled", "revoked"])
def test_on_another_host_too_what_runs_ends_at_once_with_all_that_it_started(
    bench: Bench,
    end: str,
    tmp_path: Path,
    eventually: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`cancel` does not wait for the next heartbeat, a quarter of a lease later, and a process that
    left the group ends too."""
    note = tmp_path / "pid"
    program = (
        "import os, subprocess, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(note)!r}, 'w').write(str(os.getpid()))\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "time.sleep(600)\n"
    )

    class Hour(NoopLibrary):
        def run(
            self, step: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            run(
                [sys.executable, "-c", program],
                timeout_s=600.0,
                cancelled=context.cancelled,
                box=None,
            )
            yield result_of(items[0], ok=True)

    far = bench.on("far-away", lease_s=1200.0)
    ended: list[str] = []
    worker = threading.Thread(target=lambda: ended.append(far.run(Hour())))
    worker.start()
    eventually(lambda: note.exists() and note.read_text(), 60.0)
    if end == "canceled":
        bench.leases.drop(["c"])
    else:
        bench.leases.evict("far-away")
    worker.join(120)
    assert ended == ["lost"], "a heartbeat of this lease comes every five minutes"
    eventually(lambda: not Path(f"/proc/{note.read_text()}").exists(), 60.0)


def test_work_is_given_back_when_the_device_stays_somebody_elses(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "DEVICE_WAIT_S", 0.1)
    with device_lock(CORE.locks):
        assert bench.run() == "returned"
    last = bench.reports()[-1]
    assert (last.kind, last.results) == (ReportKind.RETURNED, ())
    assert "another process measures on cpu0" in last.reason
    assert bench.run() == "finished"


def test_others_see_that_a_worker_waits_for_its_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lock_module, "_TOLD_S", 0.0)
    monkeypatch.setattr(running, "DEVICE_WAIT_S", 0.1)
    bench.runner._announcer = announcer = Mock(spec=HeartbeatSender)
    with device_lock(CORE.locks):
        assert bench.run() == "returned"
    told = [call.args[0] for call in announcer.waits.call_args_list]
    assert told == ["another process's measurement on cpu0", ""]


def test_a_measurement_has_its_cores_alone_and_quiet_where_that_is_set(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Looks(NoopLibrary):
        def run(
            self, step: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            seen.append([core_lending._is_held(name) for name in ("measured-0", "quiet")])
            yield from super().run(step, items, context)

    seen: list[list[bool]] = []
    for quiet in ("auto", "yes", "no"):
        change_setting(monkeypatch, "TUNA_QUIET", quiet)
        assert bench.run(Looks()) == "finished"
        assert bench.run(Looks(), ITEM.model_copy(update={"step": "build"})) == "finished"
    assert seen == [
        [True, False],
        [False, False],
        [True, True],
        [False, False],
        [True, False],
        [False, False],
    ]


def test_a_step_on_a_cpu_waits_for_no_device(bench: Bench) -> None:
    with device_lock(CORE.locks):
        assert bench.run(item=ITEM.model_copy(update={"step": "build"})) == "finished"


def test_what_failed_here_is_left_to_another_worker_a_few_times(bench: Bench) -> None:
    bench.somebody("other, env")
    mine = ITEM.model_copy(update={"avoid": bench.runner.place})
    ends = [bench.run(item=mine) for _ in range(running._MAX_DECLINED + 1)]
    assert ends == ["declined"] * running._MAX_DECLINED + ["finished"]
    assert {report.results for report in bench.reports() if report.kind is ReportKind.RETURNED} == {
        ()
    }
    assert bench.run(item=mine) == "declined", "it failed again, and is left to others again"


def test_without_another_worker_of_the_queue_the_job_is_tried_here_at_once(bench: Bench) -> None:
    mine = ITEM.model_copy(update={"avoid": bench.runner.place})
    assert bench.run(item=mine) == "finished"
    bench.somebody("quite another environment")
    assert bench.run(item=mine) == "finished"


def test_another_worker_takes_the_job_at_once(bench: Bench) -> None:
    bench.somebody("env")
    assert bench.run(item=ITEM.model_copy(update={"avoid": "other"})) == "finished"


def test_a_refusal_outlives_a_short_lease(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker renews the lease during the pause before the refusal."""
    monkeypatch.setattr(running, "_BACKOFF_S", 1.5 * LEASE_S)
    bench.leases.open(["c"])
    chunk = Chunk(
        id="c",
        namespace="n",
        library="noop",
        step="build",
        environment="",
        toolchain="t",
        items=(ITEM,),
    )
    taken_back: list[str] = []
    watch = threading.Timer(1.25 * LEASE_S, lambda: taken_back.extend(bench.leases.expired()))
    watch.start()
    assert bench.runner.run(chunk, NoopLibrary(), "no") == "refused"
    watch.join()
    assert taken_back == []
    assert bench.reports()[-1].reason == "no"


def test_a_library_that_swallows_the_cancellation_reports_nothing(bench: Bench) -> None:
    class Swallows(NoopLibrary):
        def run(
            self, step: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            bench.leases.drop(["c"])
            deadline = time.monotonic() + 30
            while not context.cancelled() and time.monotonic() < deadline:
                time.sleep(0.01)
            yield result_of(items[0], ok=False, cause=Cause.RUN_ERROR)

    assert bench.run(Swallows()) == "lost"
    assert [report.kind for report in bench.reports()] == [ReportKind.STARTED]


def test_what_was_stored_for_a_chunk_that_was_canceled_is_reported(bench: Bench) -> None:
    """Code of an item with a result and of one without, or it would stay in the store for ever."""

    class Stores(NoopLibrary):
        def run(
            self, step: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            code = context.artifacts.put(b"one")
            yield result_of(items[0], ok=True, trials=(Trial(index=0, artifact=code),))
            context.artifacts.put(b"two")
            bench.leases.drop(["c"])
            while not context.cancelled():
                time.sleep(0.01)
            raise ChildCancelled

    assert bench.run(Stores()) == "lost"
    (last,) = bench.reports()[1:]
    digests = sorted(hashlib.sha256(code).hexdigest() for code in (b"one", b"two"))
    assert (last.kind, last.jobs, last.results) == (ReportKind.ABANDONED, (7,), ())
    assert list(last.artifacts) == digests


def test_what_a_chunk_leaves_in_its_scratch_folder_is_removed_with_it(
    bench: Bench, tmp_path: Path
) -> None:
    """An eval worker keeps no file of what it measured."""
    folders: list[Path] = []

    class Litters(NoopLibrary):
        def run(
            self, step: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            folders.append(context.scratch)
            (context.scratch / "folder").mkdir()
            (context.scratch / "folder" / "code.so").write_bytes(b"code")
            if len(folders) == 2:
                raise StorageFull("as a library says it")
            yield result_of(items[0], ok=True)

    assert [bench.run(Litters()) for _ in range(2)] == ["finished", "returned"]
    assert len(set(folders)) == 2
    assert not [folder for folder in folders if folder.exists()]
    assert not list(tmp_path.glob("chunk-*"))


def test_a_scratch_folder_that_cannot_be_made_is_no_fault_of_the_job(
    bench: Bench, tmp_path: Path
) -> None:
    bench.runner._context = dataclasses.replace(bench.runner._context, scratch=tmp_path / "gone")
    assert bench.run() == "returned"
    assert [report.kind for report in bench.reports()] == [ReportKind.STARTED, ReportKind.RETURNED]
