"""The files that run a cluster hold no secret, pin what they use and give nobody more rights than
needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy_files import (
    DOCKERFILES,
    FILES,
    K8S,
    PAGE,
    ROOT,
    SERVICES,
    WORKLOADS,
    YAMLS,
    containers,
    load,
    name_of,
    objects,
    of_each,
    plain,
    pod_of,
    title,
)


def _images() -> Iterator[str]:
    yield from (plain(service["image"]) for service in SERVICES.values())
    yield from (container["image"] for workload in WORKLOADS for container in containers(workload))
    for path in DOCKERFILES:
        stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", path.read_text(), re.MULTILINE)
        names = {name for _, name in stages}
        yield from (image for image, _ in stages if image not in names)


def test_images_are_pinned() -> None:
    """By a full version and, where it is known, a digest."""
    images = set(_images())
    assert images
    assert not [
        image
        for image in images
        if not re.search(r":v?\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?$", image)
    ]


def test_images_install_packages_by_hash_alone() -> None:
    def check(path: Path) -> None:
        installs = re.findall(r"\bpip install (.+)", path.read_text())
        assert len(installs) == 2
        assert all(
            "--require-hashes -r requirements/" in words
            or "--no-deps --no-build-isolation . ./packages/*" in words
            for words in installs
        )
        assert all((ROOT / lock).exists() for lock in re.findall(r"-r (\S+)", " ".join(installs)))

    of_each(DOCKERFILES, check, name_of)


def test_no_image_is_called_latest() -> None:
    assert not [path for path in FILES if re.search(r":latest\b", path.read_text())]


def test_no_file_holds_a_secret() -> None:
    def check(path: Path) -> None:
        text = path.read_text()
        assert not re.search(r"://[^/\s:@]+:[^@\s%*]+@", text), "a URL with a password"
        assert not re.search(r"\b(?=\w*\d)(?=\w*[a-zA-Z])[A-Za-z0-9+/=]{32,}\b", text), (
            "a long random word"
        )

    of_each([*FILES, PAGE], check, name_of)


def test_passwords_come_from_files() -> None:
    environments = [service.get("environment", {}) for service in SERVICES.values()]
    for workload in WORKLOADS:
        environments += [
            {e["name"]: e["value"] for e in c.get("env", [])} for c in containers(workload)
        ]
    for environment in environments:
        for name, value in environment.items():
            if re.search("PASS|SECRET|TOKEN|URL", name):
                assert name.endswith("_FILE") or value == "file:///artifacts", name
    assert not any(load(K8S / "secret.example.yaml")[0]["stringData"].values())


def test_ports_are_bound_to_loopback_unless_told_otherwise() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(plain(port).startswith("127.0.0.1:") for port in ports)
    assert all(
        service["spec"].get("type", "ClusterIP") == "ClusterIP" for service in objects("Service")
    )
    assert not any(
        "hostPort" in path.read_text() or "hostNetwork" in path.read_text() for path in YAMLS
    )


def test_workers_never_get_the_password_of_the_database() -> None:
    for name, service in SERVICES.items():
        if plain(" ".join(service.get("command", []))).startswith("worker ") or name == "flower":
            assert not {"tuna.toml", "db-password", "db-root-password"} & set(service["secrets"]), (
                name
            )
    for workload in WORKLOADS:
        if (
            workload["spec"]["template"]["metadata"]["labels"].get("app.kubernetes.io/component")
            == "worker"
        ):
            for volume in pod_of(workload)["volumes"]:
                keys = [item["key"] for item in volume.get("secret", {}).get("items", [])]
                assert keys in ([], ["worker.toml"]), workload["metadata"]["name"]


def test_tunas_containers_are_locked_down() -> None:
    def check(name: str) -> None:
        service = SERVICES[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert not plain(service["user"]).startswith("0:")
        assert "privileged" not in service

    of_each([name for name, service in SERVICES.items() if "build" in service], check)


def test_pods_are_locked_down() -> None:
    def check(workload: dict[str, Any]) -> None:
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

    of_each(WORKLOADS, check, title)


def test_dockerfiles_end_as_another_user_than_root() -> None:
    for path in DOCKERFILES:
        users = re.findall(r"^USER (\S+)", path.read_text(), re.MULTILINE)
        assert users[-1] == "10001", path
