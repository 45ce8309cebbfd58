"""AMD's MIOpen, tuned through its program `fin`. What fin does is described in docs/miopen.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuna.libraries.miopen.library import MiopenLibrary

__all__ = ["MiopenLibrary"]


def __getattr__(name: str) -> Any:
    """The library, imported lazily: users of only MIOpen's keys and formats do not pay for it."""
    if name != "MiopenLibrary":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tuna.libraries.miopen.library import MiopenLibrary

    return MiopenLibrary
