"""`Config`, the base of every layer: its fields as JSON, its key and its texts."""

from __future__ import annotations

import functools
import hashlib
import json
from abc import abstractmethod
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from tuna.errors import BadInput

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Config:
    """One layer, known by its content; a kind of layer is a frozen dataclass that inherits from it.

    Its fields are whatever JSON can hold: numbers, strings, booleans, enums, tuples of these. The
    JSON form, the canonical text and the key are made from them. A subclass gives its `kind`,
    `label` and `flops`, and checks in `__post_init__` what field types do not express (raising
    BadInput or ValueError). Renaming or reordering fields changes the keys of configs in existing
    databases, and so does a new field that is not in `later_fields`.
    """

    kind: ClassVar[str]
    #: names of the fields in the order of `to_json`; empty: all, in the order of declaration
    json_fields: ClassVar[tuple[str, ...]] = ()
    #: Fields that the kind got after its first release. Where one has its default, the JSON and the
    #: canonical text leave it out, so that the keys of earlier configs stay.
    later_fields: ClassVar[tuple[str, ...]] = ()
    #: Field with the SHA-256 (64 hex digits) of the config's body, where a kind has one: bytes too
    #: large for a field, which workers find in the artifact store under that digest.
    body_field: ClassVar[str] = ""
    #: Fields with the SHA-256 of artifacts that the steps on a device need, where a kind has any:
    #: too large for SQL, so that the artifact store alone has them.
    data_fields: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def label(self) -> str:
        """A short text, one line of at most 255 characters, such as `softmax 128x1000 fp32`."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of the layer; figures in GFLOP/s are made from it."""

    def driver(self) -> str | None:
        """The driver command that is read back as this layer; None for a kind without a grammar."""
        return None

    def text(self) -> str:
        """The line that names the layer: its driver command, else its JSON text."""
        return self.driver() or self.json_text()

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The fields in the order of `to_json`."""
        return cls.json_fields or tuple(field.name for field in fields(cls))

    def stated_fields(self) -> tuple[str, ...]:
        """Fields in the JSON and the canonical text: all but `later_fields` with their defaults."""
        if not self.later_fields:
            return self.field_names()
        later = {
            name for name in self.later_fields if getattr(self, name) == getattr(type(self), name)
        }
        return tuple(name for name in self.field_names() if name not in later)

    def to_json(self) -> dict[str, Any]:
        """`kind` and the fields; `from_json` reads it."""
        found: dict[str, Any] = {"kind": self.kind}
        for name in self.stated_fields():
            value = getattr(self, name)
            found[name] = value.value if isinstance(value, Enum) else value
        return found

    def json_text(self) -> str:
        """`to_json` in one line without spaces, equal for equal layers.

        Raises BadInput for a number that JSON lacks.
        """
        try:
            return json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False)
        except ValueError as error:
            raise BadInput(f"a {self.kind} config cannot be written as JSON: {error}") from None

    @cached_property
    def _canonical(self) -> str:
        return self.json_text()

    def canonical(self) -> str:
        """The text that the key is made of: every field with its name, in a fixed order."""
        return self._canonical

    @cached_property
    def key(self) -> str:
        """SHA-256 of `canonical()` in 64 hex digits, equal for equal layers."""
        return hashlib.sha256(self._canonical.encode()).hexdigest()

    @property
    def body_digest(self) -> str | None:
        """SHA-256 of the config's body; None where it has none."""
        return getattr(self, self.body_field) or None if self.body_field else None

    @property
    def data_digests(self) -> tuple[str, ...]:
        """SHA-256 of each of `data_fields`."""
        return tuple(getattr(self, name) for name in self.data_fields)

    @classmethod
    def from_fields(cls, values: dict[str, Any]) -> Config:
        """Return the config with these JSON values and defaults for the rest; raises BadInput."""
        names = _names(cls)  # type: ignore[arg-type]
        if values.keys() == names:
            return cls.checked(values)
        unknown = [str(name) for name in values if name not in names]
        if unknown:
            raise BadInput(f"a {cls.kind} config has no field {', '.join(sorted(unknown))}")
        missing = [name for name in _required(cls) if name not in values]  # type: ignore[arg-type]
        if missing:
            raise BadInput(f"a {cls.kind} config needs {', '.join(missing)}")
        return cls.checked(values)

    @classmethod
    def checked(cls, values: dict[str, Any]) -> Config:
        """Return the config with these JSON values, checked by the fields' types; raises BadInput.

        A kind that checks the types by itself, or brings values into a normal form, overrides it.
        """
        from pydantic import ValidationError

        try:
            adapter = _adapter(cls)  # type: ignore[arg-type]
            config = adapter.validate_json(json.dumps(values, allow_nan=False), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise BadInput(f"{place or f'a {cls.kind} config'}: {first['msg']}") from None
        except (TypeError, ValueError) as error:
            raise BadInput(f"a {cls.kind} config is made of JSON values: {error}") from None
        for name in filter(None, (cls.body_field, *cls.data_fields)):
            digest = getattr(config, name)
            if digest and (len(digest) != 64 or not _HEX.issuperset(digest)):
                raise BadInput(f"{name} must be a SHA-256 in 64 hex digits")
        return config


@functools.cache
def _names(cls: type[Config]) -> frozenset[str]:
    return frozenset(cls.field_names())


@functools.cache
def _required(cls: type[Config]) -> tuple[str, ...]:
    return tuple(
        f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING
    )


@functools.cache
def _adapter(cls: type[Config]) -> TypeAdapter[Config]:
    from pydantic import TypeAdapter  # 0.1 s, and the kinds that Tuna brings need none

    return TypeAdapter(cls)
