"""Job options: what a user may ask of a job, as a pydantic model per library that is checked when jobs are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tuna.errors import BadInput


class JobOptions(BaseModel):
    """The options of a library that has none; a library's own are fields with a type, a default and a description.

    A field that a library does not set stays out of the database, so that its default may change.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


def check(model: type[JobOptions], given: Mapping[str, Any], library: str) -> dict[str, Any]:
    """The options as they are stored; raises BadInput that names what is wrong and lists what there is."""
    try:
        return model.model_validate(dict(given)).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"])) or "options"
        fault = "is not known" if first["type"] == "extra_forbidden" else f"cannot be so: {first['msg'].lower()}"
        there = ", ".join(model.model_fields) or "none"
        raise BadInput(
            f"The job option {name} {fault}.",
            hint=f"options of {library}: {there}; see tuna solvers {library} --options",
        ) from None


def describe(model: type[JobOptions]) -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of each option."""
    properties = model.model_json_schema().get("properties", {})
    return [
        (
            name,
            _type_text(properties.get(name, {})),
            "" if field.is_required() else str(field.default),
            field.description or "",
        )
        for name, field in model.model_fields.items()
    ]


def _type_text(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(filter(None, (_type_text(part) for part in schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", ""))
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None and high is None:
        return "" if kind == "null" else kind
    return f"{kind} {'' if low is None else low}..{'' if high is None else high}"
