"""Choices that a library offers: its job options, a pydantic model that is validated when jobs are
loaded, and conditions of measurement, which are a session's."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from tuna.common.messages import choices
from tuna.errors import BadInput

log = structlog.get_logger(__name__)


class JobOptions(BaseModel):
    """The options of a library that has none; a library's own are fields with a type, a default and
    a description.

    A field that a library does not set stays out of the database, so that its default may change.
    """

    #: present names of options by the names in which older versions stored them
    renamed: ClassVar[Mapping[str, str]] = {}

    # Numbers become text where text is asked for: on a command line one cannot tell them apart.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @property
    def max_trials(self) -> int:
        """The number of trials that a step of a job may report: a result with more is refused."""
        return 64


_Options = TypeVar("_Options", bound=JobOptions)


def check(model: type[JobOptions], given: Mapping[str, Any], library: str) -> dict[str, Any]:
    """The options as they are stored; raises BadInput that names what is wrong and lists what there
    is."""
    try:
        return model.model_validate(dict(given)).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"])) or "options"
        own = first.get("ctx", {}).get("error")  # of a validator of the model's own
        fault, meant = f"cannot be so: {own or first['msg'].lower()}", ""
        if first["type"] == "extra_forbidden":
            fault, meant = "is not known", name
        there = choices(meant, model.model_fields, f"options of {library}")
        raise BadInput(
            f"The job option {name} {fault}.",
            hint=f"{there}; see: `tuna solvers {library} --options`",
        ) from None


def read(model: type[_Options], stored: Mapping[str, Any]) -> _Options:
    """The options of a work item, as a library uses them.

    What another version stored and this one does not know, or would refuse, is left out with a line
    in the log.
    """
    return cast(
        "_Options", _read(model, json.dumps(dict(stored), sort_keys=True) if stored else "{}")
    )


@functools.lru_cache(maxsize=1000)  # the same few options come with every item, and are logged once
def _read(model: type[JobOptions], text: str) -> JobOptions:
    options = {model.renamed.get(name, name): value for name, value in json.loads(text).items()}
    while True:
        try:
            return model.model_validate(options)
        except ValidationError as error:
            faulty = {
                str(fault["loc"][0]) for fault in error.errors(include_url=False) if fault["loc"]
            } & options.keys()
            if not faulty:
                raise
            log.warning(
                "job options ignored", options={name: options[name] for name in sorted(faulty)}
            )
            options = {name: value for name, value in options.items() if name not in faulty}


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


@dataclass(frozen=True)
class Condition:
    """One choice that a library offers its sessions; results measured under different values are
    not comparable."""

    name: str
    values: tuple[str, ...]  #: allowed values, the default first
    meaning: str


#: Condition of kernels that run on this machine's cores; one with its own clock cannot be measured
#: cold
CACHES = Condition(
    "caches",
    ("warm", "cold"),
    "cold: the caches are emptied before each run, and one run is timed at a time",
)

#: Condition of convolutions, whose kernels often read and write blocks of channels
LAYOUTS = Condition(
    "layouts",
    ("layer", "native"),
    "layer: input and answer lie as the layer says, and conversions are timed; native: they lie as"
    " the kernel likes them (blocks of channels, mostly), and changing their layout is not part of"
    " the time. Weights are packed ahead in both.",
)


def chosen(offered: Sequence[Condition], given: Mapping[str, str], library: str) -> dict[str, str]:
    """Return the conditions in `given` that are not the default, sorted by name.

    Raises BadInput for a condition or a value that the library does not offer.
    """
    by_name = {condition.name: condition for condition in offered}
    for name, value in given.items():
        if name not in by_name:
            raise BadInput(
                f"{library} has no condition {name!r}.",
                hint=choices(name, by_name, "its conditions"),
            )
        if value not in by_name[name].values:
            raise BadInput(
                f"The condition {name} cannot be {value!r}.",
                hint=f"one of: {', '.join(by_name[name].values)}",
            )
    return {
        name: value for name, value in sorted(given.items()) if value != by_name[name].values[0]
    }


def complete(offered: Sequence[Condition], given: Mapping[str, str]) -> dict[str, str]:
    """Every condition of a library with its value: that of `given`, else the default."""
    return {condition.name: given.get(condition.name, condition.values[0]) for condition in offered}
