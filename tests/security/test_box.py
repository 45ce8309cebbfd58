"""What is built and measured is foreign machine code: it gets its inputs, its device, a folder of
its own, and nothing else."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil
import pytest
from box_place import LIMIT_S, SECRET, Place, perform
from celery import Celery
from settings_changes import change_setting
from shared_data import need, needed_program
from structlog.testing import capture_logs

from tuna.api import checks as doctor
from tuna.common.files import NotPlain, read_plain
from tuna.errors import ServiceError
from tuna.queue import celery_internals
from tuna.sandbox import box as boxes
from tuna.sandbox import landlock, seccomp
from tuna.sandbox.box import Box
from tuna.sandbox.processes import run
from tuna.settings import Settings, get_settings
from tuna.workers.worker import CeleryWorker

pytestmark = pytest.mark.usefixtures("needs_a_box")


@pytest.fixture(params=[1, 2, 4, 6])
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Landlock as older kernels have it: 5.13, 5.19, 6.7 and 6.12."""
    if landlock.version() < request.param:
        pytest.skip(f"this kernel has version {landlock.version()} of Landlock")
    monkeypatch.setattr(landlock, "version", lambda: request.param)
    return int(request.param)


def test_a_program_reaches_no_file_process_or_socket_outside(
    acts: Path, place: Place, victim: psutil.Popen, listener: str, interface: int
) -> None:
    """On every kernel: the broker's password is in an environment and in TUNA_HOME, the signing
    key in the database."""
    with socket.socket(socket.AF_UNIX) as server:
        address = place.home / "redis.sock"
        server.bind(os.path.relpath(address))
        server.listen()
        wanted: dict[str, object] = {
            "read": place.secret, "write": place.secret, "truncate": place.secret,
            "delete": place.secret, "list": place.home,
            "rename": place.secret, "link": place.secret, "symlink": place.secret,
            "fifo": place.room / "fifo",
            "cut": place.readable, "environ": os.getpid(), "mem": os.getpid(), "maps": victim.pid,
            "ptrace": victim.pid,
            "kill": victim.pid, "signal-all": 0, "limit": victim.pid, "priority": victim.pid,
            "tcp": listener, "udp": listener,
            "tcp6": 0, "netlink": 0, "unix": address, "io_uring": 0, "session": 0, "group": 0,
            "namespace": 0, "mount": place.room,
            "shared-memory": 0, "outlive": 0, "memfd": 0, "memfd-secret": 0, "map-shared": 0,
            "map-stack": 0,
        }  # fmt: skip
        found = perform(acts, wanted, place)
    assert set(found) == set(wanted)
    assert [name for name, said in found.items() if said == "DONE"] == []
    assert victim.poll() is None
    assert not place.harmed
    assert list(place.room.iterdir()) == []
    assert place.left_behind() == []


def test_memory_that_no_limit_counts_is_for_gpus_alone(acts: Path, place: Place) -> None:
    """RLIMIT_DATA counts private memory."""
    wanted = {"memfd": 0, "map-shared": 0, "list": "/dev", "read": "/dev/zero"}
    assert [name for name, said in perform(acts, wanted, place).items() if said == "DONE"] == []
    place.box = replace(place.box, gpus=True)
    done = [name for name, said in perform(acts, wanted, place).items() if said == "DONE"]
    assert done == ["memfd", "map-shared", "read"]


def test_where_memory_runs_out_the_kernel_ends_a_child_first(place: Place) -> None:
    assert (
        run(["cat", "/proc/self/oom_score_adj"], timeout_s=LIMIT_S, box=place.box).output
        == "1000\n"
    )


def test_without_a_box_most_places_are_open(
    acts: Path, place: Place, victim: psutil.Popen, listener: str
) -> None:
    """What the tests above and below would see if the box did not hold."""
    wanted = {"read": place.secret, "environ": victim.pid, "tcp": listener, "ptrace": victim.pid}
    words = [word for name, argument in wanted.items() for word in (name, str(argument))]
    done = run([str(acts), *words], timeout_s=LIMIT_S, box=None)
    open_here = {
        line.partition(":")[0] for line in done.output.splitlines() if line.endswith("DONE")
    }
    assert {"read", "tcp", "ptrace"} <= open_here


def test_a_box_with_a_network_opens_connections_and_nothing_else(
    acts: Path, place: Place, listener: str
) -> None:
    """For clients of other machines, such as boards behind TVM RPC."""
    with socket.socket(socket.AF_UNIX) as server:
        address = place.home / "redis.sock"
        server.bind(os.path.relpath(address))
        server.listen()
        wanted: dict[str, object] = {
            "tcp": listener, "tcp6": 0, "netlink": 0, "unix": address, "read": place.secret,
            "session": 0, "io_uring": 0,
        }  # fmt: skip
        place.box = replace(place.box, network=True)
        found = perform(acts, wanted, place)
    assert {name for name, said in found.items() if said == "DONE"} == {"tcp", "tcp6"}


def test_the_mode_of_a_file_does_not_change(acts: Path, place: Place) -> None:
    """Linkers and MIOpen set modes of their own files; nothing depends on it, and no filter can
    tell whose file it is."""
    assert perform(acts, {"mode": place.secret}, place) == {"mode": "DONE"}
    assert not place.harmed


def test_a_file_of_100_gb_ends_the_program(acts: Path, place: Place) -> None:
    words = ["large", str(place.room / "large")]
    done = run([str(acts), *words], timeout_s=LIMIT_S, box=place.box)
    assert (done.signal, done.output) == ("SIGXFSZ", "")


#: Runs a program in a box as another user, for whom the limit of processes holds, and says how it
#: ended.
_AS_NOBODY = """\
import json, os, sys
from tuna.sandbox import child
from tuna.sandbox.processes import run
limits = {"parent": os.getppid(), **json.loads(sys.argv[1])}
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
child.limit_self(limits)
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_fork_bomb_stops_at_the_limit_and_ends_with_its_program(
    acts: Path, place: Place, eventually: Callable[[Callable[[], object], float], None]
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        program = Path(folder) / "box_acts"
        shutil.copy(acts, program)
        user = 65534 if os.getuid() == 0 else os.getuid()
        most = 50 + sum(
            p.num_threads() for p in psutil.process_iter(["uids"]) if p.info["uids"].real == user
        )
        facts = {
            "resources": {"RLIMIT_NPROC": most},
            "box": boxes.facts(Box(readable=(Path(folder),)), {}),
        }
        words = [sys.executable, "-c", _AS_NOBODY, json.dumps(facts), str(program), "bomb", "400"]
        done = run(words, timeout_s=LIMIT_S, box=None)
    assert done.output == "bomb: Resource temporarily unavailable\n"
    # killed, though a busy machine takes a moment to end them
    eventually(
        lambda: str(program) not in {one.info["exe"] for one in psutil.process_iter(["exe"])}, 10
    )


def test_a_program_that_is_boxed_still_compiles_and_runs_programs(place: Place) -> None:
    needed_program("cc")
    (place.room / "source.c").write_text("int main(void) { return 7; }")
    line = "cc -o here source.c && /lib64/ld-linux-x86-64.so.2 ./here"
    if not Path("/lib64/ld-linux-x86-64.so.2").exists():
        line = "cc -c -o here source.c && exit 7"
    done = run(["/bin/sh", "-c", line], timeout_s=LIMIT_S, box=place.box, cwd=place.room)
    assert (done.returncode, done.output) == (7, "")


#: As another user, says whether a process that it forked can read its environment, before and after
#: it hid it.
_LOOK = """\
import ctypes, os
from tuna.common.lifetime import forbid_inspection
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
def look():
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.execv("/bin/sh", ["sh", "-c", "cat /proc/$PPID/environ 2>/dev/null | grep -q hunter2"])
before = look()
forbid_inspection()
print(before == 0, look() == 0)
"""


def test_a_worker_hides_its_environment_without_landlock_too() -> None:
    env = {**os.environ, "TUNA_BROKER_URL": f"redis://:{SECRET}@host"}
    done = subprocess.run(
        [sys.executable, "-c", _LOOK], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True False\n"


def test_every_command_and_whoever_starts_a_child_hides_it() -> None:
    dumpable = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    command = "from tuna.cli.main import guarded, tuna; guarded(tuna, ['--version'])"
    child = "from tuna.sandbox.processes import run; run(['true'], timeout_s=60)"
    for before in (command, child):
        done = subprocess.run(
            [sys.executable, "-c", f"{before}\n{dumpable}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "0"


def test_a_kernel_without_landlock_still_refuses_sockets_and_signals(
    acts: Path, place: Place, victim: psutil.Popen, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 0)
    assert ["Landlock" in text for text in boxes.lacking()] == [True]
    wanted = {
        "kill": victim.pid,
        "ptrace": victim.pid,
        "tcp": listener,
        "session": 0,
        "truncate": place.secret,
    }
    assert "DONE" not in perform(acts, wanted, place).values()
    assert perform(acts, {"read": place.secret}, place) == {"read": "DONE"}, "this is what it lacks"


def test_what_a_kernel_lacks_is_logged_once_and_refused_on_request(
    tuna_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 0)
    boxes._warn_once.cache_clear()
    with capture_logs() as lines:
        assert [run(["true"], timeout_s=LIMIT_S).returncode for _ in range(2)] == [0, 0]
    assert [line["event"] for line in lines] == ["sandbox incomplete"]
    change_setting(monkeypatch, "TUNA_SANDBOX", "require")
    with pytest.raises(ServiceError, match="no Landlock") as refused:
        run(["true"], timeout_s=LIMIT_S)
    assert "TUNA_SANDBOX=auto" in refused.value.hint


@pytest.mark.parametrize(
    ("version", "mode", "ok", "words"),
    [(7, "auto", True, "closed: files by Landlock 7"),
     (0, "auto", True, "open: files of this user (no Landlock"),
     (0, "require", False, "no Landlock"), (7, "off", True, "switched off by TUNA_SANDBOX")],
)  # fmt: skip
def test_the_doctor_says_what_of_the_box_is_open(
    version: int,
    mode: Literal["auto", "require", "off"],
    ok: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(landlock, "version", lambda: version)
    found = next(doctor.of_sandbox(Settings(sandbox=mode)))
    assert (found.ok, words in found.text) == (ok, True)
    assert bool(found.hint) == (version == 0 or mode == "off")


def test_a_worker_that_requires_a_box_does_not_start_without(
    tuna_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 0)
    monkeypatch.setattr(CeleryWorker, "_set_up_logs", lambda _: None)
    for hook in ("check_messages", "after_own_handlers"):  # they stay in a process
        monkeypatch.setattr(celery_internals, hook, lambda *_: None)
    worker = CeleryWorker(Celery(), Settings(sandbox="require"))
    try:
        with pytest.raises(SystemExit) as ended:
            worker._start_services(None)
    finally:
        logging.captureWarnings(False)
    assert ended.value.code == ServiceError.exit_code
    assert "Foreign code would not be boxed here" in capsys.readouterr().err


def test_a_box_that_is_switched_off_is_open(
    acts: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_setting(monkeypatch, "TUNA_SANDBOX", "off")
    assert perform(acts, {"read": place.secret, "tcp6": 0}, place) == {
        "read": "DONE",
        "tcp6": "DONE",
    }


def test_folders_that_the_settings_name_are_let_in(
    acts: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, folder in (("READ", "compiler"), ("WRITE", "cache")):
        (place.room.parent / folder).mkdir()
        monkeypatch.setenv(f"TUNA_SANDBOX_{name}", str(place.room.parent / folder))
    get_settings.cache_clear()
    (place.room.parent / "compiler" / "file").touch()
    wanted = {
        "read": place.room.parent / "compiler" / "file",
        "write": place.room.parent / "cache" / "file",
    }
    assert perform(acts, wanted, place) == {"read": "DONE", "write": "DONE"}
    assert perform(acts, {"write": place.room.parent / "compiler" / "file"}, place) == {
        "write": "Permission denied"
    }


@pytest.mark.parametrize("kind", ["link", "pipe", "socket", "folder", "large"])
def test_what_a_child_wrote_is_read_as_a_plain_file_or_not_at_all(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "answer"
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)  # an address is short
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(bytes(11))
    with pytest.raises(NotPlain, match=r"answer is (not a plain file|longer than 10 bytes)"):
        read_plain(path, 10)


def test_system_calls_have_the_numbers_of_the_kernels_headers() -> None:
    headers = (
        Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        Path("/usr/include/asm-generic/unistd.h"),
    )
    found = 0
    for column, header in enumerate(headers):
        if not header.exists():
            continue
        words = (
            line.split()
            for line in header.read_text().splitlines()
            if line.startswith("#define __NR")
        )
        numbers = {
            w[1].removeprefix("__NR3264_").removeprefix("__NR_"): w[2] for w in words if len(w) == 3
        }
        for name, ours in seccomp.CALLS.items():
            if numbers.get(name, "").isdigit():
                assert int(numbers[name]) == ours[column], name
                found += 1
    need(found > 100, "the kernel's headers (apt-get install linux-libc-dev)")


def test_what_is_measured_in_the_box_is_as_fast_as_outside(place: Place) -> None:
    """Without SECCOMP_FILTER_FLAG_SPEC_ALLOW older kernels make loads wait for stores in a process
    with a filter."""
    words = ["grep", "-i", "^spec", "/proc/self/status"]
    boxed, plain = (run(words, timeout_s=LIMIT_S, box=box).output for box in (place.box, None))
    assert boxed == plain != ""


@pytest.mark.drill(only=True)
def test_the_box_takes_at_most_10_ms_for_each_program(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """By CPU time, which other work on the machine does not lengthen; a child that answers many
    calls pays it once."""
    # in turn: the machine may be busy
    pairs = [(_cpu_ms(place.box), _cpu_ms(None)) for _ in range(40)]
    boxed, plain = map(statistics.median, zip(*pairs, strict=True))
    with capsys.disabled():
        print(f"\nstart of a program: {plain:.1f} ms of CPU time, boxed {boxed:.1f} ms")
    assert boxed - plain <= 10.0


def _cpu_ms(box: Box | None) -> float:
    def used_s() -> float:
        both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in both)

    before_s = used_s()
    assert run(["true"], timeout_s=LIMIT_S, box=box).returncode == 0
    return 1e3 * (used_s() - before_s)
