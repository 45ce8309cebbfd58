"""What docker/, slurm/ and k8s/ hold, as the tests look at it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic_settings import TomlConfigSettingsSource
from ruamel.yaml import YAML

from tuna.reports import metrics
from tuna.settings import Settings

_T = TypeVar("_T")
ROOT = Path(__file__).parents[2]
DOCKER, SLURM, K8S, PAGE = ROOT / "docker", ROOT / "slurm", ROOT / "k8s", ROOT / "docs" / "operations.md"
#: What `docker/make-secrets` makes is a person's own.
FILES = sorted(
    path
    for folder in (DOCKER, SLURM, K8S)
    for path in folder.rglob("*")
    if path.is_file() and path.name != ".env" and not {"secrets", "work"} & set(path.relative_to(folder).parts)
)
YAMLS = [path for path in FILES if path.suffix in (".yaml", ".yml")]
SCRIPTS = [path for path in FILES if path.read_text().startswith("#!")]
DOCKERFILES = [path for path in FILES if path.name.startswith("Dockerfile") and not path.name.endswith("ignore")]
PROJECT = TomlConfigSettingsSource(Settings, toml_file=ROOT / "pyproject.toml").toml_data

#: Every metric of `tuna metrics` and its labels.
METRICS = {name: set(metric.labels) for name, metric in metrics.METRICS.items()}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def load(path: Path) -> list[Any]:
    """The documents of a YAML file; YAML 1.2, a key that comes twice is an error."""
    return [document for document in YAML(typ="safe", pure=True).load_all(path.read_text()) if document is not None]


COMPOSE: dict[str, Any] = load(DOCKER / "compose.yaml")[0]
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OBJECTS = [document for path in YAMLS if K8S in path.parents for document in load(path)]
WORKLOADS = [o for o in OBJECTS if o["kind"] in ("Deployment", "StatefulSet", "DaemonSet")]


def objects(kind: str) -> list[Any]:
    return [o for o in OBJECTS if o["kind"] == kind]


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    return pod


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod_of(workload).get("initContainers", []), *pod_of(workload)["containers"]]


def title(workload: dict[str, Any]) -> str:
    """The name of an object of Kubernetes."""
    name: str = workload["metadata"]["name"]
    return name


def plain(text: str) -> str:
    """`text` with the defaults of its variables, or 1 for those that have none."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"\$\{[^}]*\}|\$\w+", "1", text)


def of_each(things: Iterable[_T], check: Callable[[_T], object], name: Callable[[_T], str] = str) -> None:
    """Check all of them, then fail with what is wrong with each."""
    found, wrong = list(things), []
    for thing in found:
        try:
            check(thing)
        except Exception as error:
            wrong.append(f"{name(thing)}: {type(error).__name__}: {error}")
    assert found, "there is nothing to check"
    assert not wrong, "\n".join(wrong)
