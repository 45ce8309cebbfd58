"""The options of a session: a field here is an option everywhere.

`tuna init-session`, `tuna session set` and `go_fish.py --init_session`, also by YAML, take it, and
so do `api.init_session` and `api.set_session`. The column `session.options` and archives hold it as
JSON; `tuna session show` and `tuna status` print it; docs/usage.md lists it, held by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from tuna.common.messages import choices
from tuna.errors import BadInput


def _moment(value: Any) -> datetime:
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        return moment.astimezone(timezone.utc)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("not a time such as 2027-01-31T18:00") from None


#: Time in this machine's zone unless the text names another; in UTC afterwards
_Moment = Annotated[
    datetime, BeforeValidator(_moment), PlainSerializer(datetime.isoformat, when_used="json")
]


class SessionOptions(BaseModel):
    """Options by which a session is served; each may be changed while it runs."""

    model_config = ConfigDict(frozen=True)

    priority: int = Field(0, ge=0, le=9, description="0 to 9; the highest is served first")
    deadline: _Moment | None = Field(
        None, description="when it should have ended, for the policy `deadline`: 2027-01-31T18:00"
    )
    owner: str | None = Field(
        None, max_length=64, description="command that serves it; others do only if it is named"
    )

    @classmethod
    def stored(cls, value: Mapping[str, Any] | None) -> SessionOptions:
        """Return the options that `session.options` holds."""
        return cls.model_validate(value or {})

    def changed(self, values: Mapping[str, object]) -> SessionOptions:
        """Return the options with new values; None and `none` stand for the default.

        Raises BadInput for an unknown option, and for a value that it cannot have.
        """
        fields = type(self).model_fields
        for name in values.keys() - fields.keys():
            raise BadInput(
                f"A session has no option {name!r}.", hint=choices(name, fields, "options")
            )
        kept = {name: getattr(self, name) for name in fields} | dict(values)
        try:
            return type(self)(**{k: v for k, v in kept.items() if v not in (None, "none")})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            raise BadInput(
                f"{values[name]!r} cannot be the {name} of a session:"
                f" {first['msg'].removeprefix('Value error, ')}.",
                hint=fields[name].description or "",
            ) from None

    def json_values(self) -> dict[str, Any]:
        """Return the options that are not as by default, as `session.options` holds them."""
        return self.model_dump(mode="json", exclude_defaults=True)

    def text(self, name: str) -> str:
        """Return a value for people; a time is by this place's clock."""
        value = getattr(self, name)
        if isinstance(value, datetime):
            return value.astimezone().isoformat(timespec="minutes")
        return "none" if value is None else str(value)

    def texts(self) -> dict[str, str]:
        """Return the texts of the options that are not as by default, by name."""
        return {name: self.text(name) for name in self.json_values()}


#: Options of a session for which nothing was asked
DEFAULTS = SessionOptions()
