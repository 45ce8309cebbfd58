"""A small cluster of real processes for fault injection: MariaDB, Redis with append-only file, two
workers, a coordinator.

Everything listens on a loopback address of this process, writes below one directory, and is killed
with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import redis
import stepped_clock
from fault_library import BROKEN, DEAD, FAILS, LOG, SLOW
from fork_server import PROGRAM_MODULES, ForkServer, fork_server, forking
from private_servers import install_mariadb, killed_with_parent, listens, wait_until
from search_library import HOLD
from shared_data import needed_program

from tuna.db import access_tokens, joined_workers
from tuna.db.engine import make_engine, reading, writing
from tuna.db.types import utc_now
from tuna.errors import DatabaseError, ServiceError
from tuna.services.embedded_redis import program
from tuna.workers.launch import WorkerSpec, worker_command
from tuna_remote.gateway import joined, tokens

LEASE_S = 2.0
_START_S = 120.0
_STORE_BYTES = 64 << 20
_WORKERS = ("compile", "eval")
_TOKENS = 20
_GATEWAY_PORT = 7117
OTHER_EVAL = "eval2"  #: a second device of the environment
BROKEN_COMPILE = "compile2"  #: a second compile worker of this machine, with a broken toolchain
_ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = (
    "[tuna.libraries]\nfaults = fault_library:FaultLibrary\nsearches ="
    " search_library:SearchLibrary\n"
)


#: With PARENT and the words after `python`: does what they say, with the clock of its process, and
#: is killed when PARENT dies.
_FORKED = """
import runpy, sys
from tuna.sandbox import child
child.limit_self({"parent": int(sys.argv.pop(1))})
import stepped_clock
stepped_clock.install()
option, what = sys.argv[1:3]
del sys.argv[1:3]
if option == "-c":
    exec(what)
else:
    runpy.run_module(what, run_name="__main__", alter_sys=True)
"""


class ClusterError(AssertionError):
    """A process of the cluster ended unexpectedly, or children outlived their parent."""


class Cluster:
    """Starts, breaks, repairs and stops its processes; a context manager that leaves only logs."""

    def __init__(
        self,
        folder: Path,
        joined: Sequence[str] = (),
        *,
        in_redis: bool = False,
        stays: bool = False,
        forked: bool = False,
    ) -> None:
        """`joined`: those of the workers that know a token and nothing else of the cluster, with a
        gateway for them; `in_redis`: artifacts are there; `stays`: the coordinator goes on without
        jobs; `forked`: programs of Python are forks, which start within milliseconds."""
        needed_program("mariadb-install-db")
        self.folder, self.log = folder, folder / "ran"  #: the library's log
        self._address = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        self._servers: dict[str, list[str]] = {}
        self._running: dict[str, psutil.Popen] = {}
        self._started_at: dict[str, float] = {}
        self._due: set[str] = set()  # to be started once Redis and MariaDB are reachable
        self._artifacts = folder / "artifacts"
        self._snapshot = folder / "redis" / "dump.rdb"
        self._forked = forked
        self._forks: ForkServer | None = None
        self._forking = contextlib.ExitStack()
        self._joined = joined
        self._served = ["--all", "--stay"] if stays else ["--session-id", "1"]
        self._tokens: dict[str, list[str]] = {}
        self._homes = {name: folder / f"home-{name}" for name in _WORKERS}
        self.db_url = f"mysql+pymysql://root@{self._address}:3306/tuna"
        self.env = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("TUNA_", "CELERY_"))
            },
            "PYTHONPATH": os.pathsep.join(
                [str(folder / "plugin"), str(Path(__file__).parent), str(_ROOT)]
            ),
            "TMPDIR": str(folder / "tmp"),  # holds the device locks, private to this cluster
            "TUNA_HOME": str(folder / "home"),
            "TUNA_CONFIG": str(folder / "tuna.toml"),
            "TUNA_DB_URL": self.db_url,
            "TUNA_BROKER_URL": f"redis://{self._address}:6379/0",
            **({} if in_redis else {"TUNA_ARTIFACTS_URL": self._artifacts.as_uri()}),
            "TUNA_LEASE_S": str(LEASE_S),
            LOG: str(self.log),
            DEAD: str(folder / "dead"),
            FAILS: str(folder / "fails"),
            SLOW: str(folder / "slow"),
            HOLD: str(folder / "hold"),
        }

    def __enter__(self) -> Cluster:
        for name in (
            "plugin/faults-1.dist-info",
            "tmp",
            "tmp-other",
            "home",
            "artifacts",
            "logs",
            "redis",
            "hold",
        ):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for home in self._homes.values():
            home.mkdir(exist_ok=True)
        about = self.folder / "plugin" / "faults-1.dist-info"
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1\n")
        (about / "entry_points.txt").write_text(_LIBRARIES)
        (self.folder / "plugin" / "sitecustomize.py").write_text(stepped_clock.SITE)
        self.log.touch()
        (self.folder / "tuna.toml").touch()
        try:
            _mount(self._artifacts, *self._homes.values())
            known = self.folder / "home" / "cache" / "machine"
            if known.is_symlink():  # what any test's children found out
                for home in self._homes.values():
                    (home / "cache").mkdir()
                    (home / "cache" / "machine").symlink_to(known.readlink())
            if self._forked:  # of a server that sees the mounts
                self._forks = self._forking.enter_context(fork_server(PROGRAM_MODULES))
            self._servers["redis"] = [
                program(), "--bind", self._address, "--port", "6379", "--dir",
                str(self.folder / "redis"),
                "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
                "--protected-mode", "no",
            ]  # fmt: skip
            self._servers["mariadb"] = install_mariadb(
                self.folder / "mariadb",
                f"--bind-address={self._address}",
                "--skip-name-resolve",
                "--innodb-buffer-pool-size=64M",
            )
            self.start("redis")
            self.start("mariadb")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            for one in [*_children(process), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait(_START_S)
        self._forking.close()
        for folder in (self._artifacts, *self._homes.values()):
            if folder.is_mount():
                _libc().umount2(os.fsencode(folder), 2)  # MNT_DETACH
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("mariadb", "redis", "tmp", "tmp-other"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def start(self, name: str) -> None:
        """Start redis, mariadb, compile, eval or coordinator; the last three wait for the first
        two."""
        if name in self._servers:
            self._spawn(name, self._servers[name])
            wait_until(lambda: self._answers(name), _START_S, f"start of {name}")
        else:
            self._due.add(name)
        if self.is_alive("redis") and self.is_alive("mariadb"):
            for one in sorted(self._due):
                self._spawn(one, self._program(one))
            self._due.clear()

    def kill(self, name: str) -> None:
        """SIGKILL to the process itself; its children must then exit without help.

        A remote worker's supervisor is killed with it, which would otherwise take its time for
        a warm shutdown.
        """
        process = self._running[name]
        children = _children(process)
        with contextlib.suppress(psutil.NoSuchProcess):  # it may be waiting for its restart
            workers = process.children() if name in self._joined else []
            for one in (process, *workers):
                one.kill()
        process.wait(_START_S)
        _, alive = psutil.wait_procs(children, timeout=60)
        if alive:
            raise ClusterError(f"{alive} outlived the {name} process")

    def terminate(self, name: str) -> int:
        """SIGTERM to the process itself; returns its exit code."""
        self._running[name].terminate()
        return self._running[name].wait(_START_S)

    def kill_child(self, name: str) -> bool:
        """SIGKILL to a pool process that has begun an item; False if there is none yet."""
        begun = {json.loads(line)["pid"] for line in self.log.read_text().splitlines()}
        victims = [child for child in _children(self._running[name]) if child.pid in begun]
        for child in victims[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return bool(victims)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process and its children."""
        process = self._running[name]
        for one in [process, *_children(process)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def wipe_redis(self) -> None:
        """Delete Redis' files; it must not be running."""
        shutil.rmtree(self.folder / "redis")
        (self.folder / "redis").mkdir()

    def flush_redis(self) -> bool:
        """FLUSHALL; False if Redis is unreachable."""
        try:
            return bool(self.client().flushall())
        except redis.ConnectionError:
            return False

    def refuse_writes(self, error: str) -> None:
        """Let Redis refuse writes with an error of `nemesis.REFUSALS`, in the way in which it
        happens in earnest."""
        client = self.client()
        if error == "READONLY":
            client.replicaof(self._address, "1")  # of a primary that is away
        elif error == "NOREPLICAS":
            client.config_set("min-replicas-to-write", "1")
        elif error == "MISCONF":
            self._snapshot.mkdir()
            (self._snapshot / "in the way").touch()
            client.config_set("save", "3600 1")
            self._save(client, "err")
        else:
            client.config_set("maxmemory", "1")
        with contextlib.suppress(redis.RedisError):
            client.set("refuse_writes", error)
            raise ClusterError(f"Redis accepts writes and should say {error}")

    def accept_writes(self, error: str) -> None:
        """Undo `refuse_writes`."""
        client = self.client()
        if error == "READONLY":
            client.replicaof("NO", "ONE")
        elif error == "NOREPLICAS":
            client.config_set("min-replicas-to-write", "0")
        elif error == "MISCONF":
            shutil.rmtree(self._snapshot)
            self._save(client, "ok")
            client.config_set("save", "")
        else:
            client.config_set("maxmemory", "0")

    def _save(self, client: redis.Redis, status: str) -> None:
        """Try to save a snapshot, which ends with `status`."""
        client.bgsave()
        wait_until(
            lambda: client.info("persistence")["rdb_last_bgsave_status"] == status,
            _START_S,
            f"BGSAVE: {status}",
        )

    def fill_artifacts(self) -> bool:
        """Fill the artifact store's file system; False if it has none of its own."""
        return _fill(self._artifacts)

    def empty_artifacts(self) -> None:
        """Undo `fill_artifacts`."""
        _empty(self._artifacts)

    def fill_home(self, name: str) -> bool:
        """Fill the file system of a worker's TUNA_HOME; False if it has none of its own."""
        return _fill(self._homes[name])

    def empty_home(self, name: str) -> None:
        """Undo `fill_home`."""
        _empty(self._homes[name])

    def kill_device(self, *, answers: bool = False) -> None:
        """From now on the device of the eval worker fails; it may answer its probe all the same."""
        Path(self.env[FAILS if answers else DEAD]).touch()

    def mend_device(self) -> None:
        """Undo `kill_device`."""
        Path(self.env[DEAD]).unlink(missing_ok=True)
        Path(self.env[FAILS]).unlink(missing_ok=True)

    def set_pace(self, *, slow: bool) -> None:
        """Let items take long, or not."""
        if slow:
            Path(self.env[SLOW]).touch()
        else:
            Path(self.env[SLOW]).unlink(missing_ok=True)

    def step_clock(self, name: str, seconds: float) -> None:
        """Shift the wall clock of a worker."""
        self._clock(name).write_text(str(seconds))

    def revoke(self, name: str) -> bool:
        """Revoke the remote worker that is now the worker `name`, and kill what is left of it;
        False if it has not joined yet."""
        since = utc_now() - timedelta(seconds=self.age_s(name))
        try:
            with reading(make_engine(self.db_url)) as connection:
                mine = [
                    one
                    for one in joined_workers.remote_workers(connection)
                    if one.role == name and one.has_access and one.joined_at >= since
                ]
        except DatabaseError:  # the server is away
            return False
        if not mine:
            return False
        words = [sys.executable, "-m", "tuna", "workers", "revoke", mine[0].name]
        revoked = subprocess.run(
            words, env=self.env, cwd=self.folder, capture_output=True, text=True
        )
        # a server may be away, too
        if revoked.returncode not in (0, ServiceError.exit_code, DatabaseError.exit_code):
            raise ClusterError(f"revoke ended with {revoked.returncode}: {revoked.stderr}")
        self.kill(name)
        return True

    def rotate_key(self) -> None:
        """Begin `tuna key rotate`, as the process `rotation`."""
        self._spawn("rotation", [sys.executable, "-m", "tuna", "key", "rotate"])

    def owner(self, pid: int) -> str:
        """Return the program that the process belongs to."""
        parents = {pid, *(one.pid for one in psutil.Process(pid).parents())}
        return next(name for name, one in self._running.items() if one.pid in parents)

    def is_alive(self, name: str) -> bool:
        """True if it runs (or is stopped by SIGSTOP)."""
        return name in self._running and self._running[name].poll() is None

    def exit_code(self, name: str) -> int | None:
        """Its exit code; None if it runs or waits for its start."""
        return None if name in self._due else self._running[name].poll()

    def age_s(self, name: str) -> float:
        """Seconds since its last start."""
        return time.monotonic() - self._started_at[name]

    def log_tail(self, name: str) -> str:
        """The end of its log."""
        log = self.folder / "logs" / f"{name}.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    def _spawn(self, name: str, command: list[str]) -> None:
        self._started_at[name] = time.monotonic()
        home = {"TUNA_HOME": str(self._homes[name])} if name in self._homes else {}
        locks = {"TMPDIR": str(self.folder / "tmp-other")} if name == OTHER_EVAL else {}
        env = {**self.env, **home, **locks, stepped_clock.CLOCK: str(self._clock(name))}
        env |= {BROKEN: "1"} if name == BROKEN_COMPILE else {}
        if name in self._joined:
            for variable in (
                "TUNA_DB_URL",
                "TUNA_BROKER_URL",
                "TUNA_ARTIFACTS_URL",
                "TUNA_LEASE_S",
            ):
                del env[variable]
            env["TUNA_JOIN"] = self._token(name)
        if self._forks and command[0] == sys.executable:
            command = [sys.executable, "-c", _FORKED, str(os.getpid()), *command[1:]]
        else:
            command = killed_with_parent(command)
        with open(self.folder / "logs" / f"{name}.log", "ab") as log, forking(self._forks):
            self._running[name] = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=env
            )

    def _program(self, name: str) -> list[str]:
        if name == "coordinator":
            return [sys.executable, "-m", "tuna", "enqueue", *self._served]
        if name == "gateway":
            where = ("--listen", self._address, "--port", str(_GATEWAY_PORT))
            return [sys.executable, "-m", "tuna", "gateway", *where]
        if name in self._joined:
            return [sys.executable, "-m", "tuna", "worker", name]
        # as `tuna worker` does
        return worker_command(WorkerSpec(name.removesuffix("2"), name=name))

    def _token(self, role: str) -> str:
        """The next token for a worker; all are made before the first fault, for they need
        MariaDB."""
        if role not in self._tokens:
            engine = make_engine(self.db_url)
            with reading(engine) as connection:
                pin = tokens.pin_of_secret(joined.tls_secret(connection))
            gateway = tokens.Gateway(f"https://{self._address}:{_GATEWAY_PORT}", pin)
            made = [tokens.JoinToken.new(gateway) for _ in range(_TOKENS)]
            with writing(engine) as connection:
                for one in made:
                    access_tokens.add(connection, one.id, one.secret, role, 3600)
            self._tokens[role] = [one.line() for one in made]
            engine.dispose()
        return self._tokens[role].pop()

    def client(self) -> redis.Redis:
        """Of its Redis."""
        return redis.Redis(self._address, socket_timeout=5)

    def _answers(self, name: str) -> bool:
        if not self.is_alive(name):
            raise ClusterError(f"{name} ended by itself:\n{self.log_tail(name)}")
        if name == "mariadb":
            return listens((self._address, 3306))
        with contextlib.suppress(redis.ConnectionError):  # including BusyLoadingError
            return bool(self.client().ping())
        return False

    def _clock(self, name: str) -> Path:
        return self.folder / "tmp" / f"clock-{name}"


def _fill(folder: Path) -> bool:
    if not folder.is_mount():
        return False
    with open(folder / "ballast", "wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(_NoSpace):
                while True:
                    _write(ballast.fileno(), bytes(size))
    return True


def _empty(folder: Path) -> None:
    (folder / "ballast").unlink(missing_ok=True)


class _NoSpace(OSError):
    """The file system is full."""


def _write(fd: int, data: bytes) -> None:
    try:
        if os.write(fd, data) < len(data):
            raise _NoSpace
    except OSError as error:
        raise _NoSpace if error.errno == errno.ENOSPC else error from error


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount(*places: Path) -> None:
    """Mount a small tmpfs at each place, if permitted, in a private mount namespace, so that it
    vanishes with the process."""
    new_namespace, private = 0x20000, 0x44000  # CLONE_NEWNS; MS_REC | MS_PRIVATE
    libc = _libc()
    if libc.unshare(new_namespace) == 0 and libc.mount(b"none", b"/", None, private, None) == 0:
        for place in places:
            libc.mount(
                b"none", os.fsencode(place), b"tmpfs", 0, f"size={_STORE_BYTES},mode=700".encode()
            )
