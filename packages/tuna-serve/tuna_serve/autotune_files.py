"""Reports from the files in which Triton keeps the times of its autotuner (`*.autotune.json`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import structlog
from pydantic import BaseModel, Field, JsonValue, ValidationError
from sqlalchemy import Connection

from tuna.errors import BadInput
from tuna.results.reported import ReportedTime, record

log = structlog.get_logger(__name__)

#: End of the name of such a file.
AUTOTUNE = ".autotune.json"
#: Bounds of such a file: an autotuner tries some hundreds of configs.
MAX_BYTES, MAX_CONFIGS = 1 << 20, 10_000


class _Autotuned(BaseModel):
    """The file, as `triton.runtime.autotuner` of 3.5 to 3.8 writes it: of each config the median
    with two quantiles, or one time; infinite where it failed."""

    key: list[JsonValue]
    configs_timings: list[tuple[dict[str, JsonValue], float | list[float]]] = Field(
        max_length=MAX_CONFIGS
    )


class _Reporter(BaseModel):
    """The header with which an adapter says what the file does not."""

    device: str = Field("", max_length=128)
    versions: dict[str, str] = {}


def report(
    connection: Connection, space: str, file: str, data: bytes, who: str, reporter: str
) -> None:
    """Record the times of a file that `who` put into a space of the cache.

    One that cannot be read is logged and makes none: its program needs no report of it. `reporter`
    is the text of the header `Tuna-Reporter`.
    """
    try:
        if len(data) > MAX_BYTES:
            raise BadInput("It is too long.")
        times_file = _Autotuned.model_validate_json(data)
        told = _Reporter.model_validate_json(reporter or "{}")
        subject = f"{file.removesuffix(AUTOTUNE)} {json.dumps(times_file.key)}"
        names = who, f"space {space}", told.device, told.versions
        record(
            connection,
            [
                ReportedTime("triton", subject, _config_text(config), _time_ms(times), *names)
                for config, times in times_file.configs_timings
            ],
        )
    except (BadInput, ValidationError) as error:
        log.warning("autotune file not reported", space=space, file=file, error=str(error)[:500])


def _time_ms(times: float | list[float]) -> float | None:
    """The median; None of a config that failed."""
    median = times if isinstance(times, float) else next(iter(times), math.nan)
    return None if median == math.inf else median


def _config_text(config: Mapping[str, Any]) -> str:
    """The config as words `name=value`: the kernel's own, then what is set of Triton's."""
    own = config.get("kwargs")
    words = {**(own if isinstance(own, dict) else {}), **config}
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in words.items()
        if name != "kwargs" and value is not None
    )
