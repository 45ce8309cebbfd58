"""What makes two layers the same: their fields as a text, and its hash."""

from __future__ import annotations

import hashlib
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar


class Content:
    """A layer known by its content. The classes of layers say which fields they have and how these make a text."""

    kind: ClassVar[str]
    json_fields: ClassVar[tuple[str, ...]]  #: in the order of `to_json`

    def to_json(self) -> dict[str, Any]:
        """The fields under MIOpen's names, and `kind`; `from_json` reads it."""
        found: dict[str, Any] = {"kind": self.kind}
        for name in self.json_fields:
            value = getattr(self, name)
            found[name] = value.value if isinstance(value, Enum) else value
        return found

    @cached_property
    def _canonical(self) -> str:
        raise NotImplementedError

    def canonical(self) -> str:
        """The text that the key is made of: every field with its name, in a fixed order, separated by `;`."""
        return self._canonical

    @cached_property
    def key(self) -> str:
        """SHA-256 of `canonical()`, 64 hex digits: equal for equal layers, whatever line they came from."""
        return hashlib.sha256(self._canonical.encode()).hexdigest()
