"""The wishes of a request, checked, and the bounds of what a token may ask for."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from tuna.errors import BadInput, TunaError
from tuna_serve.db.requests import Standing
from tuna_serve.settings import ServiceSettings

Kind = Literal["model", "layers"]
#: Reasons of the sessions that requests use, one of each in an environment, so that what two of
#: them have in common is tuned once.
SESSIONS: dict[str, str] = {"layers": "requests", "model": "models"}
#: Layers of a request.
MAX_LAYERS = 10_000
#: Trials that a request without a number of its own counts as: the most of a quick search for each
#: layer, and as many for a model of some dozens of tasks.
_TRIALS_OF_LAYER, _TRIALS_OF_MODEL = 64, 4096
_Extent = Annotated[int, Field(ge=1, le=1 << 20)]
_Word = Annotated[str, StringConstraints(max_length=255)]


class LimitReached(TunaError):
    """A token's bound is reached."""


class Conflict(TunaError):
    """Something else was submitted before under this key."""


_NAME = re.compile(r"^[\w. +/:-]{1,100}$")


def _checked_name(name: object) -> object:
    """Return the name; raises ValueError in words, for pydantic would answer with the pattern."""
    if isinstance(name, str) and not _NAME.fullmatch(name.strip()):
        raise ValueError("a name has 1 to 100 letters, digits, spaces and . + / : - _")
    return name


class Asked(BaseModel):
    """The wishes beside the file: an environment that sessions exist for, by `session_id`
    or by the other fields (default: this machine), and a budget."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[
        str,
        StringConstraints(strip_whitespace=True, pattern=_NAME.pattern),
        BeforeValidator(_checked_name),
    ]
    session_id: int | None = Field(
        None, ge=1, le=2**31 - 1, description="the environment of this session"
    )
    library: _Word | None = Field(None, description="default: tvm")
    arch: _Word | None = None
    device: _Word | None = Field(None, description="text in the name of the device")
    trials: int | None = Field(
        None, ge=1, le=1_000_000, description="trials in all; default: as the library sets"
    )
    minutes: float | None = Field(None, gt=0, le=10_000, description="minutes of tuning")
    target_ms: float | None = Field(
        None, gt=0, le=1e9, description="wanted time of the model, or of each layer"
    )
    priority: int = Field(0, ge=0, le=9, description="0 to 9; the highest is served first")
    batch: _Extent | None = Field(None, description="first extent of a model's inputs")
    shapes: dict[_Word, list[_Extent]] = Field(
        {}, max_length=100, description="extents of a model's inputs, or of an open extent, by name"
    )

    untuned: bool = Field(
        False, description="time a model in turn with the untuned one too, which takes long"
    )

    def digest(self, kind: Kind, upload: str) -> str:
        """Return the SHA-256 of all that is asked for."""
        document = [kind, upload, self.model_dump(mode="json")]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def counted_trials(self, layers: int | None) -> int:
        """Return the trials that this counts as; `layers`: None for a model."""
        if self.trials is not None:
            return self.trials
        return _TRIALS_OF_MODEL if layers is None else _TRIALS_OF_LAYER * layers


def check_limits(
    bounds: ServiceSettings, now: Standing, priority: int, trials: int, upload_bytes: int
) -> None:
    """Raise BadInput for a priority that a token with the role `submit` may not give, LimitReached
    if one more request, of this size, is too much."""
    if priority > bounds.submit_priority:
        raise BadInput(f"This token may ask for a priority of {bounds.submit_priority} at most.")
    if now.open >= bounds.submit_open:
        raise LimitReached(
            f"This token has {now.open} open requests, and may have {bounds.submit_open}.",
            hint="wait for one of them, or cancel it",
        )
    if now.trials + trials > bounds.submit_trials:
        raise LimitReached(
            f"The open requests of this token would take {now.trials + trials} trials, and may"
            f" take {bounds.submit_trials}.",
            hint="ask for fewer `trials`",
        )
    if now.stored_bytes + upload_bytes > bounds.submit_mib << 20:
        raise LimitReached(
            f"The files of this token's requests would take more than {bounds.submit_mib} MiB.",
            hint="delete requests that are over",
        )
