"""JSON of models: the same for `--json` and the service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuna_models import api


def model_document(model: api.StoredModel) -> dict[str, Any]:
    """Return a model as `tuna model list --json` has it."""
    return {"name": model.name, "version": model.version}


def tasks_document(
    model: api.StoredModel,
    tasks: Sequence[api.ModelTask],
    checked: api.FileCheck | None = None,
    shares: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a model as `tuna model show --json` has it; the service has neither `checked`
    nor `shares` of the peak."""
    reasons = checked.model_dump(mode="json")["without_kernel"] if checked else None
    return model_document(model) | {
        "without_kernel": reasons,
        "tasks": [
            {"task": task.label, "key": task.key, "count": task.count}
            | {name: getattr(task.winner, name, None) for name in ("solver", "time_ms")}
            | {"of_peak": (shares or {}).get(task.label)}
            for task in tasks
        ],
    }


def file_check_document(found: api.FileCheck) -> dict[str, Any]:
    """Return a check of a file as `tuna model check --json` has it."""
    document = found.model_dump(mode="json")
    tasks = [{"task": entry.task.label, "count": entry.count} for entry in found.tasks]
    return {"refused": document.pop("obstacles"), **document, "tasks": tasks}
