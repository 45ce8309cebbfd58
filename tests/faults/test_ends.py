"""Commands that are killed, or asked to end, at any moment lose nothing and measure nothing twice;
what was asked leaves no job in between."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fault_library
import psutil
import pytest
import sqlalchemy as sa
from fork_server import ForkServer
from jobs_builder import accepted, make_jobs, states
from processes import Processes, below
from shared_data import DRILLS

from tuna.db.engine import make_engine
from tuna.settings import get_settings

Eventually = Callable[[Callable[[], object], float], None]
_LAYERS, _SOLVERS = 3, 10
_JOBS = _LAYERS * _SOLVERS
#: Seconds for anything on a busy machine
_SOON_S = 120.0
#: Signals that ask, in turn
_ASKS = (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


@dataclass
class Site:
    """A session's database, its commands, and what they ran."""

    folder: Path
    engine: sa.Engine
    processes: Processes
    eventually: Eventually

    def ran(self) -> Counter[str]:
        """How often each step of each job was begun."""
        lines = (self.folder / "ran").read_text().splitlines()
        return Counter(line.partition(', "attempt"')[0] for line in lines)

    def results(self) -> int:
        """The number of steps that were done."""
        with contextlib.suppress(sa.exc.DBAPIError):
            return len(accepted(self.engine))
        return 0


@pytest.fixture(params=["sqlite", "mariadb"])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of a database; empty: the embedded one. The server is no process of the home."""
    if request.param == "sqlite":
        return ""
    url = request.getfixturevalue("mariadb_engine").url
    return str(url.render_as_string(hide_password=False))


@pytest.fixture()
def site(
    database: str,
    tuna_home: Path,
    tuna_forks: ForkServer | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
) -> Iterator[Site]:
    plugin = tmp_path / "plugin" / "faults-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text(
        "[tuna.libraries]\nfaults = fault_library:FaultLibrary\n"
    )
    gemms = (f"./bin/MIOpenDriver gemm -m 8 -n 8 -k {size}\n" for size in range(1, 1 + _LAYERS))
    (tmp_path / "layers.txt").write_text("".join(gemms))
    (tmp_path / "slow").touch()
    (tmp_path / "ran").touch()
    variables = {
        "PYTHONPATH": os.pathsep.join([str(plugin.parent), str(Path(__file__).parent)]),
        "TUNA_LEASE_S": "10",
        fault_library.LOG: str(tmp_path / "ran"),
        fault_library.SLOW: str(tmp_path / "slow"),
        fault_library.DEAD: str(tmp_path / "dead"),
        fault_library.FAILS: str(tmp_path / "fails"),
    }
    if database:
        variables["TUNA_DB_URL"] = database
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    get_settings.cache_clear()
    processes = Processes(tuna_home, tuna_forks)
    yield Site(tmp_path, make_engine(get_settings().sql_url), processes, eventually)
    processes.kill_all()


_TUNE = ("tuna", "tune", "layers.txt", "-t", "t", "--library", "faults")
_RUN = ("tuna", "run", "--session-id", "1")
_ENQUEUE = ("tuna", "enqueue", "--session-id", "1")
_ROLES = {"compile": "compiling", "eval": "evaluating"}
_STEPS = {"compile": "build", "eval": "measure"}


def _worker(site: Site, role: str, *, by_hand: bool) -> psutil.Popen:
    if not by_hand:
        return site.processes.start("tuna", "worker", role)
    words = ("-A", "tuna.celery_app", "worker", "-c", "1", "-Q", role, "-n", f"{role}@here")
    return site.processes.start("celery", *words)


def _wait(site: Site, process: psutil.Popen, dice: random.Random) -> None:
    """Wait for a moment of a command's life: of its start, or by the results that there are."""
    if dice.random() < 0.2:
        return time.sleep(dice.uniform(0.0, 3.0))
    wanted = dice.randrange(2 * _JOBS - 4)
    site.eventually(lambda: site.results() >= wanted or not process.is_running(), _SOON_S)
    time.sleep(dice.uniform(0.0, 0.2))


def _act(site: Site, process: psutil.Popen, dice: random.Random, number: int) -> tuple[int, bool]:
    """Send a signal at a moment that the dice say, to the command alone or, as systemd does, to all
    that it started too; returns the exit code, and whether it handled signals by then."""
    _wait(site, process, dice)
    handled, started = _handles(process.pid), below(process)
    everybody = process.children(recursive=True) if dice.random() < 0.3 else []
    for one in (process, *everybody):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)
    code = process.wait(_SOON_S)
    assert not psutil.wait_procs(started, _SOON_S)[1]
    return code, handled


def _end_command(site: Site, command: str, dice: random.Random, number: int) -> bool:
    """End a command of its own workers, and start it again; returns whether it could end in
    order."""
    words = _TUNE if command == "tune" else _RUN
    code, handled = _act(site, site.processes.start(*words), dice, number)
    ordered = handled and number != signal.SIGKILL
    if ordered and code != 0:  # else it was through already
        assert code == 128 + number
        assert f"Ended by {signal.Signals(number).name}; what was" in _log(site).replace(
            "Interrupted", "Ended by SIGINT"
        )
        assert not states(site.engine).keys() & {*_ROLES.values(), "compile_queued", "eval_queued"}
    (site.folder / "slow").unlink()
    assert site.processes.start(*words).wait(_SOON_S) == 0, _log(site)
    return ordered


def _end_worker(site: Site, dice: random.Random, number: int) -> bool:
    """As `_end_command`, of one of two workers beside a coordinator."""
    coordinator, by_hand = site.processes.start(*_ENQUEUE), dice.random() < 0.5
    workers = {role: _worker(site, role, by_hand=by_hand) for role in _ROLES}
    role = dice.choice(list(_ROLES))
    code, handled = _act(site, workers[role], dice, number)
    ordered = handled and number != signal.SIGKILL
    if ordered:
        begun = any(f'"step": "{_STEPS[role]}"' in line for line in site.ran())
        assert code == 0 or (code == 128 + number and not begun), "it was still starting"
        site.eventually(lambda: _ROLES[role] not in states(site.engine), _SOON_S)
    (site.folder / "slow").unlink()
    workers[role] = _worker(site, role, by_hand=by_hand)
    assert coordinator.wait(_SOON_S) == 0, _log(site)
    for worker in workers.values():
        site.eventually(lambda worker=worker: _handles(worker.pid), _SOON_S)
        worker.terminate()
    ends = {worker.wait(_SOON_S) for worker in workers.values()}
    assert ends <= {0, 128 + signal.SIGTERM}, "the new one may still be starting"
    return ordered


def _log(site: Site) -> str:
    return (site.folder / "home" / "log").read_text()


def _handles(process: int) -> bool:
    """Whether a process has begun to handle SIGTERM, or has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/status").read_text()
        return bool(int(text.partition("SigCgt:\t")[2][:16], 16) >> signal.SIGTERM - 1 & 1)
    return True


_SEEDS = range(1, 2 if DRILLS == 1 else 21)


@pytest.mark.timeout(600)
@pytest.mark.both_databases_in_drills
@pytest.mark.parametrize(
    ("command", "seed", "asked"),
    [
        pytest.param(
            command,
            seed,
            asked,
            # `tune` runs what `run` does; workers end in tests/integration/test_worker_command.py
            marks=[]
            if (command, seed, asked) == ("tune", 1, True)
            else [pytest.mark.drill(only=True)],
        )
        for seed in _SEEDS
        for command in ("tune", "run", "worker")
        for asked in (True, False)
    ],
)
def test_a_command_that_is_ended_at_any_moment_loses_nothing(
    site: Site, command: str, seed: int, asked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(f"{command} {seed} {asked}")
    number = _ASKS[seed % len(_ASKS)] if asked else signal.SIGKILL
    if command != "tune":
        assert make_jobs(site.engine, _LAYERS, library=fault_library.FaultLibrary()) == 1
    if command == "worker":
        ordered = _end_worker(site, dice, number)
    else:
        ordered = _end_command(site, command, dice, number)
    assert states(site.engine) == {"evaluated": _JOBS}
    done, ran = accepted(site.engine), site.ran()
    assert (len(done), {count for *_, count in done}) == (2 * _JOBS, {1})
    again = sum(ran.values()) - len(ran)
    assert len(ran) == 2 * _JOBS
    assert not ordered or again == 0, "what was asked to end finishes what it has begun"
    with capsys.disabled():
        how = "in order" if ordered else "not in order"
        print(f"\n{command} {seed} {signal.Signals(number).name}: {how}, {again} steps begun again")
