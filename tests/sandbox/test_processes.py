"""Foreign code may crash, hang, flood and lie: the sandbox says what happened, and nothing of it is
left behind."""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tuna.sandbox import processes
from tuna.sandbox.box import Box
from tuna.sandbox.discovery import visibility
from tuna.sandbox.processes import (
    Child,
    ChildCancelled,
    ChildCrashed,
    ChildFailed,
    ChildGarbled,
    ChildTimeout,
    child_env,
    run,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODULE = "sandbox_handlers"
LIMIT_S = 60.0


def environment(**more: str) -> dict[str, str]:
    return child_env({"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), **more})


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child(MODULE, env=environment())
    yield made
    made.close()


def python(program: str, timeout_s: float = LIMIT_S, **limits: object) -> processes.Completed:
    return run([sys.executable, "-c", program], timeout_s=timeout_s, **limits)  # type: ignore[arg-type]


def eventually(condition: Callable[[], bool], limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def gone(pid: int) -> bool:
    """Whether the process is dead; one that nobody has reaped yet counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_program_ends_with_its_code_and_both_its_outputs_in_order() -> None:
    done = python(
        "import sys; print('one', flush=True); print('two', file=sys.stderr); sys.exit(3)"
    )
    assert (done.returncode, done.signal, done.timed_out, done.output) == (
        3,
        None,
        False,
        "one\ntwo\n",
    )


def test_a_program_that_is_not_there_is_named() -> None:
    done = run(["/no/such/program"], timeout_s=LIMIT_S)
    assert done.returncode == 1
    assert "/no/such/program cannot be started" in done.output


def test_the_signal_that_ended_a_program_is_named() -> None:
    done = python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (done.signal, done.timed_out) == ("SIGSEGV", False)


def test_a_program_past_its_limit_is_killed_with_all_that_it_started() -> None:
    helper = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True);"
        " p.wait()"
    )
    done = python(helper, timeout_s=3.0)
    assert done.timed_out
    assert eventually(lambda: gone(int(done.output)))


def test_what_a_program_leaves_behind_is_killed() -> None:
    done = python("import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)")
    assert (done.returncode, done.timed_out) == (0, False)
    assert eventually(lambda: gone(int(done.output)))


def test_of_a_flood_of_output_the_end_is_kept() -> None:
    done = python(
        "import os\nfor _ in range(20): os.write(1, b'x' * (1 << 20))\nos.write(1, b'END')"
    )
    assert len(done.output) == processes.TAIL_BYTES
    assert done.output.endswith("xEND")


def test_a_program_that_closes_its_outputs_is_still_waited_for() -> None:
    done = python("import os, sys, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(5)")
    assert (done.returncode, done.timed_out) == (5, False)


def test_a_program_keeps_to_its_cores_and_dumps_no_core() -> None:
    core = max(os.sched_getaffinity(0))
    facts = (
        "import os, resource; print(sorted(os.sched_getaffinity(0)),"
        " resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    assert python(facts, cpus=[core]).output == f"[{core}] 0\n"


def test_the_limits_of_this_process_stay_as_they_are() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA), os.sched_getaffinity(0)
    python("pass", cpus=[max(os.sched_getaffinity(0))])
    assert (resource.getrlimit(resource.RLIMIT_DATA), os.sched_getaffinity(0)) == before


def test_secrets_in_the_environment_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNA_DB_URL", "mysql://root:hunter2@db/tuna")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    assert "hunter2" not in python("import os; print(dict(os.environ))").output


def test_words_are_not_interpreted_by_a_shell(tmp_path: Path) -> None:
    target = tmp_path / "written"
    done = run(["echo", f"; touch {target}", "$(id)"], timeout_s=LIMIT_S)
    assert done.output == f"; touch {target} $(id)\n"
    assert not target.exists()


def test_a_child_answers_many_calls_in_one_process(child: Child) -> None:
    answers = [
        child.call({"op": "echo", "value": n}, LIMIT_S)
        for n in (1, "zwei", [3.5, None], {"ü": True})
    ]
    assert [answer["value"] for answer in answers] == [1, "zwei", [3.5, None], {"ü": True}]
    assert {answer["pid"] for answer in answers} == {child.pid}
    assert child.starts == 1


def test_a_function_that_raises_leaves_the_child_alive(child: Child) -> None:
    with pytest.raises(ChildFailed, match="ValueError: no such luck") as failure:
        child.call({"op": "fail"}, LIMIT_S)
    assert "sandbox_handlers.py" in failure.value.tail
    assert child.call({"op": "echo", "value": 1}, LIMIT_S)["value"] == 1
    assert child.starts == 1


def test_a_function_may_say_that_its_process_is_of_no_more_use(child: Child) -> None:
    for starts in (1, 2):
        with pytest.raises(ChildFailed, match="Unusable: no context") as raised:
            child.call({"op": "give_up"}, 10)
        assert (raised.value.ends, child.alive, child.starts) == ("process", False, starts)


def test_an_unknown_request_is_a_failure_and_not_a_crash(child: Child) -> None:
    with pytest.raises(ChildFailed, match="KeyError"):
        child.call({"op": "unheard of"}, LIMIT_S)
    assert child.alive


def test_a_crash_is_reported_with_its_signal_and_last_words_and_the_next_call_works(
    child: Child,
) -> None:
    with pytest.raises(ChildCrashed, match="SIGSEGV") as crash:
        child.call({"op": "crash"}, LIMIT_S)
    assert "last words" in crash.value.tail
    assert not child.alive
    assert child.call({"op": "echo", "value": 2}, LIMIT_S)["value"] == 2
    assert child.starts == 2


def test_an_exit_is_reported_with_its_code(child: Child) -> None:
    with pytest.raises(ChildCrashed, match="exit code 7"):
        child.call({"op": "leave", "code": 7}, LIMIT_S)


def test_a_module_that_cannot_be_imported_is_a_crash_that_says_so() -> None:
    broken = Child("no_such_module_anywhere", env=environment())
    with pytest.raises(ChildCrashed) as crash:
        broken.call({"op": "echo", "value": 1}, LIMIT_S)
    assert "no_such_module_anywhere" in crash.value.tail


def test_a_child_that_was_started_early_has_imported_what_it_was_told_to() -> None:
    child = Child(MODULE, env=environment(), imports=["wave", "there_is_no_such_module"])
    try:
        child.start()
        pid = child.pid
        assert child.alive
        child.start()
        assert child.call({"op": "imported", "name": "wave"}, LIMIT_S)["there"]
        assert (child.pid, child.starts) == (pid, 1)
    finally:
        child.close()


def test_a_child_that_hangs_is_killed_with_all_that_it_started(child: Child) -> None:
    child.call({"op": "echo", "value": 0}, LIMIT_S)
    pid = child.pid
    with pytest.raises(ChildTimeout) as hang:
        child.call({"op": "hang"}, 3.0)
    assert pid is not None
    assert gone(pid)
    helper = int(hang.value.tail.split()[1])
    assert eventually(lambda: gone(helper))
    assert child.call({"op": "echo", "value": 3}, LIMIT_S)["value"] == 3


def test_a_child_that_prints_a_flood_answers_and_costs_no_memory() -> None:
    loud = Child(MODULE, env=environment())
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert loud.call({"op": "chatter", "megabytes": 64}, LIMIT_S) == {"done": True}
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
        with pytest.raises(ChildCrashed) as crash:
            loud.call({"op": "leave", "code": 1}, LIMIT_S)
        assert crash.value.tail.endswith("the end")
        assert len(crash.value.tail) == processes.TAIL_BYTES
    finally:
        loud.close()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("no JSON\n", "is not JSON"),
        ("[1, 2]\n", "is not an object"),
        ('{"number": 99, "result": {}}\n', "has not the number of its request"),
        ('{"number": 1}\n', "has neither a result nor an error"),
    ],
)
def test_an_answer_that_is_garbage_counts_as_a_crash(child: Child, text: str, fault: str) -> None:
    with pytest.raises(ChildCrashed, match=f"the child's answer {fault}"):
        child.call({"op": "garbage", "text": text}, LIMIT_S)
    assert not child.alive
    assert child.call({"op": "echo", "value": 4}, LIMIT_S)["value"] == 4


def test_what_a_child_wrote_beside_its_answer_is_no_answer_to_the_next_call(child: Child) -> None:
    """A hostile child knows the number of the next call."""
    child.call(
        {"op": "answer_twice", "text": '{"number": 3, "result": {"value": "forged"}}\n'}, LIMIT_S
    )
    assert child.call({"op": "echo", "value": "first"}, LIMIT_S)["value"] == "first"
    select.select([child._answers], [], [])  # it is there
    assert child.call({"op": "echo", "value": "mine"}, LIMIT_S)["value"] == "mine"
    assert child.starts == 2


def test_an_answer_that_its_caller_cannot_use_counts_as_a_crash(child: Child) -> None:
    with pytest.raises(ChildGarbled, match="answer is not valid: the answer is not an object"):
        child.call({"op": "garbage", "text": '{"number": 1, "result": null}\n'}, LIMIT_S)
    assert not child.alive


def test_a_large_answer_arrives_and_one_without_end_does_not(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(child.call({"op": "large", "megabytes": 4}, LIMIT_S)["text"]) == 4 << 20
    monkeypatch.setattr(processes, "MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(ChildCrashed, match="too long: more than 1048576 bytes"):
        child.call({"op": "large", "megabytes": 8}, LIMIT_S)


def test_a_request_larger_than_a_pipe_arrives(child: Child) -> None:
    value = "z" * (4 << 20)
    assert child.call({"op": "echo", "value": value}, LIMIT_S)["value"] == value


def test_a_child_keeps_to_its_memory_its_cores_and_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TUNA_REDIS_URL", "redis://:hunter2@host")
    core = max(os.sched_getaffinity(0))
    limited = Child(MODULE, env=environment(MARK="1"), memory_bytes=512 << 20, cpus=[core])
    try:
        seen = limited.call({"op": "echo", "value": None}, LIMIT_S)
        assert seen["cpus"] == [core]
        assert seen["env"]["MARK"] == "1"
        assert "hunter2" not in str(seen["env"])
        with pytest.raises(ChildFailed, match="MemoryError"):
            limited.call({"op": "allocate", "megabytes": 1024}, LIMIT_S)
        assert limited.call({"op": "allocate", "megabytes": 8}, LIMIT_S) == {"bytes": 8 << 20}
    finally:
        limited.close()


def test_a_child_that_was_killed_from_outside_is_replaced(child: Child) -> None:
    child.call({"op": "echo", "value": 0}, LIMIT_S)
    assert child.pid is not None
    os.kill(child.pid, 9)
    assert eventually(lambda: not child.alive)
    assert child.call({"op": "echo", "value": 1}, LIMIT_S)["value"] == 1


def test_a_closed_child_leaves_no_process_and_no_file_descriptor() -> None:
    before = open_files()
    made = Child(MODULE, env=environment())
    made.call({"op": "echo", "value": 1}, LIMIT_S)
    pid = made.pid
    made.close()
    made.close()
    assert pid is not None
    assert gone(pid)
    assert open_files() == before


def test_a_child_dies_with_its_parent() -> None:
    program = (
        "import os, sys\nfrom tuna.sandbox.processes import Child, child_env\nchild ="
        f" Child({MODULE!r}, env=child_env({{'PYTHONPATH':"
        " os.environ['PYTHONPATH']}))\nchild.call({'op': 'echo', 'value': 1},"
        " 60)\nprint(child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, timeout=LIMIT_S
    )
    assert parent.returncode == -9
    assert eventually(lambda: gone(int(parent.stdout)))


@pytest.mark.parametrize("device", ["3", ""])
def test_a_child_sees_the_device_that_its_worker_was_given_or_none(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variable, every plug-in's child would measure on the first device."""
    for name in visibility():
        monkeypatch.setenv(name, device)
    done = python(f"import os; print([os.environ.get(name) for name in {list(visibility())}])")
    assert done.output == f"{[device] * len(visibility())}\n"


def test_a_program_that_nobody_wants_any_more_is_killed_with_all_that_it_started(
    tmp_path: Path,
) -> None:
    note = tmp_path / "pid"
    helper = (
        f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(note)!r},"
        " 'w').write(str(p.pid)); p.wait()"
    )
    with pytest.raises(ChildCancelled):
        python(
            helper,
            cancelled=lambda: note.exists() and bool(note.read_text()),
            box=Box(writable=(tmp_path,)),
        )
    assert eventually(lambda: gone(int(note.read_text())))


def test_a_call_that_nobody_wants_any_more_ends_and_the_next_starts_another_child(
    child: Child,
) -> None:
    child.call({"op": "echo", "value": 1}, LIMIT_S)
    pid, asked = child.pid, time.monotonic()
    with pytest.raises(ChildCancelled):
        child.call({"op": "hang"}, LIMIT_S, lambda: time.monotonic() - asked > 0.2)
    assert time.monotonic() - asked < LIMIT_S
    assert pid is not None
    assert eventually(lambda: gone(pid))
    assert child.call({"op": "echo", "value": 2}, LIMIT_S)["value"] == 2
    assert child.starts == 2
