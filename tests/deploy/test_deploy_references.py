"""What the files that run a cluster name in each other is there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from deploy_files import (
    COMPOSE,
    DOCKER,
    PAGE,
    SERVICES,
    SLURM,
    WORKLOADS,
    containers,
    name_of,
    objects,
    of_each,
    plain,
    pod_of,
    title,
)


def test_a_service_names_only_what_is_there() -> None:
    def check(name: str) -> None:
        service = SERVICES[name]
        assert set(service.get("depends_on", [])) <= set(SERVICES)
        for secret in service.get("secrets", []):
            assert secret in COMPOSE["secrets"]
        for volume in service.get("volumes", []):
            source = plain(str(volume)).split(":")[0]
            if source.startswith("./") and source != "./work":  # which make-secrets makes
                assert (DOCKER / source).exists(), source
            elif not source.startswith(("/", ".")):
                assert source in COMPOSE["volumes"]
        for word in [str(value) for value in service.get("environment", {}).values()]:
            if word.startswith("/run/secrets/"):
                assert word.removeprefix("/run/secrets/") in service["secrets"]

    of_each(SERVICES, check)


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
    assert set(re.findall(r"\bsbatch\b.* (slurm/\S+)", text)) == {
        name_of(path) for path in SLURM.iterdir()
    }


def test_each_variable_of_compose_has_a_default() -> None:
    assert not re.findall(r"(?<!\$)\$\{\w+\}", (DOCKER / "compose.yaml").read_text())


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector.get("matchLabels", {})
    chosen = all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))
    return wanted.items() <= labels.items() and chosen


def _labels(workload: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def test_a_workload_names_only_what_is_there() -> None:
    def check(workload: dict[str, Any]) -> None:
        assert _selects(workload["spec"]["selector"], _labels(workload))
        pod = pod_of(workload)
        secret = objects("Secret")[0]
        config = objects("ConfigMap")[0]
        claims = {claim["metadata"]["name"] for claim in objects("PersistentVolumeClaim")}
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {
            claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])
        }
        for volume in pod["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["secretName"] == secret["metadata"]["name"]
                assert {item["key"] for item in volume["secret"]["items"]} <= set(
                    secret["stringData"]
                )
            if "configMap" in volume:
                assert volume["configMap"]["name"] == config["metadata"]["name"]
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
        for container in containers(workload):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert all(
                m.get("subPath", "mariadb.cnf") in config["data"] for m in container["volumeMounts"]
            )

    of_each(WORKLOADS, check, title)


def test_selectors_of_services_and_policies_match_pods() -> None:
    pods = [_labels(workload) for workload in WORKLOADS]
    for service in objects("Service"):
        assert any(
            _selects({"matchLabels": service["spec"]["selector"]}, labels) for labels in pods
        )
    for policy in objects("NetworkPolicy"):
        assert any(_selects(policy["spec"]["podSelector"], labels) for labels in pods)


@pytest.mark.parametrize(
    ("server", "components"), [("redis", {"server", "worker"}), ("mariadb", {"server"})]
)
def test_only_tunas_pods_reach_the_servers(server: str, components: set[str]) -> None:
    policies = [p for p in objects("NetworkPolicy") if p["metadata"]["name"] == server]
    assert _selects(policies[0]["spec"]["podSelector"], {"app.kubernetes.io/name": server})
    sources = [source for rule in policies[0]["spec"]["ingress"] for source in rule["from"]]
    mine = [source["podSelector"] for source in sources if "namespaceSelector" not in source]
    for workload in WORKLOADS:
        component = _labels(workload).get("app.kubernetes.io/component")
        assert any(_selects(selector, _labels(workload)) for selector in mine) == (
            component in components
        )


def test_a_pod_reaches_and_is_reached_by_nothing_that_no_policy_names() -> None:
    (nobody,) = [p["spec"] for p in objects("NetworkPolicy") if p["spec"]["podSelector"] == {}]
    assert nobody == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def _reachable(workload: dict[str, Any]) -> set[tuple[str, int]]:
    """(app or workload, port) of each egress rule for the pods of `workload`."""
    reachable = set()
    for policy in objects("NetworkPolicy"):
        if _selects(policy["spec"]["podSelector"], _labels(workload)):
            for rule in policy["spec"].get("egress", []):
                assert set(rule) == {"to", "ports"}, "without one of them it allows all"
                for peer in rule["to"]:
                    assert set(peer) <= {"podSelector", "namespaceSelector"}
                    labels = peer["podSelector"]["matchLabels"]
                    (name,) = labels.values()
                    assert ("namespaceSelector" in peer) == (name == "kube-dns")
                    reachable |= {(name, port["port"]) for port in rule["ports"]}
    return reachable


def test_pods_reach_dns_and_the_servers_that_they_need() -> None:
    dns, redis, mariadb = ("kube-dns", 53), ("redis", 6379), ("mariadb", 3306)
    wanted = {"server": {dns, redis, mariadb}, "worker": {dns, redis}, None: set()}

    def check(workload: dict[str, Any]) -> None:
        assert _reachable(workload) == wanted[_labels(workload).get("app.kubernetes.io/component")]

    of_each(WORKLOADS, check, title)


def test_keda_scales_what_is_there_with_keys_that_are_there() -> None:
    scaled, keys = objects("ScaledObject")[0], objects("TriggerAuthentication")[0]
    assert scaled["spec"]["scaleTargetRef"]["name"] in {
        o["metadata"]["name"] for o in objects("Deployment")
    }
    assert scaled["spec"]["triggers"][0]["authenticationRef"]["name"] == keys["metadata"]["name"]
    assert {k["key"] for k in keys["spec"]["secretTargetRef"]} <= set(
        objects("Secret")[0]["stringData"]
    )


def test_kubernetes_runs_the_servers_with_the_files_of_docker() -> None:
    for name, text in objects("ConfigMap")[0]["data"].items():
        assert text == (DOCKER / name).read_text(), name
