"""Which device a worker has, and what a measurement on it locks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from tuna.artifacts.store import Artifacts
from tuna.libraries.base import Step
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.device_use import DeviceUse
from tuna.libraries.items import StepResult, WorkItem, result_of
from tuna.queue.leases import Leases
from tuna.queue.messages import Chunk, Report
from tuna.sandbox.discovery import AMD, CPU, VENDORS, Device, Vendor, narrow
from tuna.sandbox.processes import child_env, run
from tuna.settings import Settings
from tuna.testing.noop import NoopLibrary
from tuna.workers.devices import device_for
from tuna.workers.link import RedisLink
from tuna.workers.runner import Runner

SETTINGS = Settings(eval_cpus="0")
CARDS = [
    Device("other", "H100", 0, "GPU-a", variables={"OTHERS": "GPU-a"}),
    Device(AMD, "gfx942", 1, "GPU-b", variables={"ROCR_VISIBLE_DEVICES": "1"}),
]


class Anywhere(NoopLibrary):
    device = DeviceUse()


class OnAmd(NoopLibrary):
    device = DeviceUse(AMD)


def test_a_library_gets_a_device_of_its_kind() -> None:
    assert device_for(Anywhere(), SETTINGS, {}, CARDS).uuid == "GPU-a"
    found = device_for(OnAmd(), SETTINGS, {}, CARDS)
    assert (found.uuid, found.variables) == (
        "GPU-b",
        {"ROCR_VISIBLE_DEVICES": "1"},
    )
    assert device_for(NoopLibrary(), SETTINGS, {}, CARDS) == DeviceHandle("cpu0", cpus=(0,))


def test_what_its_starter_chose_stands() -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "GPU-a"}
    assert device_for(Anywhere(), SETTINGS, environ, CARDS[:1]).variables == environ


def test_without_any_gpu_it_is_the_measuring_cores() -> None:
    cpu = [Device(CPU, "CPU")]
    found = device_for(Anywhere(), SETTINGS, {}, cpu)
    assert (found.id, found.uuid, found.cpus, found.locks) == ("cpu0", "", (0,), ("cpu0",))
    assert device_for(Anywhere(), SETTINGS, {"ROCR_VISIBLE_DEVICES": ""}, cpu).id == "cpu0"


def test_a_device_that_only_its_variable_tells_of_is_known_by_it() -> None:
    """A driver that discovery does not know, or the stand-in for a GPU: workers as the seeds start
    them."""
    cpu = [Device(CPU, "CPU")]
    first, second = (device_for(OnAmd(), SETTINGS, {"HIP_VISIBLE_DEVICES": n}, cpu) for n in "01")
    assert first.variables == {"HIP_VISIBLE_DEVICES": "0"}
    assert first.locks != second.locks, "two GPUs do not wait for one core"
    assert device_for(OnAmd(), SETTINGS, {}, cpu).locks == ("amd0",)


def test_two_gpus_of_a_machine_measure_at_once_and_each_child_sees_its_own(
    tmp_path: Path, redis_client: redis.Redis, tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers as the seeds start them, with HIP_VISIBLE_DEVICES alone."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    program = (
        "import os, pathlib, sys, time\nmine ="
        " os.environ['HIP_VISIBLE_DEVICES']\npathlib.Path(f'here-{mine}').touch()\ndeadline ="
        " time.monotonic() + 60\nwhile not pathlib.Path(f'here-{1 - int(mine)}').exists() and"
        " time.monotonic() < deadline: time.sleep(0.01)\nprint(mine, time.monotonic() < deadline)\n"
    )

    class Prints(OnAmd):
        def run(
            self, step: Step, items: Sequence[WorkItem], context: RunContext
        ) -> Iterator[StepResult]:
            assert context.device
            env = child_env(context.device.variables)
            # Each waits for the other's file, which a box would hide.
            done = run(
                [sys.executable, "-c", program], timeout_s=120, env=env, cwd=tmp_path, box=None
            )
            yield result_of(items[0], ok=True, output_tail=done.output)

    leases, reports = Leases(redis_client, "n", 60), []
    item = WorkItem(
        job_id=1, attempt=1, session_id=1, library="noop", step="measure", solver="Noop1", config={}
    )
    facts = {
        "namespace": "n",
        "library": "noop",
        "step": "measure",
        "environment": "e",
        "toolchain": "",
        "items": (item,),
    }
    leases.open(["0", "1"])
    threads = []
    for number in "01":
        device = device_for(
            OnAmd(), SETTINGS, {"HIP_VISIBLE_DEVICES": number}, [Device(CPU, "CPU")]
        )
        context = RunContext(Artifacts(tmp_path.as_uri(), tmp_path), tmp_path, (0,), device)
        work = (Chunk(id=number, **facts), Prints())
        threads.append(
            threading.Thread(target=Runner(RedisLink(redis_client, 60), context).run, args=work)
        )
        threads[-1].start()
    for thread in threads:
        thread.join()
    reports = [
        Report.model_validate_json(fields[b"r"])
        for _, fields in redis_client.xrange(leases.results_key)
    ]
    outputs = {result.output_tail for report in reports for result in report.results}
    assert outputs == {"0 True\n", "1 True\n"}


@pytest.mark.parametrize(
    ("device", "locks"),
    [
        (DeviceHandle("cpu4,5", cpus=(4, 5)), ("cpu4", "cpu5")),
        (DeviceHandle("GPU-a", "GPU-a", cpus=(4,)), ("GPU-a",)),
        (DeviceHandle("amd1", "", cpus=(4,)), ("amd1",)),
    ],
)
def test_two_workers_on_one_card_exclude_each_other_whatever_their_cores(
    device: DeviceHandle, locks: tuple[str, ...]
) -> None:
    assert device.locks == locks


def test_the_discovered_device_is_that_which_the_variable_leaves() -> None:
    two = [Device("other", "H100", index, f"GPU-{index}") for index in range(2)]
    vendor = Vendor(lambda _, __, environ: narrow(two, environ.get("OTHERS")), ("OTHERS",))
    with VENDORS.adding("a", vendor):
        assert device_for(Anywhere(), SETTINGS, {"OTHERS": "1"}).uuid == "GPU-1"
