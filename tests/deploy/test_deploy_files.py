"""Deployment files (docker/, slurm/, k8s/, docs/operations.md): syntax, security, consistency with
each other and with Tuna.

Nothing is started except shellcheck, kubectl and MariaDB's option check.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from deploy_files import (
    DOCKER,
    DOCKERFILES,
    FILES,
    K8S,
    METRICS,
    PAGE,
    PROJECT,
    ROOT,
    SCRIPTS,
    SERVICES,
    WORKLOADS,
    YAMLS,
    containers,
    load,
    name_of,
    objects,
    of_each,
    plain,
)
from kombu.transport.redis import Channel
from shared_data import needed_program

from tuna.cli.main import tuna
from tuna.coordinator import policies, publisher
from tuna.coordinator.coordinator import ALIVE
from tuna.libraries.tvm import toolchain
from tuna.settings import Settings
from tuna.vocabulary import queue_name


def test_yaml_parses_and_has_no_key_twice() -> None:
    def check(path: Path) -> None:
        assert load(path)

    of_each(YAMLS, check, name_of)


def test_json_parses_and_has_no_key_twice() -> None:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def check(path: Path) -> None:
        assert json.loads(path.read_text(), object_pairs_hook=once)

    of_each([path for path in FILES if path.suffix == ".json"], check, name_of)


@pytest.mark.service
def test_mariadb_knows_every_option_of_its_file() -> None:
    config = configparser.ConfigParser()
    config.read_string((DOCKER / "mariadb.cnf").read_text())
    wanted = {
        "character-set-server": "utf8mb4",
        "collation-server": "utf8mb4_bin",
        "transaction-isolation": "READ-COMMITTED",
        "innodb-flush-log-at-trx-commit": "1",
        "sync-binlog": "1",
    }
    assert wanted.items() <= dict(config["mariadbd"]).items()
    command = [
        needed_program("mariadbd"),
        f"--defaults-file={DOCKER / 'mariadb.cnf'}",
        "--verbose",
        "--help",
    ]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_scripts_are_good_shell() -> None:
    shellcheck = needed_program("shellcheck")

    def check(path: Path) -> None:
        assert (
            subprocess.run(["/bin/bash", "-n", path], capture_output=True, check=False).stderr
            == b""
        )
        assert os.access(path, os.X_OK) or path.suffix == ".sbatch"
        done = subprocess.run([shellcheck, path], capture_output=True, check=False, text=True)
        assert done.returncode == 0, done.stdout

    of_each(SCRIPTS, check, name_of)


def test_kubectl_can_put_the_manifests_together() -> None:
    listed = set(load(K8S / "kustomization.yaml")[0]["resources"])
    # applying the example would overwrite the real Secret
    others = {"kustomization.yaml", "secret.example.yaml"}
    assert listed == {path.name for path in YAMLS if K8S in path.parents} - others
    assert (
        subprocess.run(
            [needed_program("kubectl"), "kustomize", K8S], capture_output=True, check=False
        ).returncode
        == 0
    )


def test_each_file_says_first_what_it_is_for() -> None:
    def check(path: Path) -> None:
        first = path.read_text().splitlines()[:2]
        assert any(line.startswith("# ") and len(line) > 30 for line in first)

    of_each(
        [path for path in FILES if path.suffix != ".json" and path.name != ".gitignore"],
        check,
        name_of,
    )


def _command_lines() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, service in SERVICES.items():
        words = [plain(str(word)) for word in service.get("command", [])]
        if words and "build" in service:
            yield (
                f"compose {name}",
                (*service.get("entrypoint", ["tini", "--", "tuna"])[2:], *words),
            )
    for workload in WORKLOADS:
        for container in containers(workload):
            if "args" in container:
                yield f"k8s {workload['metadata']['name']}", ("tuna", *map(str, container["args"]))
    start = r"^\W*(?:exec |dc run --rm (?=tuna )|kubectl .* -- )?(?=(?:tuna|celery) )"
    for path in [*FILES, PAGE]:
        for line in path.read_text().splitlines():
            found = re.match(start + r"(.*)", line)
            if found and (line.startswith(("    ", "#   ", "exec ", "tuna ", "celery "))):
                yield name_of(path), tuple(shlex.split(plain(found[1]), comments=True))
    for text in re.findall(r"`((?:tuna|celery) [^`]+)`", PAGE.read_text()):
        yield name_of(PAGE), tuple(shlex.split(plain(text)))


LINES = sorted(set(_command_lines()))
_FLOWER_OPTIONS = {"--address", "--port", "--conf"}


def _parse(command: click.Command, words: list[str], *, mentioned: bool) -> None:
    """Parse `words` like `command`, without running it; raises UsageError. `mentioned`: arguments
    may be missing."""
    while isinstance(command, click.Group):
        name, *words = words
        sub = command.get_command(click.Context(command), name)
        assert sub is not None, f"there is no command {name}"
        command = sub
    try:
        command.make_context(str(command.name), words)
    except click.MissingParameter:
        if not mentioned:
            raise
    except click.BadParameter as error:
        if "does not exist" not in str(error):  # a file name in an example
            raise


def _known(where: str, words: tuple[str, ...]) -> None:
    if words[0] == "tuna":
        _parse(tuna, list(words[1:]), mentioned=where == name_of(PAGE))
        return
    from celery.bin.celery import celery

    assert words[:3] == ("celery", "-A", "tuna.celery_app")
    if words[3] == "flower":  # a plug-in that is only in the image
        assert {word.partition("=")[0] for word in words[4:]} <= _FLOWER_OPTIONS
        return
    command = celery.commands[words[3]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words[4:] if word.startswith("-")} <= known
    if words[3] == "inspect":
        assert words[4] == "active_queues"


def test_each_command_line_is_one_of_tunas() -> None:
    of_each(LINES, lambda line: _known(*line), str)


def test_the_important_command_lines_were_found() -> None:
    found = {words[:3] for _, words in LINES}
    assert {
        ("tuna", "worker", "compile"),
        ("tuna", "worker", "eval"),
        ("tuna", "enqueue", "--all"),
    } <= found
    assert {
        ("tuna", "db", "upgrade"),
        ("tuna", "metrics", "--listen"),
        ("celery", "-A", "tuna.celery_app"),
    } <= found


def test_containers_of_a_coordinator_look_at_its_sign_of_life() -> None:
    home = re.search(r"TUNA_HOME=(\S+)", (DOCKER / "Dockerfile").read_text())
    assert home is not None
    (pod,) = (one for one in WORKLOADS if one["metadata"]["name"] == "enqueue")
    (probe,) = (one["livenessProbe"] for one in containers(pod) if "livenessProbe" in one)
    looks = [SERVICES["enqueue"]["healthcheck"]["test"][-1], probe["exec"]["command"][-1]]
    for look in looks:
        assert f"$(find {home[1]}/{ALIVE} -mmin -5)" in look


def test_each_variable_is_a_setting() -> None:
    known = {f"TUNA_{name.upper()}" for name in Settings.model_fields}
    known |= {"TUNA_CONFIG", "TUNA_JOIN"}
    for field in Settings.model_fields.values():
        known |= {str(choice) for choice in getattr(field.validation_alias, "choices", [])}
    for path in [*FILES, PAGE]:
        used = set(re.findall(r"\b(?:TUNA|CELERY)_[A-Z][A-Z_]*", path.read_text()))
        assert used <= known, path


def test_the_scaled_queue_has_the_names_that_tuna_and_kombu_give() -> None:
    triggers = [trigger["metadata"] for trigger in objects("ScaledObject")[0]["spec"]["triggers"]]
    pinned = PROJECT["project"]["optional-dependencies"]["tvm"]
    version = next(
        text.removeprefix("apache-tvm==") for text in pinned if text.startswith("apache-tvm==")
    )
    name = queue_name(False, toolchain.toolchain_of(version), "")
    lists = {trigger["listName"] for trigger in triggers}
    assert lists == {name, f"{name}\x06\x16{publisher._ORDINARY}"}
    assert lists < {
        Channel.__new__(Channel)._q_for_pri(name, one) for one in Channel.priority_steps
    }
    assert all(int(trigger["listLength"]) < policies.PER_PROCESS for trigger in triggers), (
        "it could never scale up"
    )


def test_dashboards_ask_for_metrics_that_are_there() -> None:
    asked: set[str] = set()
    for path in (DOCKER / "grafana" / "dashboards").glob("*.json"):
        dashboard = json.loads(path.read_text())
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"]]
        for query in queries:
            metrics = re.findall(r"tuna_\w+", query)
            assert metrics, query
            labels = set(re.findall(r"(\w+)=~?\"", query)) | set(re.findall(r"by \((\w+)\)", query))
            assert all(labels <= METRICS[metric] for metric in metrics), query
            asked |= set(metrics)
    assert asked == set(METRICS)


def test_prometheus_asks_where_the_metrics_are() -> None:
    targets = load(DOCKER / "prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    host, _, port = targets[0].partition(":")
    assert SERVICES[host]["command"][-1].endswith(f":{port}")


def test_our_images_have_the_version_of_the_project() -> None:
    version = PROJECT["project"]["version"]
    for path in [*FILES, PAGE]:
        tags = set(re.findall(r"\btuna(?:-(?:rocm|cuda)(?:-nogpu)?)?:(\d[\w.]*)", path.read_text()))
        assert tags <= {version}, path


def test_machines_with_nvidias_gpus_compile_and_measure_triton_kernels() -> None:
    """Both images have Triton's version, and a container's runtime brings the driver."""
    stages = {"eval-cuda": "eval", "compile-cuda": "nogpu"}
    dockerfile = (DOCKER / "Dockerfile.cuda").read_text()
    for name, stage in stages.items():
        assert SERVICES[name]["profiles"] == ["gpu-cuda"]
        assert SERVICES[name]["command"][:2] == ["worker", name.partition("-")[0]]
        assert SERVICES[name]["build"]["target"] == stage
        assert re.search(rf"^FROM base AS {stage}$", dockerfile, re.MULTILINE)
        (workload,) = [one for one in WORKLOADS if one["metadata"]["name"] == name]
        image = f"tuna-cuda{'-nogpu' if stage == 'nogpu' else ''}:"
        assert image in containers(workload)[0]["image"]
        assert image in SERVICES[name]["image"]
    lock = re.search(r"-r (requirements/triton\.txt)", dockerfile)
    assert lock is not None
    assert re.search(r"^triton==", (ROOT / lock[1]).read_text(), re.MULTILINE)
    (asked,) = SERVICES["eval-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert {"gpu", "compute", "utility"} == set(asked["capabilities"])
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in dockerfile


def test_images_are_built_from_files_that_are_there() -> None:
    ignored = {(DOCKER / f"{path.name}.dockerignore").read_text() for path in DOCKERFILES}
    assert len(ignored) == 1
    allowed = {line[1:] for line in ignored.pop().splitlines() if line.startswith("!")}
    for path in DOCKERFILES:
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE):
            assert set(sources.split()) <= allowed
    assert all((ROOT / name).exists() for name in allowed)
    for service in SERVICES.values():
        if "build" in service:
            assert (ROOT / plain(service["build"]["dockerfile"])) in DOCKERFILES
