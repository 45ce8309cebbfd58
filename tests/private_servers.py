"""Private servers for tests and benchmarks: MariaDB, Redis, RabbitMQ.

Each has a private data directory and ends with the `with` block. MariaDB and Redis also end if the
process that started them is killed; Erlang does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tuna.errors import ServiceError
from tuna.services.embedded_redis import program

#: The path of a Unix socket, or host and port.
Address = str | tuple[str, int]
_START_S = 60.0


def find(name: str) -> str | None:
    """Path of a server's executable. Debian installs some outside of PATH, and its RabbitMQ in PATH
    is a wrapper that requires the user rabbitmq."""
    return shutil.which(name, path=f"/usr/lib/rabbitmq/bin:{os.environ['PATH']}:/usr/sbin")


def free_port() -> int:
    """An unused port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(address: Address) -> bool:
    """True if a server accepts connections at `address`."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as probe:
        return probe.connect_ex(address) == 0


def wait_until(
    condition: Callable[[], object], seconds: float, what: str = "the condition"
) -> None:
    """Poll until the condition holds; raises TimeoutError with `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)


def killed_with_parent(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that it runs in its own session and is killed when this process dies
    (PDEATHSIG)."""
    code = (
        "import sys\nfrom tuna.sandbox import child\n"
        "child.limit_self({'parent': int(sys.argv[1])})\nchild.execute(sys.argv[2:])"
    )
    return [sys.executable, "-I", "-c", code, str(os.getpid()), *command]


@contextlib.contextmanager
def running(
    command: Sequence[str],
    address: Address,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[int]:
    """A running server: yields its process id once it listens, and kills it and its children
    afterwards. Raises ServiceError with the end of its log if it does not start."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            killed_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=cwd,
            # a process group from the start, so that it can be killed with its children
            start_new_session=True,
        )

    def started() -> bool:
        if process.poll() is not None:
            raise ServiceError(
                f"{command[0]} did not start: {log.read_text(errors='replace')[-2000:]}"
            )
        return listens(address)

    try:
        wait_until(started, _START_S, f"start of {command[0]}")
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def install_mariadb(folder: Path, *options: str, defaults: Path | None = None) -> list[str]:
    """Create a MariaDB data directory in a new `folder`; returns the command that runs it, on the
    socket `s` in `folder`.

    `defaults`: its option file. It has an empty database `tuna`, and root without a password.
    Raises ServiceError.
    """
    server, install = find("mariadbd"), find("mariadb-install-db")
    if not (server and install):
        raise ServiceError("MariaDB is not installed.", hint="apt-get install mariadb-server")
    folder.mkdir(mode=0o700)
    (folder / "init.sql").write_text("CREATE DATABASE IF NOT EXISTS tuna;\n")
    common = [f"--datadir={folder / 'data'}", *(["--user=root"] if os.getuid() == 0 else [])]
    words = ["--no-defaults", "--auth-root-authentication-method=normal", *common]
    subprocess.run([install, *words], check=True, capture_output=True)
    return [
        server,
        f"--defaults-file={defaults}" if defaults else "--no-defaults",
        *common,
        f"--socket={folder / 's'}",
        # a starting server removes temporary tables of other servers from a shared tmpdir
        f"--tmpdir={folder}",
        f"--init-file={folder / 'init.sql'}",
        *options,
    ]


@contextlib.contextmanager
def mariadb_server(*options: str, defaults: Path | None = None) -> Iterator[str]:
    """The URL of an empty database on a MariaDB without networking; see `install_mariadb`.

    Without TLS on the Unix socket, for which PyMySQL would load the system's certificates at each
    connection (40 ms).
    """
    with _folder() as name:
        folder = name / "m"
        command = install_mariadb(folder, "--skip-networking", *options, defaults=defaults)
        with running(command, str(folder / "s"), folder / "log"):
            yield f"mysql+pymysql://root@localhost/tuna?unix_socket={folder / 's'}&ssl_disabled=1"


@contextlib.contextmanager
def redis_server(
    *options: str, host: str = "", port: int = 0, executable: str = ""
) -> Iterator[str]:
    """The URL of an empty Redis: on a Unix socket, or at `host` and `port` (0: a free one).
    `executable`: another server."""
    address: Address
    with _folder() as folder:
        if host:
            port = port or free_port()
            address, url, place = (
                (host, port),
                f"redis://{host}:{port}/0",
                ["--bind", host, "--port", str(port)],
            )
        else:
            address = str(folder / "s")
            url, place = f"unix://{address}", ["--port", "0", "--unixsocket", address]
        with running(
            [executable or program(), *options, "--save", "", "--dir", str(folder), *place],
            address,
            folder / "log",
        ):
            yield url


def with_password(url: str, password: str, user: str = "") -> str:
    """The URL with a user and a password, which are inserted without quoting."""
    return url.replace("://", f"://{user}:{password}@")


@contextlib.contextmanager
def rabbitmq_server(host: str, port: int, vhost: str, user: str, password: str) -> Iterator[None]:
    """A RabbitMQ with one virtual host and one user."""
    with _folder() as folder:
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = {host}:{port}\ndefault_vhost = {vhost}\ndefault_user = {user}\n"
            f"default_pass = {password}\nloopback_users = none\n"
        )
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"tuna{os.getpid()}@localhost",
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_DIST_PORT": str(25000 + os.getpid() % 1000),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # one scheduler: it starts with a quarter less CPU time
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1",
        }
        with running(
            [find("rabbitmq-server") or "rabbitmq-server"], (host, port), folder / "log", env
        ):
            yield


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A private directory with a path short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(
        prefix="tuna-server-", dir="/tmp", ignore_cleanup_errors=True
    ) as name:
        yield Path(name)


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """An S3 server (moto, in the place of AWS) with the bucket `tuna`, to which `s3://` leads in
    this process and its children; yields its process id."""
    import fsspec

    port = free_port()
    own = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    own |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    before = {name: os.environ.get(name) for name in own}
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    os.environ.update(own)
    try:
        with _folder() as folder, running(command, ("127.0.0.1", port), folder / "log") as server:
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("tuna")
            yield server
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
