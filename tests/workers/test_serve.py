"""What `tuna worker` starts, when it starts it again, and the hooks around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuna.errors import BadInput, LibraryMissing, ServiceError
from tuna.sandbox.discovery import AMD, CPU, Device
from tuna.settings import Settings
from tuna.workers import serve as serving
from tuna.workers.launch import run_hook
from tuna.workers.serve import device_specs, is_final, serve

CARDS = [
    Device(AMD, "gfx942 x 304", index, variables={"ROCR_VISIBLE_DEVICES": str(index)})
    for index in range(3)
]


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "available_cpus", lambda: (0, 1, 2, 3))


def test_a_worker_has_the_variables_of_its_device_and_a_core_of_its_own() -> None:
    specs = device_specs(CARDS, "0,2", Settings(eval_cpus=""), {"COMMON": "x"})
    assert [spec.title for spec in specs] == ["eval-0", "eval-2"]
    assert [spec.env["ROCR_VISIBLE_DEVICES"] for spec in specs] == ["0", "2"]
    assert {spec.env["COMMON"] for spec in specs} == {"x"}
    assert len({spec.env["TUNA_EVAL_CPUS"] for spec in specs}) == 2


def test_workers_of_another_command_have_other_cores() -> None:
    every = {
        spec.title: spec.env for spec in device_specs(CARDS, "all", Settings(eval_cpus=""), {})
    }
    for number in "012":
        (alone,) = device_specs(CARDS, number, Settings(eval_cpus=""), {})
        assert alone.env == every[f"eval-{number}"]


def test_the_cpu_measures_on_the_cores_that_it_would_without_devices() -> None:
    (spec,) = device_specs([Device(CPU, "CPU")], "all", Settings(eval_cpus="0"), {})
    assert spec.env == {"TUNA_EVAL_CPUS": "0"}


def test_an_eval_worker_has_one_process_and_a_compile_worker_no_device() -> None:
    with pytest.raises(BadInput, match="one process"):
        serve("eval", 2, settings=Settings())
    with pytest.raises(BadInput, match="Only eval workers"):
        serve("compile", devices="all", settings=Settings())


def test_a_worker_without_its_board_is_started_until_there_is_one() -> None:
    missing = LibraryMissing.exit_code
    for first in (True, False):
        assert not is_final(missing, waits=True, first=first)
        assert is_final(missing, waits=False, first=first)
    for waits in (True, False):
        codes = 0, 1, BadInput.exit_code, 5
        final = [is_final(code, waits=waits, first=True) for code in codes]
        assert final == [True, False, True, True]
        assert not is_final(ServiceError.exit_code, waits=waits, first=False)


def test_a_hook_sees_the_workers_variables() -> None:
    run_hook(
        "TUNA_BEFORE_WORKER",
        """sh -c 'test "$ROCR_VISIBLE_DEVICES" = 2'""",
        {"ROCR_VISIBLE_DEVICES": "2"},
    )
    run_hook("TUNA_BEFORE_WORKER", "", {})


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "sh -c 'echo too hot; echo really >&2; exit 4'",
            "failed with exit code 4. too hot\nreally",
        ),
        ("sh -c 'echo wait; sleep 60'", "did not end within 0.2 s. wait"),
        ("/nowhere/probe --all", "cannot be started: No such file or directory: /nowhere/probe"),
    ],
)
def test_a_hook_that_fails_says_how(command: str, words: str) -> None:
    with pytest.raises(ServiceError) as error:
        run_hook("TUNA_BEFORE_WORKER", command, {}, limit_s=0.2 if "sleep" in command else 10)
    assert str(error.value) == f"TUNA_BEFORE_WORKER {words}"


def test_a_hook_with_an_open_quote_is_not_usable() -> None:
    with pytest.raises(ValueError, match="No closing quotation"):
        Settings(before_worker="probe 'all")


def test_measuring_cores_that_are_not_there_are_refused_before_a_worker_starts(
    tmp_path: Path,
) -> None:
    """`TUNA_EVAL_CPUS=999 tuna worker eval` served the libraries that did not look at their
    cores."""
    with pytest.raises(BadInput, match="TUNA_EVAL_CPUS names core 999"):
        serve("eval", settings=Settings(home=tmp_path, eval_cpus="999"))
