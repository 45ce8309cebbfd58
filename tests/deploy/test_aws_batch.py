"""docker/aws-batch/: AWS' model of the service accepts the definitions, and an array that `submit`
starts works off a session, each of its tasks as a worker of its own, without a word of its tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
import sqlalchemy as sa
from deploy_files import DOCKER, PAGE
from gateway_site import open_site
from jobs_builder import states
from private_servers import wait_until
from queries import execute

from tuna.db import joined_workers
from tuna.db.engine import reading
from tuna.db.models import Job

FOLDER = DOCKER / "aws-batch"
OPERATIONS = {
    "compute-environment.json": "CreateComputeEnvironment",
    "job-queue.json": "CreateJobQueue",
    "job-definition.json": "RegisterJobDefinition",
}


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return document


def test_the_service_knows_all_that_the_definitions_say() -> None:
    """By the model that AWS' clients check requests with."""
    session = pytest.importorskip("botocore.session", reason="needs botocore")
    validate = pytest.importorskip("botocore.validate").ParamValidator().validate
    model = session.get_session().get_service_model("batch")
    assert {path.name for path in FOLDER.glob("*.json")} == set(OPERATIONS)
    for name, operation in OPERATIONS.items():
        report = validate(read(name), model.operation_model(operation).input_shape)
        assert not report.has_errors(), (name, report.generate_report())
    broken = read("job-definition.json") | {"command": []}
    shape = model.operation_model("RegisterJobDefinition").input_shape
    assert validate(broken, shape).has_errors(), "the model is looked at"


def test_a_container_is_locked_down_and_its_token_is_a_secret() -> None:
    container = read("job-definition.json")["containerProperties"]
    assert (container["user"], container["privileged"]) == ("10001", False)
    assert container["readonlyRootFilesystem"] is True
    assert container["secrets"] == [{"name": "TUNA_JOIN", "valueFrom": "SECRET_ARN"}]
    assert float({e["name"]: e["value"] for e in container["environment"]}["TUNA_SHUTDOWN_S"]) <= 5
    assert {path.name for path in FOLDER.iterdir()} == {*OPERATIONS, "submit"}
    assert "docker/aws-batch/submit" in PAGE.read_text()


@pytest.mark.parametrize(
    "words",
    [
        (), ("build",), ("eval", "--workers"), ("eval", "--workers", "0"),
        ("eval", "--workers", "257"), ("eval", "--token", "x"), ("eval", "--hours", "soon"),
    ],
)  # fmt: skip
def test_what_cannot_be_submitted_is_refused_before_anything_is_asked(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    done = subprocess.run(
        [FOLDER / "submit", *words], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"submit: ")


class Cloud:
    """moto's AWS, which starts nothing: its jobs' tasks are processes of this test."""

    def __init__(self, url: str, folder: Path) -> None:
        self._client = pytest.importorskip("boto3", reason="needs boto3").client
        self._folder = folder
        self.variables = {
            "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "eu-central-1", "AWS_PAGER": "",
            "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        }  # fmt: skip
        self.printed = ""
        self.lines: list[str] = []  #: of all tokens
        self._seen: set[str] = set()  #: command lines of this machine

    def call(self, service: str, operation: str, **wanted: Any) -> Any:
        return getattr(self._client(service), operation)(**wanted)

    def prepare(self) -> None:
        """Make the environment and the queue as the files say, with what is here for what an
        account has."""
        role = {"RoleName": "tuna", "AssumeRolePolicyDocument": "{}"}
        service = self.call("iam", "create_role", **role)["Role"]["Arn"]
        profile = self.call("iam", "create_instance_profile", InstanceProfileName="tuna")
        environment = read("compute-environment.json") | {"serviceRole": service}
        environment["computeResources"] |= {
            "subnets": [self.call("ec2", "describe_subnets")["Subnets"][0]["SubnetId"]],
            "securityGroupIds": [
                self.call("ec2", "describe_security_groups")["SecurityGroups"][0]["GroupId"]
            ],
            "instanceRole": profile["InstanceProfile"]["Arn"],
        }
        self.call("batch", "create_compute_environment", **environment)
        self.call("batch", "create_job_queue", **read("job-queue.json"))

    def submit(self, role: str, workers: int, url: str) -> tuple[list[str], list[dict[str, str]]]:
        """The command of the array that `submit` starts, and the variables of each of its tasks,
        secret included."""
        words = [role, "--workers", str(workers), "--url", url]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        process = subprocess.Popen(
            [FOLDER / "submit", *words], env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        while process.poll() is None:
            self.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
        self.printed += (said := process.communicate()[0])
        assert process.returncode == 0, said
        job_id = said.split()[1].rstrip(":")
        (job,) = self.call("batch", "describe_jobs", jobs=[job_id])["jobs"]
        assert job["arrayProperties"]["size"] == workers
        (definition,) = self.call(
            "batch", "describe_job_definitions", jobDefinitions=[job["jobDefinition"]]
        )["jobDefinitions"]
        self.printed += json.dumps([job, definition], default=str)
        container = definition["containerProperties"]
        assert container["command"] == read("job-definition.json")["containerProperties"]["command"]
        command = [
            job["parameters"].get(word.removeprefix("Ref::"), word) for word in container["command"]
        ]
        assert command == ["worker", role, "-c", "1", "--once"]
        (secret,) = container["secrets"]
        value = self.call("secretsmanager", "get_secret_value", SecretId=secret["valueFrom"])
        self.lines += value["SecretString"].split()
        return command, [
            {
                **{one["name"]: one["value"] for one in container["environment"]},
                secret["name"]: value["SecretString"],
                "AWS_BATCH_JOB_ID": f"{job_id}:{index}",
                "AWS_BATCH_JOB_ARRAY_INDEX": str(index),
            }
            for index in range(workers)
        ]

    def look(self) -> None:
        """Take down what `ps` shows now."""
        for process in psutil.process_iter(["cmdline"]):
            self._seen.add(" ".join(process.info["cmdline"] or ()))

    def shows_a_token(self, *texts: str) -> bool:
        secrets = [line.rpartition(".")[2] for line in self.lines]
        assert secrets
        assert all(len(secret) >= 32 for secret in secrets)
        shown = "\n".join([*self._seen, self.printed, *texts])
        return any(secret in shown for secret in secrets)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    server = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer
    if shutil.which("aws") is None:
        pytest.skip("needs the AWS CLI")
    there = server("127.0.0.1", 0)
    there.start()
    host, port = there.get_host_and_port()
    made = Cloud(f"http://{host}:{port}", tmp_path)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    httpx.post(f"http://{host}:{port}/moto-api/config", json={"batch": {"use_docker": False}})
    made.prepare()
    yield made
    there.stop()


class Array:
    """The tasks of an array job as processes, each with a home of its own."""

    def __init__(
        self,
        command: list[str],
        tasks: list[dict[str, str]],
        folder: Path,
        share: Callable[[Path], None],
    ) -> None:
        entry = re.search(r"^ENTRYPOINT (.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
        assert entry is not None
        assert json.loads(entry[1]) == ["tini", "--", "tuna"]
        self.log = folder / f"log-{os.urandom(4).hex()}"
        self.processes = []
        for task in tasks:
            home = folder / f"home-{os.urandom(4).hex()}"
            share(home)
            kept = {
                name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ
            }
            env = {**kept, **task, "TUNA_HOME": str(home), "TUNA_SIMULATED": "1"}
            words = [sys.executable, "-m", "tuna", *command]
            with open(self.log, "ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        words, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
                    )
                )

    def end(self) -> float:
        """Interrupt all as a host of the spot market that is taken away; the seconds until they
        have ended."""
        began_at = time.monotonic()
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        assert self.wait(60) == [0] * len(self.processes), self.log.read_text()
        return time.monotonic() - began_at

    def wait(self, seconds: float) -> list[int]:
        return [process.wait(seconds) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.drill(only=True)
@pytest.mark.timeout(900)
def test_an_array_joins_drains_and_does_all_the_work(
    cloud: Cloud,
    home: Path,
    redis_client: redis.Redis,
    redis_urls: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    knows_machine: Callable[[Path], None],
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Four compile workers are interrupted within chunks that would take minutes; four others and
    as many eval workers do it all."""
    left = {"Name": "tuna-join-1700000000-00", "SecretString": "x"}
    cloud.call("secretsmanager", "create_secret", **left)
    cloud.call(
        "batch", "register_job_definition",
        **read("job-definition.json") | {"jobDefinitionName": left["Name"]},
    )  # fmt: skip

    def start(command: list[str], tasks: list[dict[str, str]]) -> Array:
        made = Array(command, tasks, tmp_path, knows_machine)
        request.addfinalizer(made.kill)
        return made

    def names() -> list[str]:
        with reading(site.engine) as connection:
            return [one.name for one in joined_workers.remote_workers(connection)]

    def indices(role: str) -> list[str]:
        start = re.escape(f"{role}-{socket.gethostname()}")
        return sorted(
            found[1]
            for name in names()
            if (found := re.match(rf"{start}-(\d)-[0-9a-f]{{8}}$", name))
        )

    def turned(condition: Callable[[], object]) -> Callable[[], bool]:
        def look() -> bool:
            site.turn()
            cloud.look()
            return bool(condition())

        return look

    with open_site(home, redis_client, redis_urls, monkeypatch, layers=4) as site:
        execute(site.engine, sa.update(Job).values(options={"sleep_s": 60.0}))
        first = start(*cloud.submit("compile", 4, site.url))
        assert len(cloud.call("secretsmanager", "list_secrets")["SecretList"]) == 1
        wait_until(turned(lambda: states(site.engine).get("compiling", 0) == 40), 120, "the work")
        assert indices("compile") == ["0", "1", "2", "3"]
        ended_s = first.end()
        assert ended_s <= 10.0
        wait_until(turned(lambda: "compiling" not in states(site.engine)), 60, "the return")
        assert site.failures() == []
        execute(site.engine, sa.update(Job).values(options={}))
        arrays = [cloud.submit(role, 4, site.url) for role in ("compile", "eval")]
        compilers, evaluators = (start(*one) for one in arrays)
        wait_until(turned(site.is_done), 300, "all work")
        assert compilers.wait(60) == [0] * 4
        assert evaluators.wait(60) == [0] * 4
        assert site.each_once()
        assert site.failures() == []
        assert len(names()) == 12
        assert (indices("compile"), indices("eval")) == (sorted("01230123"), list("0123"))
    logs = [one.log.read_text() for one in (first, compilers, evaluators)]
    assert not cloud.shows_a_token(*logs, *capfd.readouterr())
    print(f"drained within {ended_s:.1f} s")
