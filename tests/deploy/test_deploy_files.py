"""Deployment files (docker/, slurm/, k8s/, docs/operations.md): syntax, security, consistency with each other and with Tuna.

Nothing is started except shellcheck, kubectl and MariaDB's option check, if installed.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from deploy_files import (
    COMPOSE,
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
    SLURM,
    WORKLOADS,
    YAMLS,
    containers,
    load,
    name_of,
    objects,
    pod_of,
)
from shared_data import need

from tuna.cli.main import tuna
from tuna.queues import queue_name
from tuna.settings import Settings
from tuna.testing.servers import find


@pytest.mark.parametrize("path", YAMLS, ids=name_of)
def test_yaml_parses_and_has_no_key_twice(path: Path) -> None:
    assert load(path)


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix == ".json"], ids=name_of)
def test_json_parses_and_has_no_key_twice(path: Path) -> None:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    assert json.loads(path.read_text(), object_pairs_hook=once)


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
    server = find("mariadbd")
    need(server, "MariaDB (apt-get install mariadb-server)")
    command = [str(server), f"--defaults-file={DOCKER / 'mariadb.cnf'}", "--verbose", "--help"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_scripts_are_good_shell(path: Path) -> None:
    assert subprocess.run(["/bin/bash", "-n", path], capture_output=True, check=False).stderr == b""
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, path], capture_output=True, check=False, text=True)
        assert done.returncode == 0, done.stdout


def test_kubectl_can_put_the_manifests_together() -> None:
    listed = set(load(K8S / "kustomization.yaml")[0]["resources"])
    others = {"kustomization.yaml", "secret.example.yaml"}  # applying the example would overwrite the real Secret
    assert listed == {path.name for path in YAMLS if K8S in path.parents} - others
    kubectl = shutil.which("kubectl")
    if not kubectl:
        pytest.skip("kubectl is not installed")
    assert subprocess.run([kubectl, "kustomize", K8S], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix != ".json" and p.name != ".gitignore"], ids=name_of)
def test_each_file_says_first_what_it_is_for(path: Path) -> None:
    first = path.read_text().splitlines()[:2]
    assert any(line.startswith("# ") and len(line) > 30 for line in first)


def _plain(text: str) -> str:
    """`text` with variables replaced by their defaults, or by 1 if they have none."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"\$\{[^}]*\}|\$\w+", "1", text)


def _command_lines() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, service in SERVICES.items():
        words = [_plain(str(word)) for word in service.get("command", [])]
        if words and "build" in service:
            yield f"compose {name}", (*service.get("entrypoint", ["tini", "--", "tuna"])[2:], *words)
    for workload in WORKLOADS:
        for container in containers(workload):
            if "args" in container:
                yield f"k8s {workload['metadata']['name']}", ("tuna", *map(str, container["args"]))
    start = r"^\W*(?:exec |dc run --rm (?=tuna )|kubectl .* -- )?(?=(?:tuna|celery) )"
    for path in [*FILES, PAGE]:
        for line in path.read_text().splitlines():
            found = re.match(start + r"(.*)", line)
            if found and (line.startswith(("    ", "#   ", "exec ", "tuna ", "celery "))):
                yield name_of(path), tuple(shlex.split(_plain(found[1]), comments=True))
    for text in re.findall(r"`((?:tuna|celery) [^`]+)`", PAGE.read_text()):
        yield name_of(PAGE), tuple(shlex.split(_plain(text)))


LINES = sorted(set(_command_lines()))
_FLOWER_OPTIONS = {"--address", "--port", "--conf"}


def _not_there_yet(words: tuple[str, ...]) -> str:
    """Why a command line cannot be checked yet: its command does not exist."""
    if words[1] == "worker":
        context = click.Context(tuna)
        worker = tuna.get_command(context, "worker")
        if worker is None or not any("--once" in option.opts for option in worker.params):
            return "tuna worker has no --once yet"
    return ""


def _parse(command: click.Command, words: list[str], *, mentioned: bool) -> None:
    """Parse `words` like `command`, without running it; raises UsageError. `mentioned`: arguments may be missing."""
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


@pytest.mark.parametrize(("where", "words"), LINES, ids=lambda value: value if isinstance(value, str) else value[1])
def test_each_command_line_is_one_of_tunas(where: str, words: tuple[str, ...]) -> None:
    if words[0] == "tuna":
        if reason := _not_there_yet(words):
            pytest.skip(reason)
        _parse(tuna, list(words[1:]), mentioned=where == name_of(PAGE))
        return
    from celery.bin.celery import celery

    assert words[:3] == ("celery", "-A", "tuna.celery_app"), where
    if words[3] == "flower":  # a plug-in that only the image has
        assert {word.partition("=")[0] for word in words[4:]} <= _FLOWER_OPTIONS
        return
    command = celery.commands[words[3]]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words[4:] if word.startswith("-")} <= known
    if words[3] == "inspect":
        assert words[4] == "active_queues"


def test_the_important_command_lines_were_found() -> None:
    found = {words[:3] for _, words in LINES}
    assert {("tuna", "worker", "compile"), ("tuna", "worker", "eval"), ("tuna", "enqueue", "--session-id")} <= found
    assert {("tuna", "db", "upgrade"), ("tuna", "metrics", "--listen"), ("celery", "-A", "tuna.celery_app")} <= found


def test_each_variable_is_a_setting() -> None:
    known = {f"TUNA_{name.upper()}" for name in Settings.model_fields} | {"TUNA_CONFIG"}
    for field in Settings.model_fields.values():
        known |= {str(choice) for choice in getattr(field.validation_alias, "choices", [])}
    for path in [*FILES, PAGE]:
        used = set(re.findall(r"\b(?:TUNA|CELERY)_[A-Z][A-Z_]*", path.read_text()))
        assert used <= known, path


def test_the_scaled_queue_has_a_name_that_tuna_gives() -> None:
    trigger = objects("ScaledObject")[0]["spec"]["triggers"][0]
    pinned = PROJECT["project"]["optional-dependencies"]["tvm"]
    version = next(text.removeprefix("apache-tvm==") for text in pinned if text.startswith("apache-tvm=="))
    assert trigger["metadata"]["listName"] == queue_name(False, f"tvm-{version}", "")
    most = objects("ScaledObject")[0]["spec"]["maxReplicaCount"] * int(trigger["metadata"]["listLength"])
    assert most < Settings.model_fields["queue_bound"].default


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
    targets = load(DOCKER / "prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0]["targets"]
    host, _, port = targets[0].partition(":")
    assert SERVICES[host]["command"][-1].endswith(f":{port}")


def test_our_images_have_the_version_of_the_project() -> None:
    version = PROJECT["project"]["version"]
    for path in [*FILES, PAGE]:
        tags = set(re.findall(r"\btuna(?:-rocm-nogpu|-rocm|-cuda)?:(\d[\w.]*)", path.read_text()))
        assert tags <= {version}, path


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
            assert (ROOT / _plain(service["build"]["dockerfile"])) in DOCKERFILES


def _images() -> Iterator[str]:
    yield from (_plain(service["image"]) for service in SERVICES.values())
    yield from (container["image"] for workload in WORKLOADS for container in containers(workload))
    for path in DOCKERFILES:
        yield from re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("image", sorted(set(_images())))
def test_images_are_pinned(image: str) -> None:
    assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*$", image), image


def test_no_image_is_called_latest() -> None:
    assert not [path for path in FILES if re.search(r":latest\b", path.read_text())]


@pytest.mark.parametrize("path", [*FILES, PAGE], ids=name_of)
def test_no_file_holds_a_secret(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"://[^/\s:@]+:[^@\s%*]+@", text), "a URL with a password"
    assert not re.search(r"\b(?=\w*\d)(?=\w*[a-zA-Z])[A-Za-z0-9+/=]{32,}\b", text), "a long random word"


def test_passwords_come_from_files() -> None:
    environments = [service.get("environment", {}) for service in SERVICES.values()]
    for workload in WORKLOADS:
        environments += [{e["name"]: e["value"] for e in c.get("env", [])} for c in containers(workload)]
    for environment in environments:
        for name, value in environment.items():
            if re.search("PASS|SECRET|TOKEN|URL", name):
                assert name.endswith("_FILE") or value == "file:///artifacts", name
    assert not any(load(K8S / "secret.example.yaml")[0]["stringData"].values())


def test_ports_are_bound_to_loopback_unless_told_otherwise() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(_plain(port).startswith("127.0.0.1:") for port in ports)
    assert all(service["spec"].get("type", "ClusterIP") == "ClusterIP" for service in objects("Service"))
    assert not any("hostPort" in path.read_text() or "hostNetwork" in path.read_text() for path in YAMLS)


def test_workers_never_get_the_password_of_the_database() -> None:
    for name, service in SERVICES.items():
        if _plain(" ".join(service.get("command", []))).startswith("worker ") or name == "flower":
            assert not {"tuna.toml", "db-password", "db-root-password"} & set(service["secrets"]), name
    for workload in WORKLOADS:
        if workload["spec"]["template"]["metadata"]["labels"].get("app.kubernetes.io/component") == "worker":
            for volume in pod_of(workload)["volumes"]:
                keys = [item["key"] for item in volume.get("secret", {}).get("items", [])]
                assert keys in ([], ["worker.toml"]), workload["metadata"]["name"]


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if "build" in service])
def test_tunas_containers_are_locked_down(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not _plain(service["user"]).startswith("0:")
    assert "privileged" not in service


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w["metadata"]["name"])
def test_pods_are_locked_down(workload: dict[str, Any]) -> None:
    pod = pod_of(workload)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in containers(workload):
        locked = container["securityContext"]
        assert locked["readOnlyRootFilesystem"] is True
        assert locked["allowPrivilegeEscalation"] is False
        assert locked["capabilities"] == {"drop": ["ALL"]}
        assert {"requests", "limits"} <= set(container["resources"])


def test_dockerfiles_end_as_another_user_than_root() -> None:
    for path in DOCKERFILES:
        users = re.findall(r"^USER (\S+)", path.read_text(), re.MULTILINE)
        assert users[-1] == "10001", path


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_names_only_what_is_there(name: str) -> None:
    service = SERVICES[name]
    assert set(service.get("depends_on", [])) <= set(SERVICES)
    for secret in service.get("secrets", []):
        assert secret in COMPOSE["secrets"]
    for volume in service.get("volumes", []):
        source = _plain(str(volume)).split(":")[0]
        if source.startswith("./") and source != "./work":  # created by make-secrets
            assert (DOCKER / source).exists(), source
        elif not source.startswith(("/", ".")):
            assert source in COMPOSE["volumes"]
    for word in [str(value) for value in service.get("environment", {}).values()]:
        if word.startswith("/run/secrets/"):
            assert word.removeprefix("/run/secrets/") in service["secrets"]


def test_a_service_without_a_profile_needs_none_with_one() -> None:
    for service in SERVICES.values():
        for other in service.get("depends_on", []):
            assert set(SERVICES[other].get("profiles", [])) <= set(service.get("profiles", []))


def test_the_page_names_services_and_profiles_that_are_there() -> None:
    text = PAGE.read_text()
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert set(re.findall(r"--profile (\S+)", text)) <= profiles
    for names in re.findall(r"dc (?:stop|[^`\n]*up -d --no-deps) ([^`\n]+)", text):
        assert set(names.split()) <= set(SERVICES)
    assert set(re.findall(r"\bsbatch\b.* (slurm/\S+)", text)) == {name_of(path) for path in SLURM.iterdir()}


def test_each_variable_of_compose_has_a_default() -> None:
    assert not re.findall(r"(?<!\$)\$\{\w+\}", (DOCKER / "compose.yaml").read_text())


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", {})
    chosen = all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))
    return wanted.items() <= labels.items() and chosen


def _labels(workload: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w["metadata"]["name"])
def test_a_workload_names_only_what_is_there(workload: dict[str, Any]) -> None:
    assert _selects(workload["spec"]["selector"], _labels(workload))
    pod = pod_of(workload)
    secret = objects("Secret")[0]
    config = objects("ConfigMap")[0]
    claims = {claim["metadata"]["name"] for claim in objects("PersistentVolumeClaim")}
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
    for volume in pod["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["secretName"] == secret["metadata"]["name"]
            assert {item["key"] for item in volume["secret"]["items"]} <= set(secret["stringData"])
        if "configMap" in volume:
            assert volume["configMap"]["name"] == config["metadata"]["name"]
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims
    for container in containers(workload):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert all(m.get("subPath", "mariadb.cnf") in config["data"] for m in container["volumeMounts"])


def test_selectors_of_services_and_policies_match_pods() -> None:
    pods = [_labels(workload) for workload in WORKLOADS]
    for service in objects("Service"):
        assert any(_selects({"matchLabels": service["spec"]["selector"]}, labels) for labels in pods)
    for policy in objects("NetworkPolicy"):
        assert any(_selects(policy["spec"]["podSelector"], labels) for labels in pods)


@pytest.mark.parametrize(("server", "components"), [("redis", {"server", "worker"}), ("mariadb", {"server"})])
def test_only_tunas_pods_reach_the_servers(server: str, components: set[str]) -> None:
    policies = [p for p in objects("NetworkPolicy") if p["metadata"]["name"] == server]
    assert _selects(policies[0]["spec"]["podSelector"], {"app.kubernetes.io/name": server})
    sources = [source for rule in policies[0]["spec"]["ingress"] for source in rule["from"]]
    mine = [source["podSelector"] for source in sources if "namespaceSelector" not in source]
    for workload in WORKLOADS:
        component = _labels(workload).get("app.kubernetes.io/component")
        assert any(_selects(selector, _labels(workload)) for selector in mine) == (component in components)
    assert any(p["spec"]["podSelector"] == {} and "ingress" not in p["spec"] for p in objects("NetworkPolicy"))


def test_keda_scales_what_is_there_with_keys_that_are_there() -> None:
    scaled, keys = objects("ScaledObject")[0], objects("TriggerAuthentication")[0]
    assert scaled["spec"]["scaleTargetRef"]["name"] in {o["metadata"]["name"] for o in objects("Deployment")}
    assert scaled["spec"]["triggers"][0]["authenticationRef"]["name"] == keys["metadata"]["name"]
    assert {k["key"] for k in keys["spec"]["secretTargetRef"]} <= set(objects("Secret")[0]["stringData"])


def test_kubernetes_runs_the_servers_with_the_files_of_docker() -> None:
    for name, text in objects("ConfigMap")[0]["data"].items():
        assert text == (DOCKER / name).read_text(), name
